"""Rotary positions over continuous 2-D coordinates (paper, section 3.3; docs/mathematics.md).

Everything here is float32, whatever the model's precision: a coordinate in bfloat16 is off by a patch at 2048².
Coordinates are (x, y) in [−1, 1].
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """Cosine and sine of the angle by which each pair of channels turns; …×1×T×d/2, the 1 standing for the heads."""

    cos: Tensor
    sin: Tensor

    def at(self, tokens: Tensor) -> Rotation:
        """Of some of the tokens, by number."""
        return Rotation(self.cos[..., tokens, :], self.sin[..., tokens, :])


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


def join(cores: Rotation, patches: Rotation) -> Rotation:
    """The rotation of cores (B×1×C×d/2) and then patches, which may share theirs (1×1×N×d/2)."""
    pairs = ((a, b.expand(a.shape[0], *b.shape[1:])) for a, b in zip(cores, patches, strict=True))
    return Rotation(*(torch.cat(pair, dim=-2) for pair in pairs))


def patch_coords(height: int, width: int, device: torch.device | None = None) -> Tensor:
    """Centres of the patches of an h×w grid, row by row: N×2."""
    x, y = axis_coords(width, device), axis_coords(height, device)
    return torch.stack((x.expand(height, width), y[:, None].expand(height, width)), dim=-1).flatten(0, 1)


def axis_coords(count: int, device: torch.device | None = None) -> Tensor:
    """Centres of `count` patches along one axis."""
    return (torch.arange(count, dtype=torch.float32, device=device) + 0.5) / count * 2 - 1


def axis_rotation(count: int, head_width: int, zero_fraction: float, device: torch.device | None = None) -> Rotation:
    """The half of a grid's rotation that depends on one axis only: n×d/4."""
    angles = axis_coords(count, device)[:, None] * frequencies(head_width, zero_fraction, device)
    return Rotation(angles.cos(), angles.sin())


def jitter(coords: Tensor) -> Tensor:
    """Training only: one shift per axis in ±0.08, then one log-uniform scale in [1/2, 2], for the whole batch."""
    draw = torch.rand(3, device=coords.device)
    return (coords + (draw[:2] * 2 - 1) * 0.08) * torch.exp2(draw[2] * 2 - 1)


def patch_rotation(
    height: int, width: int, head_width: int, zero_fraction: float, device: torch.device, training: bool
) -> Rotation:
    """The rotation of a whole grid (1×1×N×d/2): remembered per grid in inference, drawn anew in training."""
    if training:
        return rotation(jitter(patch_coords(height, width, device))[None], head_width, zero_fraction)
    if torch.compiler.is_compiling():  # a traced graph must not hold on to a tensor from outside it
        return rotation(patch_coords(height, width, device)[None], head_width, zero_fraction)
    return _remembered_rotation(height, width, head_width, zero_fraction, device)


@functools.lru_cache(maxsize=8)
def _remembered_rotation(
    height: int, width: int, head_width: int, zero_fraction: float, device: torch.device
) -> Rotation:
    with torch.inference_mode(False), torch.no_grad():  # an inference tensor could not be used in training later
        return rotation(patch_coords(height, width, device)[None], head_width, zero_fraction)
