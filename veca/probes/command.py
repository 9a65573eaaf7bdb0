"""`veca probe`: judge frozen backbones by linear probes, side by side in one table.

veca probe segment --data voc/ --preset voc2012 --model teacher/ --model veca-s14 --cores 8,64 --size 448 --out seg/
veca probe predict seg/heads/teacher-448px photo.jpg --out seen/
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from veca.cli import parse
from veca.devices import pick_device, pick_dtype
from veca.errors import InputError, require
from veca.files import refuse_file
from veca.probes.settings import Fidelity, Knn, Predict, Score, Video
from veca.tasks import find_task, summaries, task_names
from veca.tasks.base.options import ProbeOptions

USAGE = """usage: veca probe TASK [arguments]

Linear probes of frozen backbones: any VECA weights, any transformers vision model, side by side in one table.

{tasks}
  video     a first frame's mask, followed through a video; DAVIS, or folders of frames and masks
  knn       nearest neighbours of the global feature; the same data
  teacher   cosine to the teacher a model learned from; photos without labels
  predict   use a trained head on photos
  score     a classification head on other labels of its classes (ImageNetV2, ReaL)

`veca probe TASK --help` explains each one, with examples."""


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE.format(tasks="\n".join(f"  {name:<9} {line}" for name, line in summaries().items())))
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in (*task_names(), *OTHERS):
        raise InputError(f"no probe is called {name!r}; there are {', '.join((*task_names(), *OTHERS))}")
    options = OTHERS[name][0] if name in OTHERS else find_task(name).probe_options
    chosen = parse(options, rest, f"veca probe {name}")
    for module in ("torchmetrics", "matplotlib"):  # before the long work, not after it
        require(module, "probe")
    if isinstance(chosen, ProbeOptions | Fidelity | Video):
        chosen.command = shlex.join(["veca", "probe", *arguments])
        dtype = pick_dtype(chosen.dtype, pick_device(chosen.device))
        chosen.dtype = "bfloat16" if dtype == torch.bfloat16 else "float32"  # results.json says which auto was
    if name in OTHERS:
        OTHERS[name][1](chosen)
    else:
        task_probe(name, chosen)
    return 0


def task_probe(name: str, options: Any) -> None:
    from veca.probes.run import run_task
    from veca.tasks.base.tables import Table

    kind = find_task(name)
    refuse_file(options.out)
    paper = _paper(name, options)
    grid = _grid(options)
    task = kind.open(options)
    table = Table(name, options.data.name, task.main, task.better, task.classes, paper=paper)
    table.note(options)
    run_task(table, task, grid, options, options.out, _keep(options.out))
    _show(table, options.out)


def knn(settings: Knn) -> None:
    from veca.probes import run
    from veca.tasks.base.classes import read_classes
    from veca.tasks.base.tables import Table

    paper = _paper("knn", settings)
    grid = _grid(settings)
    data = read_classes(settings.data)
    table = Table("knn", settings.data.name, "top1_k20", "higher", list(data.classes), paper=paper)
    table.note(settings)
    run.run_knn(table, data, grid, _keep(settings.out))
    _show(table, settings.out)


def video(settings: Video) -> None:
    from veca.probes.video import probe

    _show(probe(settings, _keep(settings.out)), settings.out, "sequences.csv")


def teacher(settings: Fidelity) -> None:
    from veca.probes.fidelity import fidelity

    table = fidelity(settings, _keep(settings.out))
    print(table.text())
    print(f"\nwritten to {settings.out}: results.json, results.csv, fidelity.png")


def predict(settings: Predict) -> None:
    from veca.probes import predict
    from veca.tasks.base.heads import load_head

    predict.check_images(settings.images)
    refuse_file(settings.out)
    head = load_head(settings.head)
    predict.predict(head, head.backbone(settings.model, pick_device(settings.device)), settings.images, settings.out)


def score(settings: Score) -> None:
    from veca.probes.run import score_head
    from veca.tasks.base.features import Cache
    from veca.tasks.base.heads import Head

    cache = Cache(settings.cache, settings.cache_gb * 1e9)
    scores = score_head(Head.load(settings.head), settings.data, settings.labels, cache, pick_device(settings.device))
    for name, value in scores.items():
        print(f"{name}  {value:.4f}")


OTHERS: dict[str, tuple[type[Any], Callable[[Any], None]]] = {
    "video": (Video, video),
    "knn": (Knn, knn),
    "teacher": (Fidelity, teacher),
    "predict": (Predict, predict),
    "score": (Score, score),
}


def _grid(settings: Any) -> Any:
    from veca.probes.run import Grid
    from veca.tasks.base.features import Cache

    device = pick_device(settings.device)
    cache = Cache(settings.cache, settings.cache_gb * 1e9)
    grid = Grid(
        settings.model, settings.size, settings.cores, settings.seeds, device, pick_dtype(settings.dtype, device),
        cache, settings.share, settings.stride, settings.patches,
    )  # fmt: skip
    grid.check()
    return grid


def _paper(task: str, options: Any) -> list[Any]:
    """The paper's numbers, where they are asked for: what can fail before the long work."""
    from veca.paper import paper_rows

    if options.against is None:
        return []
    source, _, named = options.against.partition(":")
    if source != "paper":
        raise InputError(f"--against {options.against}: it is `paper`, or `paper:NAME` to name the data set")
    return paper_rows(task, named or getattr(options, "preset", None) or options.data.absolute().name.lower())


def _keep(out: Path) -> Callable[[Any], None]:
    refuse_file(out)
    return lambda table: table.write(out)


def _show(table: Any, out: Path, *others: str) -> None:
    from veca.probes.plots import plot_scores

    plot_scores(table, out)
    print(table.text())
    print(f"\nwritten to {out}: {', '.join(['results.json', 'results.csv', *others, 'budget.png', 'resolution.png'])}")
