"""An image at its own resolution and at every half of it, for tiles on a screen and for scans of reduced copies.

Level k is the image reduced 2ᵏ times. Where the file has levels, they are read from it. Other files are read once, from
top to bottom, and the reduced copies are kept in memory as far as KEPT allows: all of them up to about 500 megapixels.
Levels beyond that are made from the file again, part by part.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from veca.large.picture import Picture
from veca.large.source import Array, Source
from veca.streaming import Report

TILE = 512  # pixels of a side; the last level fits in one
KEPT = 512 << 20  # bytes of reduced copies in memory
BAND = 1 << 24  # pixels of the image that are read at once on the way through it


class Pyramid:
    """Any box of any level, h×w×3 in 8 bits. Reads may come from several threads."""

    def __init__(self, picture: Picture, least: int) -> None:  # pixels that the shorter side keeps
        self.picture = picture
        self.sizes = [picture.size]  # (width, height) of each level
        while max(self.sizes[-1]) > TILE and min(self.sizes[-1]) >= 2 * least:
            width, height = self.sizes[-1]
            self.sizes.append((-(-width // 2), -(-height // 2)))
        self.stored = {level: found for level in range(len(self.sizes)) if (found := self.level_of_file(level))}
        self.kept: dict[int, Array] = {}
        self.ready = False  # whether tiles can be had without reading the whole image

    def level_of_file(self, level: int) -> Picture | None:
        """The picture at this level, where the file has one that is hardly finer."""
        if level == 0:
            return self.picture
        found = self.picture.at(1 / (self.picture.downsample[0] * 2**level))
        own = self.picture.levels[found.level]
        hardly = own[0] < 1.9 * found.size[0] and found.level > self.picture.level
        return (
            found
            if hardly and all(abs(a - b) <= 1 for a, b in zip(found.size, self.sizes[level], strict=True))
            else None
        )

    def reduce(self, report: Report) -> None:
        """The one way through the image on which the reduced copies are made, unless the file has them."""
        last, total = len(self.sizes), 0
        first = last
        for level in range(last - 1, 0, -1):
            total += 3 * self.sizes[level][0] * self.sizes[level][1]
            if level in self.stored or total > KEPT:
                break
            first = level
        if first < last:
            self.kept = self.reduced(first, report)
        self.ready = True

    def reduced(self, first: int, report: Report) -> dict[int, Array]:
        """The levels from the `first` on, whole; made of the level of the file before them."""
        kept = {
            level: np.empty((height, width, 3), np.uint8)
            for level, (width, height) in enumerate(self.sizes)
            if level >= first
        }
        source = max(level for level in self.stored if level < first)
        (width, height), times = self.sizes[source], first - source
        step = max(1, BAND // (width << times)) << times  # rows that become whole rows of the first level
        for top in range(0, height, step):
            band = self.read(source, 0, top, width, min(step, height - top))
            for _ in range(times):
                band = halved(band)
            kept[first][top >> times : (top >> times) + len(band)] = band
            report("reading the image", min(top + step, height), height)
        for level in range(first + 1, len(self.sizes)):
            kept[level][:] = halved(kept[level - 1])
        return kept

    def read(self, level: int, x: int, y: int, width: int, height: int) -> Array:
        """A box inside the level."""
        if level in self.kept:
            return self.kept[level][y : y + height, x : x + width]
        if level in self.stored:
            found, most = self.stored[level], self.stored[level].size
            # A level of the file may have a pixel less than half of the one before, rounded up.
            inside = found.rgb(x, y, min(width, most[0] - x), min(height, most[1] - y))
            missing = (0, height - inside.shape[0]), (0, width - inside.shape[1]), (0, 0)
            return np.pad(inside, missing, mode="edge") if any(map(any, missing)) else inside
        wide, high = self.sizes[level - 1]
        return halved(self.read(level - 1, 2 * x, 2 * y, min(2 * width, wide - 2 * x), min(2 * height, high - 2 * y)))

    def close(self) -> None:
        self.picture.close()


class LevelSource(Source):
    """One level of a pyramid as an image of its own, for scans to read."""

    bands, dtype = 3, np.dtype(np.uint8)

    def __init__(self, pyramid: Pyramid, level: int) -> None:
        super().__init__()
        self.pyramid, self.level = pyramid, level
        self.name, self.levels = pyramid.picture.name, [pyramid.sizes[level]]

    def read(self, x: int, y: int, width: int, height: int, level: int, bands: Sequence[int]) -> Array:
        return self.pyramid.read(self.level, x, y, width, height)[..., list(bands)]


def halved(values: Array) -> Array:
    """The mean of every 2×2 pixels; the last row and column stand twice where there is an odd number."""
    high, wide = values.shape[:2]
    if high % 2 or wide % 2:
        values = np.pad(values, ((0, high % 2), (0, wide % 2), (0, 0)), mode="edge")
    total = values[::2, ::2].astype(np.uint16)
    for down, across in ((0, 1), (1, 0), (1, 1)):
        total += values[down::2, across::2]
    total += 2
    return (total >> 2).astype(np.uint8)
