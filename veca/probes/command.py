"""`veca probe`: judge frozen backbones by linear probes, side by side in one table.

veca probe segment --data voc/ --preset voc2012 --model teacher/ --model veca-s14 --cores 8,64 --size 448 --out seg/
veca probe predict seg/heads/teacher-448px photo.jpg --out seen/
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from veca.cli import parse
from veca.errors import InputError, require
from veca.files import read_text, refuse_file
from veca.probes.presets import DEPTH, SEGMENT, DepthPreset, Layout, SegmentPreset, depth_preset, segment_preset
from veca.probes.settings import Classify, Common, DepthProbe, Fidelity, Knn, Predict, Score, Segment

USAGE = """usage: veca probe TASK [arguments]

Linear probes of frozen backbones: any VECA weights, any transformers vision model, side by side in one table.

  classify  a linear head on the global feature; class folders or CSV
  knn       nearest neighbours of the global feature; the same data
  segment   a linear head on every patch; images and index masks
  depth     a linear head on every patch; images and 16-bit depth
  teacher   cosine to the teacher a model learned from; photos without labels
  predict   use a trained head on photos
  score     a classification head on other labels of its classes (ImageNetV2, ReaL)

`veca probe TASK --help` explains each one, with examples."""


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in TASKS:
        raise InputError(f"no probe is called {name!r}; there are {', '.join(TASKS)}")
    settings, act = TASKS[name]
    chosen = parse(settings, rest, f"veca probe {name}")
    for module in ("torchmetrics", "matplotlib"):  # before the long work, not after it
        require(module, "probe")
    if isinstance(chosen, Common | Fidelity):
        chosen.command = shlex.join(["veca", "probe", *arguments])
    act(chosen)
    return 0


def classify(settings: Classify) -> None:
    from veca.probes import classify, run
    from veca.probes.data import read_classes
    from veca.probes.tables import Table

    data = read_classes(settings.data)
    table = Table("classify", settings.data.name, classify.main_metric(data.several), "higher", list(data.classes))
    _prepare(table, settings, "imagenet")
    also = run.other_label_sets(settings.also, data)
    how = classify.Training(epochs=settings.epochs)
    run.run_classify(table, data, also, _grid(settings), how, settings.out, _keep(settings.out))
    _show(table, settings.out)


def knn(settings: Knn) -> None:
    from veca.probes import run
    from veca.probes.data import read_classes
    from veca.probes.tables import Table

    data = read_classes(settings.data)
    table = Table("knn", settings.data.name, "top1_k20", "higher", list(data.classes))
    _prepare(table, settings, "imagenet")
    run.run_knn(table, data, _grid(settings), _keep(settings.out))
    _show(table, settings.out)


def segment(settings: Segment) -> None:
    from veca.probes.dense import Training
    from veca.probes.pairs import check_pairs, find_pairs
    from veca.probes.run import run_dense
    from veca.probes.segment import Segmentation
    from veca.probes.tables import Table

    layout = segment_preset(settings.preset).layout if settings.preset else None
    data = find_pairs(settings.data, "masks", layout)
    task = Segmentation(mask_labels(settings, [pair.label for pair in data.train]))
    table = Table("segment", settings.data.name, task.main, task.better, list(task.class_names()))
    _prepare(table, settings, settings.preset or settings.data.name)
    check_pairs([*data.train, *data.test], task.read_mask, "masks")
    how = Training(settings.steps, task.rate)
    run_dense(table, data, task, _grid(settings), how, settings.augment, settings.out, _keep(settings.out))
    _show(table, settings.out)


def depth(settings: DepthProbe) -> None:
    from veca.probes.dense import Training
    from veca.probes.depth import Depth
    from veca.probes.pairs import check_pairs, find_pairs
    from veca.probes.run import run_dense
    from veca.probes.tables import Table

    layout = depth_preset(settings.preset).layout if settings.preset else None
    data = find_pairs(settings.data, "depth", layout)
    task = Depth(depth_labels(settings), settings.head)
    table = Table("depth", settings.data.name, task.main, task.better)
    _prepare(table, settings, settings.preset or settings.data.name)
    check_pairs([*data.train, *data.test], task.read_depth, "depth")
    how = Training(settings.steps, task.rate)
    run_dense(table, data, task, _grid(settings), how, settings.augment, settings.out, _keep(settings.out))
    _show(table, settings.out)


def teacher(settings: Fidelity) -> None:
    from veca.probes.fidelity import fidelity

    table = fidelity(settings, _keep(settings.out))
    print(table.text())
    print(f"\nwritten to {settings.out}: results.json, results.csv, fidelity.png")


def predict(settings: Predict) -> None:
    from veca.devices import pick_device
    from veca.probes import predict
    from veca.probes.heads import Head
    from veca.probes.run import load_for

    predict.check_images(settings.images)
    refuse_file(settings.out)
    head = Head.load(settings.head)
    predict.predict(head, load_for(head, settings.model, pick_device(settings.device)), settings.images, settings.out)


def score(settings: Score) -> None:
    from veca.devices import pick_device
    from veca.probes.features import Cache
    from veca.probes.heads import Head
    from veca.probes.run import score_head

    cache = Cache(settings.cache, settings.cache_gb * 1e9)
    scores = score_head(Head.load(settings.head), settings.data, settings.labels, cache, pick_device(settings.device))
    for name, value in scores.items():
        print(f"{name}  {value:.4f}")


TASKS: dict[str, tuple[type[Any], Callable[[Any], None]]] = {
    "classify": (Classify, classify),
    "knn": (Knn, knn),
    "segment": (Segment, segment),
    "depth": (DepthProbe, depth),
    "teacher": (Fidelity, teacher),
    "predict": (Predict, predict),
    "score": (Score, score),
}


def mask_labels(settings: Any, masks: list[Path]) -> SegmentPreset:
    """The preset, or what the command line, classes.txt and the training masks say."""
    import numpy as np

    from veca.probes.pairs import read_values
    from veca.probes.progress import progress

    given = {name: getattr(settings, name) for name in ("classes", "ignore", "offset")}
    chosen = {name: value for name, value in given.items() if value is not None}
    if settings.preset:
        return replace(SEGMENT[settings.preset], **chosen)
    listed = settings.data / "classes.txt"
    names = tuple(read_text(listed).split("\n")) if listed.is_file() else ()
    names = tuple(name.strip() for name in names if name.strip())
    preset = replace(SegmentPreset(Layout("", ""), len(names), names), **chosen)
    if preset.classes == 0:
        found: set[int] = set()
        for path in progress(masks, "counting classes", len(masks)):
            found.update(np.unique(read_values(path)).tolist())
        preset = replace(preset, classes=max(found - {preset.ignore}, default=0) + preset.offset + 1)
    if preset.classes < 2:
        raise InputError(f"{settings.data}: {preset.classes} class in the masks; a probe needs at least 2")
    if preset.names and len(preset.names) != preset.classes:
        raise InputError(f"{listed}: names {len(preset.names)} classes, not {preset.classes}")
    return preset


def depth_labels(settings: Any) -> DepthPreset:
    """The preset, with what the command line says instead."""
    preset = DEPTH[settings.preset] if settings.preset else DepthPreset(Layout("", ""), 1e-3, 1e-3, 10.0)
    given = {name: getattr(settings, name) for name in ("scale", "nearest", "farthest")}
    return replace(preset, **{name: value for name, value in given.items() if value is not None})


def _grid(settings: Any) -> Any:
    from veca.devices import pick_device
    from veca.probes.features import Cache
    from veca.probes.run import Grid

    device = pick_device(settings.device)
    cache = Cache(settings.cache, settings.cache_gb * 1e9)
    return Grid(settings.model, settings.size, settings.cores, settings.seeds, device, cache)


def _prepare(table: Any, settings: Any, dataset: str) -> None:
    """What can fail before the long work: the paper's numbers. What results.json should tell: the settings."""
    from veca.probes.paper import paper_rows

    table.note(settings)
    if settings.against:
        table.paper = paper_rows(table.task, dataset)


def _keep(out: Path) -> Callable[[Any], None]:
    refuse_file(out)
    return lambda table: table.write(out)


def _show(table: Any, out: Path) -> None:
    from veca.probes.plots import draw

    draw(table, out)
    print(table.text())
    print(f"\nwritten to {out}: results.json, results.csv, budget.png, resolution.png")
