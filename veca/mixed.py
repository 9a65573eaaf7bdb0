"""Mixed scale: fine patches where there is detail, coarse ones elsewhere, for a share of the grid's tokens.

    cells = choose_cells(images, model.patch_size, 0.5)   # of each image its own, as many for all
    groups = by_tokens(grid, [0.5, 0.2, 0.5])              # of shares of their own: which images have as many
    squares = cells.squares(images, model.patch_size)      # what the patch embedding sees of them
    dense = cells.spread(features)                         # B×T×D → B×N×D, on the fine grid all the same

A cell is a square of 1, 2 or 4 patches a side, reduced to one patch by averaging areas. No patch misses another, so
the network takes any such set; where a cell's centre lies is all that it must know. Cells of 4 patches are split in
four, and these again, where most would be lost; where the grid is no multiple of 4 or 2, the cells at its border are
smaller from the start. Every split adds 3 tokens, so one share means one number of tokens, whatever the image
(`tokens_of`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from veca import table

SCALES = 3  # cells of 1, 2 and 4 patches a side
LARGER = 32.0  # a loss in a cell of 4 patches counts so many times one of 2 (docs/research/elastic.md)


class Cells(NamedTuple):
    """Which cells of a grid stand for each image of a batch; together they cover it once."""

    numbers: Tensor
    """B×T, numbers among the cells of all scales: 1 patch a side first, each scale row by row"""
    grid: tuple[int, int]
    """(h, w), in patches"""

    @property
    def places(self) -> Tensor:
        """B×T×3: column and row of the first patch of each cell, and how many patches it is wide."""
        numbers, grids = self.numbers, level_grids(self.grid)
        counts = [h * w for h, w in grids]
        scale = sum((numbers >= sum(counts[:level])).long() for level in range(1, SCALES))
        first, width, side = (
            numbers.new_tensor(values)[scale]
            for values in (
                [sum(counts[:level]) for level in range(SCALES)],
                [w for _, w in grids],
                [1 << level for level in range(SCALES)],
            )
        )
        row, column = (numbers - first) // width, (numbers - first) % width
        return torch.stack((column * side, row * side, side), dim=-1)

    @property
    def centres(self) -> Tensor:
        """B×T×2, (x, y) in [−1, 1], as the positions of patches are."""
        places = self.places.float()
        size = places.new_tensor((self.grid[1], self.grid[0]))
        return (places[..., :2] + places[..., 2:] / 2) / size * 2 - 1

    def squares(self, images: Tensor, patch: int) -> Tensor:
        """The cells' pixels (of B×3×H×W), each reduced to a patch, side by side: B×3×p×(T·p)."""
        rows = torch.cat([cut(level, patch) for level in pyramid(images, patch)], dim=1)
        chosen = self.take(rows).unflatten(-1, (images.shape[1], patch, patch))
        row: Tensor = chosen.permute(0, 2, 3, 1, 4).flatten(3)
        return row

    def entries(self, entries: Tensor) -> Tensor:
        """The table of positions (s×s×D) at the cells' centres: B×T×D. All cells lie on a few lattices."""
        axes = zip(*(level_axes(count, entries.device) for count in reversed(self.grid)), strict=True)
        return torch.cat([table.on_lattice(entries, *axis) for axis in axes])[self.numbers]

    def averaged(self, patches: Tensor) -> Tensor:
        """The mean of a map's patches (B×N×D) over each cell: B×T×D."""
        levels = pyramid(patches.transpose(1, 2).unflatten(-1, self.grid), 1)
        return self.take(torch.cat([level.flatten(2).transpose(1, 2) for level in levels], dim=1))

    def take(self, rows: Tensor) -> Tensor:
        """Of what is known of all cells (B×n×D) that of the chosen ones."""
        chosen: Tensor = rows.flatten(0, 1).index_select(0, self._flat(rows.shape[1])).unflatten(0, self.numbers.shape)
        return chosen

    def spread(self, features: Tensor) -> Tensor:
        """The chosen cells' features (B×T×D) on the fine grid: B×N×D.

        A patch that was chosen keeps its own; inside larger cells it lies between the centres of the cells around,
        of which smaller ones count as one: bilinear, scale by scale.
        """
        grids = level_grids(self.grid)
        counts = [h * w for h, w in grids]
        place = self._flat(sum(counts))

        def on_levels(rows: Tensor) -> list[Tensor]:  # (B·n)×D → B×D×h×w each
            parts = rows.unflatten(0, (self.numbers.shape[0], -1)).split(counts, dim=1)
            return [part.transpose(1, 2).unflatten(-1, grid) for part, grid in zip(parts, grids, strict=True)]

        rows = features.float().flatten(0, 1)
        nothing = rows.new_zeros(self.numbers.shape[0] * sum(counts), rows.shape[-1])
        maps, known = on_levels(nothing.index_copy(0, place, rows)), on_levels(nothing[:, :1].index_fill(0, place, 1))
        for fine, coarse in pairwise(range(SCALES)):  # zero where a cell is neither chosen nor split: sums will do
            maps[coarse] = maps[coarse] + halved(maps[fine], 1)
            known[coarse] = known[coarse] + halved(known[fine], 1)
        for fine in reversed(range(SCALES - 1)):
            maps[fine] = torch.addcmul(maps[fine], 1 - known[fine], doubled(maps[fine + 1], grids[fine]))
        return maps[0].flatten(2).transpose(1, 2).to(features.dtype)

    def _flat(self, count: int) -> Tensor:
        """B·T numbers of rows, where each image has `count`."""
        return (
            self.numbers + torch.arange(self.numbers.shape[0], device=self.numbers.device)[:, None] * count
        ).flatten()


def choose_cells(images: Tensor, patch: int, share: float) -> Cells:
    """Cells for images (B×3×H×W): about `share` of the grid's patches in number (`tokens_of` says how many)."""
    grid = (images.shape[-2] // patch, images.shape[-1] // patch)
    with torch.no_grad():
        return Cells(refined(detail(images, patch), grid, share), grid)


def tokens_of(grid: tuple[int, int], share: float) -> int:
    """How many cells stand for a grid at this share: at most 2 fewer than asked for, since a split adds 3.

    There is a least: cells of 4 patches wherever they fit. Where the grid is no multiple of 4, smaller ones stand at
    its border, so on a small grid the least is much: 15 of the 45 patches of 9×5, whatever smaller share is asked.
    """
    (h, w), *coarser = level_grids(grid)
    return h * w - 3 * (sum(rows * columns for rows, columns in coarser) - splits_of(grid, share))


def splits_of(grid: tuple[int, int], share: float) -> int:
    """How many cells are split at this share."""
    (h, w), *coarser = level_grids(grid)
    most = sum(rows * columns for rows, columns in coarser)
    return min(max(0, (round(share * h * w) - h * w + 3 * most) // 3), most)


def by_tokens(grid: tuple[int, int], shares: Sequence[float]) -> list[list[int]]:
    """The numbers of images with a share each, those with as many tokens together: no batch needs padding."""
    groups: dict[int, list[int]] = {}
    for image, share in enumerate(shares):
        groups.setdefault(tokens_of(grid, share), []).append(image)
    return list(groups.values())


def detail(images: Tensor, patch: int) -> list[Tensor]:
    """What splitting a cell gains, of cells of 2 and of 4 patches (B×h×w each).

    The root of the mean square that reducing loses of its pixels. Among cells of one size any growing function of it
    gives the same order; what matters is how the two sizes compare (`LARGER`).
    """
    gains = []
    for scale, (fine, coarse) in enumerate(pairwise(pyramid(images.float(), patch))):
        lost = halved(fine.square(), patch) - coarse.square()  # the variance within each 2×2 pixels
        each = lost.sum(1).unflatten(-1, (-1, patch)).mean(-1).unflatten(-2, (-1, patch)).mean(-2)
        gains.append(each.clamp_min(0).sqrt() * LARGER**scale)
    return gains


def refined(gains: list[Tensor], grid: tuple[int, int], share: float) -> Tensor:
    """The numbers (B×T) of the cells that remain when those with the largest gain are split, T = `tokens_of`."""
    return leaves(split_order(gains, grid), grid, share)


def split_order(gains: list[Tensor], grid: tuple[int, int]) -> Tensor:
    """Which cells to split one after another (B×n): cells of 4 have the first numbers, each scale row by row.

    A cell of 4 comes before its parts: it counts with the best mean gain that it and its best parts have together, and
    parts count no more than it.
    """
    small, large = gains
    _, _, (h4, w4) = level_grids(grid)
    parts = small[:, : 2 * h4, : 2 * w4].unflatten(2, (w4, 2)).unflatten(1, (h4, 2)).permute(0, 1, 3, 2, 4).flatten(3)
    best = parts.sort(-1, descending=True).values
    sums = torch.cat((large[..., None], best), dim=-1).cumsum(-1)
    large = (sums / torch.arange(1, 6, device=small.device)).amax(-1)
    small = small.clone()
    small[:, : 2 * h4, : 2 * w4] = torch.minimum(small[:, : 2 * h4, : 2 * w4], repeated(large))
    return descending(torch.cat((large.flatten(1), small.flatten(1)), dim=1))


def leaves(order: Tensor, grid: tuple[int, int], share: float) -> Tensor:
    """The numbers (B×T) of the cells that remain after as many splits of `order` as this share allows."""
    batch, device = order.shape[0], order.device
    (h, w), (h2, w2), (h4, w4) = level_grids(grid)
    split = torch.zeros(order.shape, dtype=torch.bool, device=device)
    split = split.scatter(1, order[:, : splits_of(grid, share)], True)
    split4, split2 = split.split((h4 * w4, h2 * w2), dim=1)
    split4, split2 = split4.unflatten(1, (h4, w4)), split2.unflatten(1, (h2, w2))
    there = [torch.ones(batch, *size, dtype=torch.bool, device=device) for size in ((h, w), (h2, w2))]
    there[0][:, : 2 * h2, : 2 * w2] = repeated(split2)
    there[1][:, : 2 * h4, : 2 * w4] = repeated(split4)
    remaining = torch.cat([leaf.flatten(1) for leaf in (there[0], there[1] & ~split2, ~split4)], dim=1)
    return descending(remaining.float())[:, : tokens_of(grid, share)]


def descending(values: Tensor) -> Tensor:
    """The order of each row (B×n), largest first; of equals the first, so that cells come before their parts."""
    if torch.onnx.is_in_onnx_export():  # ONNX has no stable sort, but its TopK takes the first of equals first
        return values.topk(values.shape[1], dim=1).indices
    return values.argsort(dim=1, descending=True, stable=True)


def level_grids(grid: tuple[int, int]) -> list[tuple[int, int]]:
    """How many cells of each scale there are, down and across."""
    return [(grid[0] >> scale, grid[1] >> scale) for scale in range(SCALES)]


def level_axes(count: int, device: torch.device) -> list[Tensor]:
    """The centres of the cells of each scale along an axis of `count` patches, in [−1, 1]."""
    return [
        (torch.arange(count >> scale, dtype=torch.float32, device=device) + 0.5) * (2 << scale) / count - 1
        for scale in range(SCALES)
    ]


def pyramid(maps: Tensor, cell: int) -> list[Tensor]:
    """Maps (B×C×H×W, `cell` pixels to a patch) at every scale: areas averaged."""
    levels = [maps]
    for _ in range(SCALES - 1):
        levels.append(halved(levels[-1], cell))
    return levels


def halved(maps: Tensor, cell: int) -> Tensor:
    """The mean of every 2×2 pixels, as far as cells of twice the size reach: B×C×H×W → B×C×H′×W′."""
    h, w = (size // (2 * cell) * cell for size in maps.shape[-2:])
    if not h * w:
        return maps.new_zeros(*maps.shape[:2], h, w)
    return nn.functional.avg_pool2d(maps[..., : 2 * h, : 2 * w], 2)


def doubled(maps: Tensor, grid: tuple[int, int]) -> Tensor:
    """A map (B×C×h×w) at twice the size, bilinear; zeros at a border of `grid` that it does not cover."""
    h, w = maps.shape[-2:]
    if not h * w:
        return maps.new_zeros(*maps.shape[:2], *grid)
    fine = nn.functional.interpolate(maps, scale_factor=2, mode="bilinear", align_corners=False)
    missing = (0, grid[1] - 2 * w, 0, grid[0] - 2 * h)
    return nn.functional.pad(fine, missing) if any(missing) else fine


def repeated(cells: Tensor) -> Tensor:
    """Each of B×h×w twice along both axes."""
    return cells.repeat_interleave(2, 1).repeat_interleave(2, 2)


def cut(images: Tensor, patch: int) -> Tensor:
    """The pixels of every patch: B×C×H×W → B×N×(C·p·p)."""
    batch, channels, height, width = images.shape
    h, w = height // patch, width // patch
    pixels = images.reshape(batch, channels, h, patch, w, patch).permute(0, 2, 4, 1, 3, 5)
    return pixels.reshape(batch, h * w, channels * patch * patch)
