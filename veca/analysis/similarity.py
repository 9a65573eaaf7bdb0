"""Cosine similarity between a chosen patch, core or global feature and all patches (paper, Figs. 3, 4 and 6)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from veca.errors import InputError, require


def cosine_map(query: Tensor, patches: Tensor) -> Tensor:
    """Cosine of each query (…×D) to every patch (N×D): …×N."""
    query, patches = (nn.functional.normalize(x.float(), dim=-1, eps=1e-6) for x in (query, patches))
    return query @ patches.T


def patch_at(x: float, y: float, size: tuple[int, int], grid: tuple[int, int]) -> int:
    """The row-major index of the patch under pixel (x, y) of a photo of `size` (width, height)."""
    width, height = size
    if not (0 <= x < width and 0 <= y < height):
        raise InputError(f"the point {x:g},{y:g} is outside the photo, which is {width}×{height} pixels")
    rows, columns = grid
    return int(y / height * rows) * columns + int(x / width * columns)


def patch_centre(index: int, size: tuple[int, int], grid: tuple[int, int]) -> tuple[float, float]:
    """The pixel (x, y) in the middle of a patch."""
    row, column = divmod(index, grid[1])
    return (column + 0.5) / grid[1] * size[0], (row + 0.5) / grid[0] * size[1]


def typical_patches(patches: Tensor, count: int) -> list[int]:
    """Patches worth asking about where nobody chose any: the one nearest the middle of each of `count` clusters."""
    count = min(count, len(patches))
    cluster = require("sklearn.cluster", "explore")
    unit = nn.functional.normalize(patches.float(), dim=-1, eps=1e-6)
    centres = torch.from_numpy(cluster.KMeans(count, n_init=4, random_state=0).fit(unit.numpy()).cluster_centers_)
    chosen = cosine_map(centres.float(), patches).argmax(-1).tolist()
    return list(dict.fromkeys(int(index) for index in chosen))
