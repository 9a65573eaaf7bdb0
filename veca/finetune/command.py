"""`veca finetune`: train a model on labels, whole or head only.

veca finetune classify --data pets/ --model veca-s14 --size 196 --epochs 10 --out runs/pets
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

import torch

from veca.cli import parse
from veca.errors import InputError, require
from veca.finetune.settings import Classify, Depth, Segment
from veca.model import Veca, create_model
from veca.weights import load

RANDOM = "random:"
USAGE = """usage: veca finetune TASK [arguments]

Train a model on labels: the whole backbone with layer-wise rates, or the head alone. Same data folders as `veca probe`.

  classify  a linear head on the global feature; class folders or CSV
  segment   a linear head on every patch; images and index masks
  depth     a linear head on every patch; images and 16-bit depth

The same command again continues a run that was stopped. `veca finetune TASK --help` explains each, with examples."""


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in TASKS:
        raise InputError(f"nothing to fine-tune is called {name!r}; there are {', '.join(TASKS)}")
    kind, build = TASKS[name]
    settings = parse(kind, rest, f"veca finetune {name}")
    settings.check()
    require("torchmetrics", "probe")
    model = start(settings.model)
    side = max(1, round(settings.size / model.patch_size)) * model.patch_size
    task = build(settings, side)

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


def classify(settings: Classify, side: int) -> Any:
    from veca.finetune.tasks import Classes
    from veca.probes.data import read_classes

    return Classes(read_classes(settings.data), side, settings.workers)


def segment(settings: Segment, side: int) -> Any:
    from veca.finetune.tasks import Pixels
    from veca.probes.command import mask_labels
    from veca.probes.pairs import check_pairs, find_pairs
    from veca.probes.presets import segment_preset
    from veca.probes.segment import Segmentation

    data = find_pairs(settings.data, "masks", segment_preset(settings.preset).layout if settings.preset else None)
    task = Segmentation(mask_labels(settings, [pair.label for pair in data.train]))
    check_pairs([*data.train, *data.test], task.read_mask, "masks")
    return Pixels(task, data, side)


def depth(settings: Depth, side: int) -> Any:
    from veca.finetune.tasks import Pixels
    from veca.probes import depth
    from veca.probes.command import depth_labels
    from veca.probes.pairs import check_pairs, find_pairs
    from veca.probes.presets import depth_preset

    data = find_pairs(settings.data, "depth", depth_preset(settings.preset).layout if settings.preset else None)
    task = depth.Depth(depth_labels(settings), settings.head)
    check_pairs([*data.train, *data.test], task.read_depth, "depth")
    return Pixels(task, data, side)


TASKS: dict[str, tuple[type[Any], Callable[[Any, int], Any]]] = {
    "classify": (Classify, classify),
    "segment": (Segment, segment),
    "depth": (Depth, depth),
}
