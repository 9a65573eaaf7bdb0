"""Arrays and memory maps as a source, and every image that can only be decoded whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from veca.errors import InputError
from veca.images import MAX_PIXELS, open_image
from veca.large.source import Array, Source, one_line


class ArraySource(Source):
    """H×W or H×W×bands, in memory, mapped, or whatever gives boxes of itself (an h5py data set, a Zarr array); four
    values a pixel are red, green, blue and opacity."""

    def __init__(self, array: Any, name: str = "array") -> None:
        super().__init__()
        shape = tuple(array.shape)
        if len(shape) not in (2, 3) or min(shape) < 1:
            raise InputError(f"{name}: an image array is H×W, H×W×3 or H×W×4, not {'×'.join(map(str, shape))}")
        if len(shape) == 3 and shape[0] <= 4 < shape[2]:
            size = "×".join(map(str, shape))
            raise InputError(f"{name}: {size} has its bands first; an image array is H×W×bands (np.moveaxis(…, 0, -1))")
        self.array, self.name, self.dtype = array, name, np.dtype(array.dtype)
        self.levels, self.bands = [(shape[1], shape[0])], shape[2] if len(shape) == 3 else 1
        self.opacity = self.bands == 4

    def read(self, x: int, y: int, width: int, height: int, level: int, bands: Sequence[int]) -> Array:
        box = np.asarray(self.array[y : y + height, x : x + width])
        box = box[..., None] if box.ndim == 2 else box
        return box if len(bands) == self.bands and list(bands) == list(range(self.bands)) else box[..., list(bands)]


def open_npy(path: Path) -> ArraySource:
    try:
        with np.errstate(over="ignore"):  # a product of hostile sides; the file is shorter, which is an error
            array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # hostile headers: ValueError, OSError, EOFError, OverflowError, SyntaxError, …
        raise InputError(f"{path}: not an array of numbers ({one_line(error)})") from error
    return ArraySource(array, str(path))


def open_photo(path: Path) -> ArraySource:
    """JPEG, PNG and the like: decoded whole, up to the limit of pixels."""
    return ArraySource(np.asarray(open_image(path, MAX_PIXELS)), str(path))
