"""`veca finetune`: train a model on labels, whole or head only.

veca finetune classify --data pets/ --model veca-s14 --size 196 --epochs 10 --out runs/pets
"""

from __future__ import annotations

import shlex

import torch

from veca.cli import parse
from veca.errors import InputError, require
from veca.model import Veca, create_model
from veca.tasks import find_task, summaries, task_names
from veca.weights import load

RANDOM = "random:"
USAGE = """usage: veca finetune TASK [arguments]

Train a model on labels: the whole backbone with layer-wise rates, or the head alone. Same data folders as `veca probe`.

{tasks}

The same command again continues a run that was stopped. `veca finetune TASK --help` explains each, with examples."""


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE.format(tasks="\n".join(f"  {name:<9} {line}" for name, line in summaries().items())))
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in task_names():
        raise InputError(f"nothing to fine-tune is called {name!r}; there are {', '.join(task_names())}")
    kind = find_task(name)
    settings = parse(kind.finetune_options, rest, f"veca finetune {name}")
    settings.check()
    require("torchmetrics", "probe")
    model = start(settings.model)
    side = max(1, round(settings.size / model.patch_size)) * model.patch_size
    task = kind.open(settings)

    from veca.finetune.engine import finetune

    command = f"veca finetune {shlex.join(arguments)}"
    table = finetune(model, task, settings, side, command)
    if table is not None:
        print(table.text())
        print(f"\nwritten to {settings.out}: model/ (veca.load), head/ (veca probe predict), results.json")
    return 0


def start(source: str) -> Veca:
    """Trained weights, or fresh ones of a named size (always the same)."""
    if not source.startswith(RANDOM):
        return load(source)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return create_model(source.removeprefix(RANDOM))
