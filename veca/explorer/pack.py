"""Numbers small enough for a page: a basis per layer, whole numbers instead of floats, one compressed text.

What the page shows is a cosine, a share or a colour, to about two digits. Features are unit vectors in the few
directions that carry them, in coarse steps; most of those numbers are tiny, which is what makes the compression work.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

LEVELS = 31  # of the square root of a share


class Precision(NamedTuple):
    """How finely features are kept: cosines of the last layer are off by about 0.01, those of the others by 0.02."""

    directions: int
    steps: int  # of a coordinate of a unit vector


LAST, OTHERS = Precision(128, 60), Precision(48, 28)


def basis(rows: Tensor, count: int) -> Tensor:
    """The `count` directions (D×count) that keep most of the rows (R×D): randomised subspace iteration.

    Not centred, so that inner products, and with them cosines, survive.
    """
    width = rows.shape[1]
    if count >= width:
        return torch.eye(width)
    gram = rows.T @ rows
    generator = torch.Generator().manual_seed(0)
    span = torch.randn(width, min(width, count + 16), generator=generator)
    for _ in range(4):
        span = torch.linalg.qr(gram @ span).Q
    _, inner = torch.linalg.eigh(span.T @ gram @ span)
    found: Tensor = span @ inner[:, -count:].flip(-1)
    return found


def quantised(coordinates: Tensor, steps: int) -> np.ndarray:  # int8, the same shape
    """Coordinates of unit vectors as whole numbers."""
    return (coordinates * steps).round().clamp(-127, 127).to(torch.int8).numpy()


def shares(maps: Tensor) -> tuple[np.ndarray, float]:
    """Maps (C×N, from 0 up) as bytes and the value of the largest: the square root in LEVELS steps.

    Each row is stored as differences from patch to patch, which compress better than the values.
    """
    top = float(maps.max())
    levels = (maps / max(top, 1e-30)).sqrt().mul(LEVELS).round().to(torch.uint8).numpy()
    return np.diff(levels, axis=1, prepend=np.zeros((len(levels), 1), np.uint8)), top


class Blob:
    """Arrays one after the other; `text` is what the page unpacks with DecompressionStream."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0

    def add(self, array: np.ndarray) -> int:
        """Where the array begins."""
        start = self.size
        data = np.ascontiguousarray(array).tobytes()
        padding = -len(data) % 2  # Int16 views begin at even places
        self.parts.append(data + bytes(padding))
        self.size += len(data) + padding
        return start

    def bytes_at(self, start: int, grid: tuple[int, int]) -> np.ndarray:  # h×w×3 uint8
        """The colours that were added there."""
        count = grid[0] * grid[1] * 3
        for part in self.parts:
            if start < len(part):
                return np.frombuffer(part, np.uint8, count, start).reshape(*grid, 3)
            start -= len(part)
        raise IndexError(start)

    def text(self) -> str:
        packer = zlib.compressobj(4)
        return base64.b64encode(b"".join([*map(packer.compress, self.parts), packer.flush()])).decode("ascii")


def unpack(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def low_cosine(coordinates: Sequence[Tensor]) -> float:
    """Where the colours of similarity begin: 5 % of pairs are less alike than this."""
    rows: Any = torch.nn.functional.normalize(torch.cat(list(coordinates)), dim=-1)
    few = rows[:: max(1, len(rows) // 256)]
    return float((few @ few.T).flatten().quantile(0.05))
