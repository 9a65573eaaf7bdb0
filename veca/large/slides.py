"""Whole slides in their vendors' formats, by OpenSlide."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from veca.errors import InputError, require
from veca.large.source import Array, Source, check_block, one_line


class SlideSource(Source):
    """Red, green, blue and opacity: where a scanner took no picture, a slide is transparent."""

    bands, opacity, dtype = 4, True, np.dtype(np.uint8)

    def __init__(self, path: Path) -> None:
        super().__init__()
        openslide = require("openslide", "slides")
        self.name = str(path)
        try:
            self.file = openslide.OpenSlide(path)
            self.levels = [(int(width), int(height)) for width, height in self.file.level_dimensions]
            self.factors = [float(factor) for factor in self.file.level_downsamples]
            properties = dict(self.file.properties)
        except Exception as error:  # OpenSlideError and its kinds, OSError
            raise InputError(f"{path}: not a slide that OpenSlide reads ({one_line(error)})") from None
        try:
            for level, size in enumerate(self.levels):
                tile = f"openslide.level[{level}].tile"
                wide, high = int(properties.get(f"{tile}-width", 1)), int(properties.get(f"{tile}-height", 1))
                check_block(self.name, wide, high, 4)
                if min(size) < 1:
                    raise ValueError("an empty level")
        except InputError:
            self.close()
            raise
        except ValueError as error:
            self.close()
            raise InputError(f"{path}: its sizes are damaged ({one_line(error)})") from None
        with contextlib.suppress(KeyError, ValueError):
            mpp = float(properties["openslide.mpp-x"])
            self.mpp = mpp if 0 < mpp < 1e6 else None

    def read(self, x: int, y: int, width: int, height: int, level: int, bands: Sequence[int]) -> Array:
        # OpenSlide counts the corner in pixels of the finest level.
        corner = (round(x * self.factors[level]), round(y * self.factors[level]))
        try:
            values = np.asarray(self.file.read_region(corner, level, (width, height)))
        except Exception as error:
            raise InputError(f"{self.name}: a part of it cannot be decoded ({one_line(error)})") from None
        return values if list(bands) == [0, 1, 2, 3] else values[..., list(bands)]

    def close(self) -> None:
        self.file.close()
