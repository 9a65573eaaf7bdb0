"""What a source is: pixels of which any box can be read, at any of its levels.

A new format is one file with a subclass of `Source` and one line in `veca.large.formats` (docs/huge.md).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from veca.errors import InputError

MAX_BLOCK = 4 << 30  # bytes that must be decoded together: a row of tiles, a chunk
Array = np.ndarray[Any, Any]
Transform = tuple[float, float, float, float, float, float]  # x = a·column + b·row + c, y = d·column + e·row + f


class Source(ABC):
    """Stored values of an image, whatever their kind and number; what they mean is decided by `Picture`."""

    name: str
    levels: list[tuple[int, int]]  # (width, height) of each, the finest first
    bands: int  # values a pixel
    dtype: np.dtype[Any]
    opacity: bool = False  # whether the last band says how opaque a pixel is
    colours: tuple[int, ...] | None = None  # the bands (from 0) that are red, green and blue, where the file says so
    mpp: float | None = None  # micrometres a pixel of the finest level
    crs: str | None = None  # reference system, as WKT, and where the pixels of the finest level lie in it
    transform: Transform | None = None
    nodata: float | None = None  # the value that means "nothing was measured here"
    masked: bool = False  # whether the file has a mask of what was measured, which `measured` reads
    notes: tuple[str, ...] = ()  # what was chosen for the user, in a line each

    def __init__(self) -> None:
        self.lock = threading.Lock()  # libraries keep one place in a file; the viewer asks from several threads

    @abstractmethod
    def read(self, x: int, y: int, width: int, height: int, level: int, bands: Sequence[int]) -> Array:
        """Values of a box that lies inside the level, of these bands (from 0): height×width×len(bands)."""

    def measured(self, x: int, y: int, width: int, height: int, level: int) -> Array:
        """Where a masked file has values, in a box: height×width."""
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027
        """Whatever is open."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def one_line(error: BaseException) -> str:
    """An exception in one line; a library's message may hold several, or none."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def check_block(name: str, width: int, height: int, bytes_a_pixel: int) -> None:
    """What a library decodes in one go must fit in memory: known from the header."""
    if width < 1 or height < 1:
        raise InputError(f"{name}: its tiles are {width}×{height} pixels; the file is damaged")
    if width * height * bytes_a_pixel > MAX_BLOCK:
        raise InputError(
            f"{name}: a tile or chunk of {width}×{height} pixels is too large to decode at once; rewrite it in 512×512"
        )
