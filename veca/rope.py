"""Rotary positions over continuous 2-D coordinates (paper, section 3.3; docs/research/mathematics.md).

Everything here is float32, whatever the model's precision: a coordinate in bfloat16 is off by a patch at 2048².
Coordinates are (x, y) in [−1, 1].
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


class Rotation:
    """Cosine and sine of the angle by which each pair of channels turns; …×1×T×d/2, the 1 standing for the heads."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos, self.sin = cos, sin
        self._turns: Tensor | None = None

    @property
    def turns(self) -> Tensor:
        """The same as complex numbers of length 1, …×T×1×d/2: one product turns a pair of channels."""
        if self._turns is None:
            self._turns = torch.complex(self.cos, self.sin).transpose(-3, -2)
        return self._turns

    def at(self, tokens: Tensor | slice) -> Rotation:
        """Of some of the tokens, by number."""
        return Rotation(self.cos[..., tokens, :], self.sin[..., tokens, :])

    def of(self, images: slice) -> Rotation:
        """Of some of the images; the same where all share it."""
        return self if len(self.cos) == 1 else Rotation(self.cos[images], self.sin[images])


def frequencies(head_width: int, zero_fraction: float, device: torch.device | None = None) -> Tensor:
    """2π/period of the d/4 pairs of one axis; 0 for the last ones, whose period is infinite."""
    count = head_width // 4
    still = round(zero_fraction * count)
    values = [2 * math.pi / 100 ** (2 * i / (head_width / 2)) for i in range(count - still)] + [0.0] * still
    return torch.tensor(values, dtype=torch.float32, device=device)


def rotation(coords: Tensor, head_width: int, zero_fraction: float) -> Rotation:
    """The rotation of tokens at `coords` (…×T×2): the first half of a head turns with x, the second with y."""
    angles = coords.float().unsqueeze(-1) * frequencies(head_width, zero_fraction, coords.device)  # …×T×2×d/4
    angles = angles.flatten(-2).unsqueeze(-3)  # …×1×T×d/2
    return Rotation(angles.cos(), angles.sin())


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Turn the pairs of neighbouring channels (0,1), (2,3), … of x (B×H×T×d) in float32, as complex numbers."""
    pairs = x.float().unflatten(-1, (-1, 2))  # B×H×T×d/2×2
    if torch.compiler.is_compiling():  # compilers and ONNX know real numbers only
        first, second = pairs.unbind(-1)
        turned = torch.stack((first * by.cos - second * by.sin, first * by.sin + second * by.cos), -1)
    else:
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.complex(by.cos, by.sin))
    return turned.flatten(-2).to(x.dtype)


def patch_coords(height: int, width: int, device: torch.device | None = None) -> Tensor:
    """Centres of the patches of an h×w grid, row by row: N×2."""
    x, y = axis_coords(width, device), axis_coords(height, device)
    return torch.stack((x.expand(height, width), y[:, None].expand(height, width)), dim=-1).flatten(0, 1)


def axis_coords(count: int, device: torch.device | None = None) -> Tensor:
    """Centres of `count` patches along one axis."""
    return (torch.arange(count, dtype=torch.float32, device=device) + 0.5) / count * 2 - 1


def grid_rotation(
    across: Tensor, down: Tensor, head_width: int, zero_fraction: float, points: Tensor | None = None
) -> Rotation:
    """The rotation of all points (x, y) of a lattice, row by row, from its w coordinates x and its h coordinates y:
    1×1×(h·w)×d/2; or of n `points` of it, by number. Each axis turns its own half of a head, so only h + w angles are
    computed.
    """
    each = frequencies(head_width, zero_fraction, across.device)
    shape = (down.shape[0], across.shape[0], each.shape[0])  # `len` would fix the size in a traced graph
    by_x, by_y = across[:, None] * each, down[:, None] * each

    def joined(part: Callable[[Tensor], Tensor]) -> Tensor:
        if points is not None:
            column, row = points % shape[1], points // shape[1]
            return torch.cat((part(by_x)[column], part(by_y)[row]), dim=-1)[None, None]
        whole = torch.cat((part(by_x).expand(shape), part(by_y)[:, None].expand(shape)), dim=-1)
        return whole.flatten(0, 1)[None, None]

    return Rotation(joined(torch.cos), joined(torch.sin))


def jitter(across: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Training only: one shift per axis in ±0.08, then one log-uniform scale in [1/2, 2], for the whole batch."""
    draw = torch.rand(3, device=across.device)
    shift, scale = (draw[:2] * 2 - 1) * 0.08, torch.exp2(draw[2] * 2 - 1)
    return (across + shift[0]) * scale, (down + shift[1]) * scale
