"""Mixed scale of an image that is read strip by strip: the same cells as of the whole image in memory.

Strips begin at multiples of the largest cells, so that no cell lies in two. The source is read twice: once to choose
the cells, once to embed them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from veca import table
from veca.large.picture import Strips
from veca.mixed import SCALES, Cells, detail, level_grids, refined

if TYPE_CHECKING:
    from veca.model import Veca
    from veca.streaming import Report

LARGEST = 1 << (SCALES - 1)  # patches a side


def choose_in_strips(model: Veca, strips: Strips, grid: tuple[int, int], share: float, tile: int) -> Cells:
    """`choose_cells` of a whole source, in an order in which every strip has its own together."""
    gains: list[list[Tensor]] = [[] for _ in range(SCALES - 1)]
    for top, bottom in spans(grid, tile):
        for level, part in zip(gains, detail(pixels_of(model, strips, top, bottom), model.patch_size), strict=True):
            level.append(part)
    cells = Cells(refined([torch.cat(level, dim=1) for level in gains], grid, share), grid)
    strip = cells.places[0, :, 1] // rows_of(grid, tile)
    return Cells(cells.numbers[:, strip.argsort(stable=True)], grid)


def embedded_cells(
    model: Veca, strips: Strips, cells: Cells, tile: int, report: Report
) -> Iterator[tuple[int, Tensor]]:
    """Tokens of the cells of one strip after another (n×D), and the place of the first."""
    start, (places, centres) = 0, (cells.places[0], cells.centres[0])
    for top, bottom in spans(cells.grid, tile):
        count = int(((places[:, 1] >= top) & (places[:, 1] < bottom)).sum())
        part = slice(start, start + count)
        own = Cells(numbers_in(places[part], top, (bottom - top, cells.grid[1]))[None], (bottom - top, cells.grid[1]))
        rows = model.patch_embed(own.squares(pixels_of(model, strips, top, bottom), model.patch_size))[0][0]
        if model.config.positions == "table":
            rows = rows.float() + table.at_points(model.table, centres[part])
        yield start, rows
        start += count
        report("patches", bottom, cells.grid[0])


def numbers_in(places: Tensor, top: int, grid: tuple[int, int]) -> Tensor:
    """The numbers that cells at these places (n×3) have in a strip that begins at row `top`: n."""
    column, row, side = places.unbind(-1)
    numbers, before = torch.empty_like(column), 0
    for scale, (h, w) in enumerate(level_grids(grid)):
        here = side == 1 << scale
        numbers[here] = before + ((row[here] - top) >> scale) * w + (column[here] >> scale)
        before += h * w
    return numbers


def pixels_of(model: Veca, strips: Strips, top: int, bottom: int) -> Tensor:
    """Rows of patches, 1×3×H×W, as the model takes them."""
    weight, patch = model.patch_embed.proj.weight, model.patch_size
    width = strips.width // patch * patch
    return strips.read(top * patch, bottom * patch, 0, width).to(weight.device, weight.dtype)


def rows_of(grid: tuple[int, int], tile: int) -> int:
    """How many rows of patches a strip has: about `tile` patches."""
    return max(1, tile // (LARGEST * grid[1])) * LARGEST


def spans(grid: tuple[int, int], tile: int) -> Iterator[tuple[int, int]]:
    """The first row of every strip, and the one after its last."""
    step = rows_of(grid, tile)
    for top in range(0, grid[0], step):
        yield top, min(top + step, grid[0])
