"""The additive table of positions (DINOv2's), resized to a grid or sampled at any point: bicubic, without antialiasing.

Resizing reads the table at the centres of the grid's patches, so a point on the grid gets the grid's own value.
Coordinates are those of `veca.rope`: (x, y) in [−1, 1].
"""

from __future__ import annotations

from torch import Tensor, eye, nn, stack, zeros_like


def resized(table: Tensor, grid: tuple[int, int]) -> Tensor:
    """The table (s×s×D) at a grid's size, row by row: N×D, as DINOv2 does it."""
    whole = nn.functional.interpolate(
        table.permute(2, 0, 1)[None].float(), size=grid, mode="bicubic", align_corners=False
    )
    return whole[0].flatten(1).transpose(0, 1)


def at_points(table: Tensor, coords: Tensor) -> Tensor:
    """The table (s×s×D) at points (n×2): n×D."""
    read = nn.functional.grid_sample(
        table.permute(2, 0, 1)[None].float(),
        coords.float()[None, None],
        mode="bicubic",
        padding_mode="border",
        align_corners=False,
    )
    return read[0, :, 0].transpose(0, 1)


def on_lattice(table: Tensor, across: Tensor, down: Tensor) -> Tensor:
    """The table (s×s×D) at all points of a lattice, from its w coordinates x and h coordinates y: (h·w)×D, row by row.

    Bicubic interpolation is one matrix per axis: for many points that is quicker than one by one.
    """
    by_x, by_y = (axis_weights(table.shape[0], axis) for axis in (across, down))
    lines = by_y @ table.float().flatten(1)  # h×(s·D)
    rows: Tensor = by_x @ lines.unflatten(1, table.shape[1:])
    return rows.flatten(0, 1)


def axis_weights(size: int, coords: Tensor) -> Tensor:
    """How much of each of `size` entries of an axis a point takes: n×size."""
    line = eye(size, device=coords.device)[:, None]  # a table of one column, with a channel for each entry
    return at_points(line, stack((zeros_like(coords), coords), dim=-1))
