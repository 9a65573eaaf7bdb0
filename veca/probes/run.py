"""From settings to a table: every model at every size and budget, one row each."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from veca._version import __version__
from veca.backbones import Backbone, load_backbone, short_names
from veca.errors import InputError
from veca.files import read_json
from veca.probes import knn
from veca.tasks.base import metrics
from veca.tasks.base.classes import ClassData, read_examples
from veca.tasks.base.contract import Task
from veca.tasks.base.features import Cache, CachedExtractor
from veca.tasks.base.heads import Head
from veca.tasks.base.tables import Row, Table, merge_seeds
from veca.tasks.classify import targets, whole


@dataclass(frozen=True)
class Grid:
    """What a table is made of."""

    models: Sequence[str]
    sizes: Sequence[int]
    cores: tuple[int, ...]
    seeds: int
    device: torch.device
    dtype: torch.dtype
    cache: Cache
    share: float = 1.0
    stride: float | None = None
    patches: tuple[float | str, ...] = (1.0,)

    def check(self) -> None:
        """Refuse what cannot work before the long work: each model is loaded once and let go again."""
        if not self.models:
            raise InputError("give at least one --model")
        if self.seeds < 1 or any(size < 1 for size in self.sizes):
            raise InputError("--seeds and --size must be at least 1")
        if not self.patches:
            raise InputError("--patches is a list of shares, such as 1,0.5")
        for source in self.models:
            backbone = load_backbone(source)
            for patches in backbone.shares(self.patches):
                backbone.reading(self.share, self.stride, patches).budgets(self.cores)

    def cells(self) -> Iterator[tuple[Backbone, int, CachedExtractor]]:
        """Every model at every size, share of its patches and budget; one model is in memory at a time."""
        for source, name in zip(self.models, short_names(self.models), strict=True):
            whole = load_backbone(source, self.device, self.dtype)
            whole.name = name
            backbones = [replace(whole).reading(self.share, self.stride, part) for part in whole.shares(self.patches)]
            for size, backbone in product(self.sizes, backbones):
                for cores in backbone.budgets(self.cores):
                    yield backbone, size, CachedExtractor(backbone, cores, self.cache)


Done = Callable[[Table], None]  # called after every row, so that a long table is never lost


def new_row(backbone: Backbone, size: int, extractor: CachedExtractor, scores: Sequence[dict[str, Any]]) -> Row:
    values, per_class = merge_seeds(scores)
    pixels = backbone.pixels(size)
    return Row(
        backbone.name, backbone.source, backbone.digest, size, pixels, extractor.cores, values, per_class=per_class,
        patches=backbone.patches,
    )  # fmt: skip


def head_name(row: Row) -> str:
    """The folder of a row's head."""
    budget = "" if row.cores is None else f"-{row.cores}cores"
    spent = "" if row.patches == 1 else f"-{row.patches}patches"
    return re.sub(r"[^\w.+-]+", "_", row.model) + f"-{row.pixels}px{budget}{spent}"


def run_task(table: Table, task: Task, grid: Grid, options: Any, out: Path, done: Done) -> None:
    """Heads of one task on every model at every size and budget; a row that `out` holds is not trained again."""
    table.made_with = made_with(table, task)
    known = earlier_rows(table, out)
    for backbone, size, extractor in grid.cells():
        before = known.get((backbone.digest, size, extractor.cores, backbone.patches))
        if before is not None:
            print(f"{out / before.extra['head']}: trained before", flush=True)
            table.rows.append(replace(before, model=backbone.name, source=backbone.source))
            done(table)
            continue
        fitted = task.fit(extractor, backbone.pixels(size), options, grid.seeds)
        row = new_row(backbone, size, extractor, fitted.scores)
        head = fitted.head
        head.about = {**row.for_head(), "dtype": str(grid.dtype).removeprefix("torch."), **head.about}
        folder = Path("heads") / head_name(row)
        head.save(out / folder)
        row.extra = {**fitted.extra, "head": folder.as_posix()}
        table.rows.append(row)
        done(table)


def made_with(table: Table, task: Task) -> str:
    """A digest of what decides a row's score, besides what the row itself names: options, examples and their files."""
    of_rows = ("data", "model", "size", "cores", "patches", "against", "device")
    chosen = {name: value for name, value in table.settings.items() if name not in of_rows}
    digest = hashlib.sha256(json.dumps([__version__, torch.__version__, chosen]).encode())
    for part, examples in task.parts.items():
        digest.update(f"{part}{list(examples)!r}".encode())
        for path in task.files(part):
            status = path.stat()
            digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def earlier_rows(table: Table, out: Path) -> dict[tuple[Any, ...], Row]:
    """Rows that a run with these options on this data left in `out`, by weights, size, budget and share."""
    try:
        left = read_json(out / "results.json")
        rows = [Row.from_json(row) for row in left["rows"]] if left.get("made_with") == table.made_with else []
    except (InputError, OSError, AttributeError, KeyError, TypeError):  # there is none, or it is damaged
        return {}
    whole = [row for row in rows if (out / row.extra.get("head", "") / "head.json").is_file()]
    return {(row.weights, row.size, row.cores, row.patches): row for row in whole}


def run_knn(table: Table, data: ClassData, grid: Grid, done: Done) -> None:
    if data.several:
        raise InputError("knn needs exactly one label an image; use `veca probe classify` for several")
    classes = len(data.classes)
    labels, truth = (targets(part, classes, False) for part in (data.train, data.test))
    for backbone, size, extractor in grid.cells():
        side = backbone.pixels(size)
        train, test = whole(extractor, data.train, side, "train"), whole(extractor, data.test, side, "test")
        table.rows.append(new_row(backbone, size, extractor, [knn.scores(train, labels, test, truth, classes)]))
        done(table)


def score_head(head: Head, data: Path, labels: Path | None, cache: Cache, device: torch.device) -> dict[str, float]:
    """Top-1 of a saved classification head on other images, or other labels, of its classes."""
    if head.task != "classify" or head.about["several"]:
        raise InputError("only heads of `veca probe classify` for one label an image can be scored on other labels")
    classes = head.about["classes"]
    examples = read_examples(data, classes)
    if labels is not None:
        examples = read_examples(labels, classes, examples)
    backbone = head.backbone(None, device)
    extractor = CachedExtractor(backbone, head.about["cores"], cache)
    logits = head(whole(extractor, examples, head.about["size"], data.name).cpu())
    return metrics.accuracy_of_any(logits, [example.labels for example in examples])
