"""What kind of animal is where on 3840×2160 photographs: quality against milliseconds, for veca-s14 and its teacher.

    python tools/judged.py --mirror ../.mirror --out ../data          # lays the photographs out, once
    python tools/cells.py --data ../data/underwater --out results/cells
    python tools/cells.py --data ../data/underwater --out results/cells --time      # on a machine at rest

Every photograph is cut into 64×36 cells; a cell shows a kind if its centre lies in one of that kind's boxes. Features
are brought to the cells (averaged where they are finer, bilinear where coarser), and one linear head a row, logistic
regression with the same penalty for all, tells the four kinds. `mAP` is the mean of their average precisions over the
cells of all test photographs, `deviation` its spread when these are drawn again (bootstrap). Photographs are frames of
dives: train and test come from different stretches. Features stay in --out, so a stopped run goes on where it was.
"""

from __future__ import annotations

import inspect
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
import tyro
from safetensors.torch import load_file, save_file
from sklearn.metrics import average_precision_score
from steps import Rows, write_csv
from torch import Tensor, nn
from underwater import CELLS, KINDS, Array, Photo, read_photos, split

from veca.backbones import Backbone, load_backbone
from veca.errors import InputError
from veca.extract.extractor import Extractor
from veca.files import read_json, whole_file, write_json
from veca.progress import progress
from veca.windows import tent

TILE = 448
PART = 20  # photographs a file of features
DRAWS = 20
DTYPES = ("bfloat16", "float32")


@dataclass
class Settings:
    """Judge a model and its teacher on cells of large photographs."""

    data: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("../data/underwater")
    """holds JPEGImages/ and Annotations/"""
    model: str = "veca-s14"
    """the model that is judged"""
    teacher: str = "../shared/teacher/dav2-small-encoder"
    """its teacher"""
    cores: tuple[int, ...] = (8, 64)
    """budgets"""
    shares: tuple[float, ...] = (1.0, 0.25)
    """of the patches that the cores read"""
    patches: tuple[float, ...] = (1.0,)
    """shares of them that are spent, at mixed scale"""
    sizes: tuple[int, ...] = (448, 896, 1344, 1792)
    """widths of the photographs; heights are 9/16 of that"""
    a_stretch: int = 10
    """photographs of each of the 24 stretches: 16 to train on, 8 to test"""
    time: tyro.conf.FlagCreatePairsOff[bool] = False
    """measure milliseconds, in bfloat16 and float32, instead of quality (which is of bfloat16)"""
    rounds: int = 5
    """of measuring time, interleaved; the best counts"""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("results/cells")
    """folder for cells.csv (or times.csv), the features and the scores"""


class Row(NamedTuple):
    """One way to see a photograph."""

    model: str  # "teacher" or what the judged one is called
    cores: int | None
    share: float
    tiles: str  # "", "apart" or "overlapping"
    patches: float = 1.0

    @property
    def name(self) -> str:
        budget = f"-{self.cores}cores" if self.cores else ""
        return (
            self.model
            + budget
            + (f"-share{self.share:g}" if self.share < 1 else "")
            + (f"-patches{self.patches:g}" if self.patches < 1 else "")
            + (self.tiles and f"-{self.tiles}")
        )


def rows_of(settings: Settings, width: int) -> list[Row]:
    """The teacher whole and, where it is larger than one, in tiles; the model by budget, share read and share spent."""
    tiles = ("", "apart", "overlapping") if width > TILE else ("",)
    name = Path(settings.model).name
    return [Row("teacher", None, 1.0, way) for way in tiles] + [
        Row(name, cores, share, "", patches)
        for patches, share, cores in product(settings.patches, settings.shares, settings.cores)
        if patches == 1 or share == 1
    ]


class Ways:
    """Turns pixels into features in the way of a row."""

    def __init__(self, settings: Settings, dtype: str) -> None:
        precision: torch.dtype = getattr(torch, dtype)
        self.teacher = load_backbone(settings.teacher, dtype=precision)
        self.model = load_backbone(settings.model, dtype=precision)
        for share in settings.shares:
            self.model.reading(share, None)
        for patches in settings.patches:
            self.model.reading(1.0, None, patches)
        self.model.budgets(settings.cores)  # refused before the long work

    def backbone(self, row: Row) -> Backbone:
        return self.teacher if row.model == "teacher" else replace(self.model, share=row.share, patches=row.patches)

    def digest(self, row: Row) -> str:
        return (self.teacher if row.model == "teacher" else self.model).digest[:12]

    def grid(self, row: Row, pixels: Array) -> Tensor:  # h×w×D
        backbone = self.backbone(row)
        extractor, patch = Extractor(backbone, cores=row.cores), backbone.patch_size
        high, wide = pixels.shape[0] // patch, pixels.shape[1] // patch
        if not row.tiles:
            return extractor.compute(pixels[None]).patches[0].unflatten(0, (high, wide))
        overlap = row.tiles == "overlapping"
        (tops, tall), (lefts, broad) = (cuts(side, TILE // patch, overlap) for side in (high, wide))
        places = list(product(tops, lefts))
        tiles = np.stack([
            pixels[top * patch : (top + tall) * patch, left * patch : (left + broad) * patch] for top, left in places
        ])  # fmt: skip
        found = extractor.compute(tiles).patches.unflatten(1, (tall, broad))
        weight = torch.from_numpy(tent(tall)[:, None] * tent(broad))[..., None] if overlap else torch.ones(1, 1, 1)
        total, weights = torch.zeros(high, wide, found.shape[-1]), torch.zeros(high, wide, 1)
        for (top, left), features in zip(places, found, strict=True):
            total[top : top + tall, left : left + broad] += features * weight
            weights[top : top + tall, left : left + broad] += weight
        return total / weights


def cuts(length: int, tile: int, overlap: bool) -> tuple[list[int], int]:
    """Where tiles begin along an axis, and their length: equal ones, or overlapping by a quarter or more."""
    if length <= tile:
        return [0], length
    if not overlap:
        count = next(count for count in range(2, length + 1) if length % count == 0 and length // count <= tile)
        return list(range(0, length, length // count)), length // count
    count = -(-(length - tile // 4) // (tile - tile // 4))
    return [round(number * (length - tile) / (count - 1)) for number in range(count)], tile


def to_cells(grid: Tensor, lattice: tuple[int, int] = CELLS) -> Tensor:  # h×w×D → cells×D
    image = grid.movedim(-1, 0)[None]
    if grid.shape[0] > lattice[0]:
        image = nn.functional.interpolate(image, lattice, mode="area")
    else:
        image = nn.functional.interpolate(image, lattice, mode="bilinear", align_corners=False)
    return image[0].flatten(1).T


def extract(settings: Settings, ways: Ways, rows: Sequence[Row], photos: Sequence[Photo], width: int) -> None:
    """Features of every row at this width, a file for each part of the photographs."""
    parts = [photos[first : first + PART] for first in range(0, len(photos), PART)]
    due = [part for part in parts if not all(feature_file(settings, ways, row, width, part).is_file() for row in rows)]
    random.shuffle(due)  # several processes may share the work
    for part in progress(due, f"features, {width} wide", len(due)):
        pixels = [photo.pixels(width) for photo in part]
        for row in rows:
            path = feature_file(settings, ways, row, width, part)
            if not path.is_file():
                found = [to_own(ways.grid(row, one)).half() for one in pixels]
                with whole_file(path) as temporary:
                    save_file({"grid": torch.stack(found)}, temporary)


def to_own(grid: Tensor) -> Tensor:
    """What is kept: no finer than the cells."""
    return to_cells(grid).unflatten(0, CELLS) if grid.shape[0] > CELLS[0] else grid


def feature_file(settings: Settings, ways: Ways, row: Row, width: int, part: Sequence[Photo]) -> Path:
    folder = settings.out / "features" / f"{row.name}-{ways.digest(row)}-{width}"
    return folder / f"{part[0].path.stem}-{len(part)}.safetensors"


def read_cells(settings: Settings, ways: Ways, row: Row, width: int, photos: Sequence[Photo]) -> Iterator[Tensor]:
    for first in range(0, len(photos), PART):
        stored = load_file(feature_file(settings, ways, row, width, photos[first : first + PART]))["grid"]
        yield from (to_cells(grid.float()) for grid in stored)


def score(features: Iterator[Tensor], labels: Sequence[Array], train: int) -> dict[str, float]:
    """features: per photograph cells×D; the first `train` photographs teach the head, the others test it."""
    draw = np.random.default_rng(0)
    own, truth = [], []
    for one, told in zip(islice(features, train), labels, strict=False):  # neighbours are alike: a third is enough
        chosen = draw.permutation(len(told))[: len(told) // 3]
        own.append(one[chosen])
        truth.append(told[chosen])
    taught = torch.cat(own)
    mean, deviation = taught.mean(0), taught.std(0) + 1e-6
    weight, bias = fit_head(taught.sub_(mean).div_(deviation), torch.from_numpy(np.concatenate(truth)))
    said, tests = [((one - mean) / deviation @ weight + bias).numpy() for one in features], labels[train:]
    values = precisions(said, tests)
    draws = draw.integers(len(tests), size=(DRAWS, len(tests)))
    again = [np.nanmean(precisions([said[i] for i in few], [tests[i] for i in few])) for few in draws]
    return {
        "mAP": float(np.nanmean(values)),
        "deviation": float(np.std(again)),
        **dict(zip(KINDS, values, strict=True)),
    }


def precisions(said: Sequence[Array], tests: Sequence[Array]) -> list[float]:
    """Average precision of each kind over all cells; not a number for a kind that is nowhere."""
    scores, truth = np.concatenate(said), np.concatenate(tests)
    return [
        float(average_precision_score(truth[:, kind], scores[:, kind])) if truth[:, kind].any() else float("nan")
        for kind in range(len(KINDS))
    ]


def fit_head(features: Tensor, truth: Tensor, penalty: float = 1e-4) -> tuple[Tensor, Tensor]:
    """Logistic regression for each kind, to its optimum from zero: no seed, no rate to choose."""
    weight = torch.zeros(features.shape[1], truth.shape[1], requires_grad=True)
    bias = torch.zeros(truth.shape[1], requires_grad=True)
    optimiser = torch.optim.LBFGS([weight, bias], max_iter=80, history_size=10, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(features @ weight + bias, truth)
        loss = loss + penalty * weight.square().sum()
        loss.backward()
        return loss

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    return weight.detach(), bias.detach()


def judge(settings: Settings) -> None:
    train, test = split(read_photos(settings.data), settings.a_stretch)
    photos, labels = [*train, *test], [photo.labels() for photo in [*train, *test]]
    counts = ", ".join(
        f"{kind} {int(sum(one[:, n].sum() for one in labels[len(train) :]))}" for n, kind in enumerate(KINDS)
    )
    print(f"{len(train)} photographs to train on, {len(test)} to test; test cells: {counts}", flush=True)
    ways = Ways(settings, "bfloat16")
    for width in settings.sizes:
        rows = rows_of(settings, width)
        extract(settings, ways, rows, photos, width)
        for row in rows:
            path = score_file(settings, ways, row, width)
            if not path.is_file():
                found = score(read_cells(settings, ways, row, width, photos), labels, len(train))
                write_json(path, found)
                print(f"{width:5} {row.name:<32} mAP {found['mAP']:.3f} ± {found['deviation']:.3f}", flush=True)


def score_file(settings: Settings, ways: Ways, row: Row, width: int) -> Path:
    return settings.out / "scores" / f"{row.name}-{ways.digest(row)}-{width}-{settings.a_stretch}.json"


def measure(settings: Settings) -> None:
    """The rows of one size take turns; decoding, resizing and going to cells are not in it. A size that is measured is
    not measured again."""
    photo = read_photos(settings.data)[0]
    for dtype, width in product(DTYPES, settings.sizes):
        ways, rows = Ways(settings, dtype), rows_of(settings, width)
        path = time_file(settings, ways, dtype, width)
        if path.is_file():
            continue
        pixels = photo.pixels(width)
        best = dict.fromkeys((row.name for row in rows), float("inf"))
        for _ in progress(range(settings.rounds), f"{width} wide, {dtype}", settings.rounds):
            for row in rows:
                began = time.perf_counter()
                ways.grid(row, pixels)
                best[row.name] = min(best[row.name], time.perf_counter() - began)
        write_json(path, {name: 1000 * spent for name, spent in best.items()})
        print(
            f"{width:5} {dtype} " + "  ".join(f"{name} {1000 * spent:.0f}" for name, spent in best.items()), flush=True
        )


def time_file(settings: Settings, ways: Ways, dtype: str, width: int) -> Path:
    return settings.out / "times" / f"{Path(settings.model).name}-{ways.model.digest[:12]}-{dtype}-{width}.json"


def table(settings: Settings) -> Rows:
    """What is known by now of these models."""
    known: Rows = []
    every = {dtype: Ways(settings, dtype) for dtype in DTYPES}
    for width in settings.sizes:
        for row in rows_of(settings, width):
            line = {**row._asdict(), "cores": row.cores or "", "tiles": row.tiles or "whole", "width": width}
            if settings.time:
                for dtype, ways in every.items():
                    path = time_file(settings, ways, dtype, width)
                    line[f"ms_{dtype}"] = f"{read_json(path)[row.name]:.0f}" if path.is_file() else ""
            else:
                path = score_file(settings, every["bfloat16"], row, width)
                found = read_json(path) if path.is_file() else {}
                line |= {name: f"{found[name]:.4f}" if found else "" for name in ("mAP", "deviation", *KINDS)}
            known.append(line)
    return known


def main() -> int:
    settings = tyro.cli(Settings, prog="python tools/cells.py", description=inspect.getdoc(Settings))
    try:
        (measure if settings.time else judge)(settings)
        path = settings.out / ("times.csv" if settings.time else "cells.csv")
        write_csv(path, table(settings))
    except InputError as error:
        print(f"cells: {error}", file=sys.stderr)
        return 2
    print(path.read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
