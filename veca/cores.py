"""The ordered bank of core tokens and where they sit on the image (paper, section 3.2)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor, nn


class CoreBank(nn.Module):
    """`M` learned tokens in order of importance, and the coordinates that move as the layers read the image.

    The bank is one parameter and a budget is a prefix of it, so the cores beyond the budget get a gradient of zero
    rather than none; and `Veca` freezes the positions where no channel turns with them. So every parameter that asks
    for a gradient gets one, and distributed training needs no search for unused parameters.
    """

    def __init__(self, size: int, width: int, depth: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(size, width) / width**0.5)  # M×D
        states = torch.empty(size, 2).copy_(torch.atanh(spread_points(size)))
        self.states = nn.Parameter(states)  # M×2, unconstrained; the position is its tanh
        self.heads = nn.ModuleList(nn.Linear(width, 2) for _ in range(depth - 1))
        self.alpha = nn.Parameter(torch.full((depth - 1,), 0.01))

    def positions(self) -> Iterator[nn.Parameter]:
        """What says where the cores sit, and how they move."""
        yield self.states
        yield self.alpha
        yield from self.heads.parameters()

    def forward(self, cores: int, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """The first `cores` tokens (B×C×D), their states (B×C×2, float32) and how far each layer moves them (L−1)."""
        tokens, states = (part[:cores].expand(batch, -1, -1).clone() for part in (self.tokens, self.states))
        return tokens, states.float(), self.alpha.clone().float()  # a module's result is never its parameter

    def move(self, state: Tensor, pace: Tensor, tokens: Tensor, layer: int) -> Tensor:
        """The states (B×C×2) before block `layer` ≥ 1, from the core tokens (B×C×D) that reach it."""
        head = self.heads[layer - 1]  # called, not read: it may be an adapter, quantised, or on disk
        weight = getattr(head, "weight", None)
        device = "cpu" if state.is_meta else state.device.type  # autocast does not know the meta device
        casts = torch.is_autocast_enabled(device)  # entering the context takes as long as the rest of this function
        with torch.autocast(device, enabled=False) if casts else nullcontext():
            shift: Tensor = head(tokens.to(weight.dtype if isinstance(weight, Tensor) else torch.float32))
        return state + pace[layer - 1] * shift.float()  # positions stay float32


def spread_points(count: int, candidates: int = 1000, limit: float = 0.95) -> Tensor:
    """`count` points of [−limit, limit]², each the farthest from those before it, the first nearest the origin.

    The order matters: every prefix of the bank then covers the whole image.
    """
    # On the CPU even under `torch.device`.
    points = (torch.rand(max(candidates, count), 2, device="cpu") * 2 - 1) * limit
    return farther_points(points[points.square().sum(-1).argmin()][None], count, points)


def farther_points(chosen: Tensor, count: int, points: Tensor | None = None, limit: float = 0.95) -> Tensor:
    """The points that are there (n×2), and more of `points` (a fine lattice of [−limit, limit]² where none are given)
    up to `count`, each the farthest from all before it.
    """
    if points is None:
        side = torch.linspace(-limit, limit, 4 * math.ceil(count**0.5))
        points = torch.cartesian_prod(side, side)
    distance = (points[:, None] - chosen).square().sum(-1).amin(-1)
    for _ in range(count - len(chosen)):
        farthest = points[distance.argmax()][None]
        chosen = torch.cat((chosen, farthest))
        distance = torch.minimum(distance, (points - farthest).square().sum(-1))
    return chosen
