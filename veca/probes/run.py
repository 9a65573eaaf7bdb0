"""From settings to a table: every model at every size and budget, one row each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from veca.backbones import Backbone, load_backbone, short_names
from veca.errors import InputError
from veca.probes import classify, dense, knn, metrics
from veca.probes.data import ClassData, Example, read_examples
from veca.probes.depth import Depth
from veca.probes.features import Cache, Extractor, Features, LiveFeatures
from veca.probes.heads import Head
from veca.probes.pairs import Pair, PairData
from veca.probes.segment import Segmentation
from veca.probes.tables import Row, Table, merge_seeds
from veca.probes.views import centre_view


@dataclass(frozen=True)
class Grid:
    """What a table is made of."""

    models: Sequence[str]
    sizes: Sequence[int]
    cores: tuple[int, ...]
    seeds: int
    device: torch.device
    cache: Cache

    def check(self) -> None:
        """Refuse what cannot work before the long work: each model is loaded once and let go again."""
        if not self.models:
            raise InputError("give at least one --model")
        if self.seeds < 1 or any(size < 1 for size in self.sizes):
            raise InputError("--seeds and --size must be at least 1")
        for source in self.models:
            load_backbone(source).budgets(self.cores)

    def cells(self) -> Iterator[tuple[Backbone, int, Extractor]]:
        """Every model at every size and budget; one model is in memory at a time."""
        for source, name in zip(self.models, short_names(self.models), strict=True):
            backbone = load_backbone(source, self.device)
            backbone.name = name
            for size in self.sizes:
                for cores in backbone.budgets(self.cores):
                    yield backbone, size, Extractor(backbone, cores, self.cache)


Done = Callable[[Table], None]  # called after every row, so that a long table is never lost


def new_row(backbone: Backbone, size: int, extractor: Extractor, scores: Sequence[dict[str, Any]]) -> Row:
    values, per_class = merge_seeds(scores)
    pixels = backbone.pixels(size)
    return Row(
        backbone.name, backbone.source, backbone.digest, size, pixels, extractor.cores, values, per_class=per_class
    )


def head_name(row: Row) -> str:
    """The folder of a row's head."""
    budget = "" if row.cores is None else f"-{row.cores}cores"
    return re.sub(r"[^\w.+-]+", "_", row.model) + f"-{row.pixels}px{budget}"


def head_about(row: Row, feature: str) -> dict[str, Any]:
    """The fields that every head.json has."""
    return {
        "model": row.source,
        "weights": row.weights,
        "cores": row.cores,
        "size": row.pixels,
        "feature": feature,
    }


def run_classify(
    table: Table, data: ClassData, also: dict[str, tuple[Example, ...]], grid: Grid, how: classify.Training, out: Path,
    done: Done,
) -> None:  # fmt: skip
    for backbone, size, extractor in grid.cells():
        side = backbone.pixels(size)
        train, test = whole(extractor, data.train, side, "train"), whole(extractor, data.test, side, "test")
        validation = whole(extractor, data.validation, side, "val") if data.validation else None
        others = {name: whole(extractor, examples, side, name) for name, examples in also.items()}
        labels = classify.targets(data.test, len(data.classes), data.several)
        scores, choices = [], []
        for seed in range(grid.seeds):
            weight, bias, choice = classify.train(data, train, validation, how, seed)
            choices.append(choice)
            score = classify.score(torch.nn.functional.linear(test, weight, bias).cpu(), labels)
            for name, other in others.items():
                logits = torch.nn.functional.linear(other, weight, bias).cpu()
                answers = [example.labels for example in also[name]]
                score[f"top1 {name}"] = metrics.accuracy_of_any(logits, answers)["top1"]
            scores.append(score)
            if seed == 0:
                first = Head("classify", weight, bias)
        row = new_row(backbone, size, extractor, scores)
        first.about = {**head_about(row, "global"), "classes": list(data.classes), "several": data.several}
        finish(table, row, {"choices": choices}, first, out, done)


def whole(extractor: Extractor, examples: Sequence[Example], side: int, what: str) -> Tensor:  # V×D
    """Global features of centre crops, on the device of the backbone."""
    views = [centre_view(example.path, side) for example in examples]
    return extractor.whole(views, f"{what}, {extractor.backbone.name}").to(extractor.backbone.device)


def run_knn(table: Table, data: ClassData, grid: Grid, done: Done) -> None:
    if data.several:
        raise InputError("knn needs exactly one label an image; use `veca probe classify` for several")
    classes = len(data.classes)
    labels, truth = (classify.targets(part, classes, False) for part in (data.train, data.test))
    for backbone, size, extractor in grid.cells():
        side = backbone.pixels(size)
        train, test = whole(extractor, data.train, side, "train"), whole(extractor, data.test, side, "test")
        table.rows.append(new_row(backbone, size, extractor, [knn.scores(train, labels, test, truth, classes)]))
        done(table)


def run_dense(
    table: Table, data: PairData, task: Segmentation | Depth, grid: Grid, how: dense.Training, augment: bool, out: Path,
    done: Done,
) -> None:  # fmt: skip
    for backbone, size, extractor in grid.cells():
        side = backbone.pixels(size)
        batches: dense.CachedBatches | dense.AugmentedBatches
        if augment:
            batches = dense.AugmentedBatches(data.train, side, extractor, task)
        else:
            windows = [window for pair in data.train for window in dense.sliding(pair, side, task)]
            cached = extractor.dense([window.view for window in windows], f"train, {backbone.name}")
            batches = dense.CachedBatches(windows, cached, task)
        images, features = test_windows(data.test, side, task, extractor)
        scores = []
        for seed in range(grid.seeds):
            weight, bias = dense.train(batches, task, backbone.width, grid.device, how, seed)
            head = Head(table.task, weight.cpu(), bias.cpu())
            scores.append(task.score(dense.predictions(head, task, images, features)))
            if seed == 0:
                first = head
        row = new_row(backbone, size, extractor, scores)
        first.about = {**head_about(row, "patches+global"), **task.about()}
        finish(table, row, {}, first, out, done)


def test_windows(
    pairs: Sequence[Pair], side: int, task: Segmentation | Depth, extractor: Extractor
) -> tuple[list[list[dense.Window]], Features | LiveFeatures]:
    """The windows of every test image and their features, cached where they fit."""
    images = [dense.sliding(pair, side, task) for pair in pairs]
    views = [window.view for image in images for window in image]
    if extractor.fits(views):
        return images, extractor.dense(views, f"test, {extractor.backbone.name}")
    return images, LiveFeatures(extractor, views)


def finish(table: Table, row: Row, extra: dict[str, Any], head: Head, out: Path, done: Done) -> None:
    folder = Path("heads") / head_name(row)
    head.save(out / folder)
    row.extra = {**extra, "head": folder.as_posix()}
    table.rows.append(row)
    done(table)


def other_label_sets(paths: Sequence[Path], data: ClassData) -> dict[str, tuple[Example, ...]]:
    """`--also`: other images or labels of the same classes, by name."""
    if paths and data.several:
        raise InputError("--also needs training images with exactly one label each")
    return {path.stem: read_examples(path, data.classes, data.test) for path in paths}


def score_head(head: Head, data: Path, labels: Path | None, cache: Cache, device: torch.device) -> dict[str, float]:
    """Top-1 of a saved classification head on other images, or other labels, of its classes."""
    if head.task != "classify" or head.about["several"]:
        raise InputError("only heads of `veca probe classify` for one label an image can be scored on other labels")
    classes = head.about["classes"]
    examples = read_examples(data, classes)
    if labels is not None:
        examples = read_examples(labels, classes, examples)
    backbone = load_for(head, None, device)
    logits = head(whole(Extractor(backbone, head.about["cores"], cache), examples, head.about["size"], data.name).cpu())
    return metrics.accuracy_of_any(logits, [example.labels for example in examples])


def load_for(head: Head, model: str | None, device: torch.device) -> Backbone:
    """The backbone a head was trained on; `model` says where it is now. Other weights are refused."""
    backbone = load_backbone(model or head.about["model"], device)
    if backbone.digest != head.about["weights"]:
        raise InputError(f"{backbone.source}: not the weights this head was trained on ({head.about['model']})")
    return backbone
