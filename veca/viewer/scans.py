"""A scan of every level of an image, and what the page asks of them: look at a screen, at a box, find its like.

A patch has as many pixels at every level, so at level k it covers 2ᵏ times as much of the image. The level of a
screen is the finest at which it has no more than MOST patches, and a stride below the patch size brings it to about
WANTED: whatever the zoom, all that is on the screen was seen by some patch, at about the resolution of the screen.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from veca.analysis.projection import Array, Pca, align, oklab_to_rgb
from veca.caches import cache_folder
from veca.errors import InputError
from veca.large.options import file_stamp
from veca.large.picture import Picture, open_source
from veca.model import Veca
from veca.scan import Look, Scan
from veca.scan_file import digest_of, opened
from veca.viewer.pyramid import LevelSource, Pyramid

WANTED, MOST = 1024, 1400  # patches of a screen
FEW = 640  # places spread over the image by which colours and scales are chosen
WHOLE = 12_000  # patches of the finest level whose every feature is kept, to find places in the whole image
LARGEST = 65_536  # patches of a box whose features are given
SPILL = 2 << 30  # bytes of tokens beyond which a scan keeps them on the disk
CACHED = 256  # scans kept in the cache, of about a megabyte each
Box = tuple[int, int, int, int]  # x, y, width, height in pixels of the image
Report = Callable[[str, float], None]  # what is being done, how much of it is done


class Palette:
    """How features become colours at one level: fitted to places spread over the image, like the level above."""

    def __init__(self, scan: Scan, spread: Look, above: Palette | None) -> None:
        self.inside = spread.inside.numpy()
        every = unit(spread.features.numpy())
        rows = every[self.inside] if self.inside.sum() > 3 else unit(scan.cores.numpy())  # a mask of nearly nothing
        self.pca = Pca(rows)
        self.turn = np.eye(3, dtype=np.float32)
        if above is not None and (both := self.inside & above.inside).sum() > 3:
            self.turn = align(self.pca(every[both]), above.placed[both])
        self.placed: Array = self.pca(every) @ self.turn
        self.ends = np.percentile(self.pca(rows) @ self.turn, (1, 99), axis=0)
        self.low = float(np.quantile(rows[:: max(1, len(rows) // 256)] @ rows.T, 0.05))  # 5 % of pairs are less alike
        self.cls = unit(scan.cls.numpy())
        self.overall = tuple(np.quantile(rows @ self.cls, (0.01, 0.99)).tolist())

    def __call__(self, rows: Array) -> np.ndarray[Any, np.dtype[np.uint8]]:  # n×D → n×3
        low, high = self.ends
        cube = np.clip((self.pca(rows) @ self.turn - low) / np.maximum(high - low, 1e-6), 0, 1)
        painted: np.ndarray[Any, np.dtype[np.uint8]] = (oklab_to_rgb(cube * 2 - 1) * 255).round().astype(np.uint8)
        return painted


@dataclass
class Level:
    number: int
    picture: Picture
    patch: int
    scan: Scan | None = None
    palette: Palette | None = None  # with it, the level is ready
    whole: Tensor | None = None  # h×w×D float16, unit vectors; of levels of at most WHOLE patches

    @property
    def factor(self) -> int:
        return 1 << self.number

    @property
    def grid(self) -> tuple[int, int]:
        return self.picture.size[1] // self.patch, self.picture.size[0] // self.patch

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in whole patches, in pixels of the level"""
        return self.grid[1] * self.patch, self.grid[0] * self.patch

    @property
    def patches(self) -> int:
        return self.grid[0] * self.grid[1]


class Stopped(Exception):
    """The viewer was closed while it scanned."""


class Seen(NamedTuple):
    """What was looked at: unit vectors of a lattice of patches, and of the place that was asked about."""

    level: Level
    stride: int  # in pixels of the level
    box: Box  # of the image, that the lattice covers
    rows: Array  # h×w×D
    inside: np.ndarray[Any, np.dtype[np.bool_]]  # h×w
    query: Array | None  # D


class Scans:
    def __init__(
        self, model: Veca, pyramid: Pyramid, cores: int | None, image: Path, given: Path | None = None
    ) -> None:
        self.model, self.pyramid, self.image = model, pyramid, image
        self.patch, self.weights = model.patch_size, digest_of(model)
        self.levels: list[Level] = []
        if min(pyramid.sizes[0]) < self.patch:
            size = "×".join(map(str, pyramid.sizes[0]))
            raise InputError(f"{image}: {size} is smaller than a patch of {self.patch}×{self.patch}")
        for number in range(len(pyramid.sizes)):
            self.levels.append(Level(number, open_source(LevelSource(pyramid, number)), self.patch))
            if self.levels[-1].patches <= MOST:
                break
        most = self.levels[-1].patches
        if most > WHOLE:
            raise InputError(f"{image}: too long and thin to be shown: {most} patches beside each other")
        self.where: Tensor | None = None
        if given is not None:
            scan = self.levels[0].scan = opened(given, self.levels[0].picture, model, self.weights)
            cores, self.where = len(scan.cores), scan.inside
        self.cores = model.budget(cores)
        self.stopped = False
        self.free = threading.Event()  # nobody looks: scanning goes on
        self.free.set()
        self.looking = threading.Lock()

    # Scanning, in a thread of its own.

    def run(self, report: Report) -> None:
        """Reduced copies, then scans from the coarsest level to the finest: each is ready as soon as it is made."""
        self.pyramid.reduce(lambda what, done, total: report(what, done / total))
        above: Palette | None = None
        for level in reversed(self.levels):
            scan = level.scan or self.scanned(level, report)
            if level.patches <= WHOLE:
                level.whole = torch.from_numpy(unit(scan.look(report=self.wait).features.numpy())).half()
            palette = Palette(scan, scan.look(points=self.spread(level), report=self.wait), above)
            level.scan, level.palette, above = scan, palette, palette
        report("", 1)

    def wait(self, *_: object) -> None:
        """Between two pieces of work: until nobody looks; the end of it once the page is closed."""
        self.free.wait()
        if self.stopped:
            raise Stopped

    def spread(self, level: Level) -> list[tuple[float, float]]:
        """Places over the whole level, the same of the image at every level; inside the mask, if there is one."""
        width, height = self.pyramid.sizes[0]
        across = max(1, round((FEW * width / height) ** 0.5))
        down = max(1, round(FEW / across))
        width, height = level.size
        return [((x + 0.5) / across * width, (y + 0.5) / down * height) for y in range(down) for x in range(across)]

    def scanned(self, level: Level, report: Report) -> Scan:
        """From the cache, or made now and kept there."""
        file, count = self.cache_file(level), level.patches
        if file.is_file():
            with contextlib.suppress(InputError, OSError):  # damaged: scan again
                scan = opened(file, level.picture, self.model, self.weights)
                file.touch()
                return scan
        what = f"scanning at 1:{level.factor}" if level.number else "scanning at full resolution"
        report(what, 0)

        def step(stage: str, done: int, total: int) -> None:
            self.wait()
            if stage.startswith("layer"):
                report(what, (int(stage.split()[1]) - 1 + done / total) / self.model.depth)

        spill = cache_folder("view") if count * self.model.config.width * 4 > SPILL else None
        try:
            scan = self.model.scan(level.picture, self.cores, where=self.mask(level), spill=spill, report=step)
        except MemoryError:
            raise InputError(f"{self.image}: no memory for the tokens of its {count} patches") from None
        with contextlib.suppress(OSError):  # no room, or not ours to write to: the next start scans again
            scan.save(file)
            prune(file.parent)
        return scan

    def mask(self, level: Level) -> Tensor | None:
        """The mask of the scan that was given, unless nothing of it is left at this level."""
        if self.where is None:
            return None
        covered = nn.functional.adaptive_avg_pool2d(self.where.float()[None, None], level.grid)
        return self.where if bool((covered >= 0.5).any()) else None

    def cache_file(self, level: Level) -> Path:
        masked = "" if self.where is None else hashlib.sha256(self.where.numpy().tobytes()).hexdigest()
        view = sorted(self.pyramid.picture.view.items())
        stamp = file_stamp(self.image)
        about = (self.weights, str(self.image.resolve()), stamp, view, self.cores, masked, level.number)
        return cache_folder("view") / f"{hashlib.sha256(repr(about).encode()).hexdigest()[:32]}.scan"

    # Looking.

    @property
    def ready(self) -> list[Level]:
        return [level for level in self.levels if level.palette is not None]

    def fitting(self, box: Box) -> Level:
        """The finest level at which a box has a screen's number of patches, of those that are ready."""
        if not self.ready:
            raise InputError("nothing is scanned yet; wait a moment")
        area = box[2] * box[3]
        fine = [level for level in self.ready if area / (level.factor * self.patch) ** 2 <= MOST]
        return fine[0] if fine else self.ready[-1]

    def look(self, box: Box, at: tuple[float, float] | None) -> Seen:
        """What is on the screen, as about WANTED patches, and the place that is asked about."""
        level = self.fitting(box)
        count = box[2] * box[3] / (level.factor * self.patch) ** 2
        stride = min(self.patch, max(1, round(self.patch * (count / WANTED) ** 0.5)))
        with self.alone():
            assert level.scan is not None
            found = level.scan.look(box=self.inner(level, box), stride=stride)
            query = None
            if at is not None:
                query = unit(level.scan.look(points=[self.place(level, *at)]).features[0].numpy())
        rows = unit(found.features.numpy())
        x, y, width, height = map(int, found.box)  # whole, as the stride is
        return Seen(level, stride, self.outer(level, (x, y, width, height)), rows, found.inside.numpy(), query)

    def features(self, box: Box, number: int) -> Array:
        """Of every patch that a box touches at a level: h×w×D, as `veca look` gives them."""
        level = self.level(number)
        inner = self.inner(level, box)
        count = (inner[2] // self.patch + 2) * (inner[3] // self.patch + 2)
        if count > LARGEST:
            raise InputError(
                f"about {count} patches; at most {LARGEST} are given at once: draw a smaller box, or zoom out"
            )
        with self.alone():
            assert level.scan is not None
            found: Array = level.scan.look(box=inner).features.numpy()
        return found

    def places(self, box: Box, number: int, count: int) -> tuple[Level, list[tuple[Box, float]]]:
        """The places of the whole image most like a box: boxes of its size with their cosines, best first.

        Compared is the mean of the patches in a box, at the level of the screen or the finest that is kept whole.
        """
        kept = [level for level in self.ready if level.whole is not None]
        if not kept:
            raise InputError("nothing is scanned yet; wait a moment")
        level = next((level for level in kept if level.number >= number), kept[-1])
        assert level.whole is not None
        with self.alone():
            assert level.scan is not None
            own = level.scan.look(box=self.inner(level, box))
        query = unit(unit(own.features[own.inside].numpy()).mean(0)) if own.inside.any() else None
        if query is None:
            raise InputError("the mask leaves nothing of this box")
        high, wide = own.features.shape[:2]
        means = nn.functional.avg_pool2d(level.whole.float().permute(2, 0, 1)[None], (high, wide), stride=1)[0]
        alike = torch.einsum("d,dhw->hw", torch.from_numpy(query), nn.functional.normalize(means, dim=0, eps=1e-6))
        column, row = (int(edge) // self.patch for edge in own.box[:2])
        found: list[tuple[Box, float]] = []
        blank(alike, row, column, high, wide)  # not the box itself
        while len(found) < count and float(alike.max()) > -1:
            row, column = divmod(int(alike.argmax()), alike.shape[1])
            cosine, side = float(alike[row, column]), self.patch * level.factor
            x, y = column * side, row * side
            right, bottom = (
                min(x + wide * side, self.pyramid.sizes[0][0]),
                min(y + high * side, self.pyramid.sizes[0][1]),
            )
            found.append(((x, y, right - x, bottom - y), cosine))
            blank(alike, row, column, high, wide)
        return level, found

    def level(self, number: int) -> Level:
        if not 0 <= number < len(self.levels) or self.levels[number].palette is None:
            raise InputError(f"there is no level {number}, or it is not scanned yet")
        return self.levels[number]

    def inner(self, level: Level, box: Box) -> Box:
        """A box of the image in pixels of a level, inside what its patches cover."""
        x, y, width, height = box
        sides = []
        for start, length, limit in ((x, width, level.size[0]), (y, height, level.size[1])):
            first = min(max(0, start // level.factor), limit - 1)
            sides.append((first, max(1, min(-(-(start + length) // level.factor), limit) - first)))
        return sides[0][0], sides[1][0], sides[0][1], sides[1][1]

    def outer(self, level: Level, box: Box) -> Box:
        """A box of a level in pixels of the image; the last pixel of a level may reach beyond it."""
        x, y, width, height = (value * level.factor for value in box)
        most = self.pyramid.sizes[0]
        return x, y, min(x + width, most[0]) - x, min(y + height, most[1]) - y

    def in_file(self, box: Box) -> Box:
        """A box of the image in pixels of the file's finest level, in which every command counts."""
        across, down = self.pyramid.picture.downsample
        x, y, width, height = box
        return round(x * across), round(y * down), round(width * across), round(height * down)

    def place(self, level: Level, x: float, y: float) -> tuple[float, float]:
        return min(x / level.factor, level.size[0]), min(y / level.factor, level.size[1])

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """One look at a time, and scanning waits: who looks has the whole machine."""
        with self.looking:
            self.free.clear()
            try:
                yield
            finally:
                self.free.set()


def unit(rows: Array) -> Array:
    found: Array = rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-6)
    return found


def blank(alike: Tensor, row: int, column: int, high: int, wide: int) -> None:
    """Take out a place and all that overlap it."""
    alike[max(0, row - high + 1) : row + high, max(0, column - wide + 1) : column + wide] = -2


def prune(folder: Path) -> None:
    """Only the CACHED scans used last stay."""
    files = sorted(folder.glob("*.scan"), key=lambda file: file.stat().st_mtime, reverse=True)
    for old in files[CACHED:]:
        old.unlink(missing_ok=True)
