"""The mask head: learned queries join the cores in a few further core-periphery blocks (docs/masks.md).

Queries and cores read every patch, patches read them, and a mask is the product of a query with each patch. So the
head costs as much as its backbone's own blocks do: linear in the area, at any size and budget. Finer patches only look,
so a head trained on the grid draws finer masks of the same things. On a model without cores the global feature stands
for them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from veca.block import Block
from veca.config import VecaConfig
from veca.rope import patch_coords

WIDTH = 256  # of its tokens
WAVES = 4  # per axis, the longest twice as long as the picture


class Found(NamedTuple):
    """What the queries say after one block."""

    classes: Tensor  # B×Q×(K+1) logits; the last class is "nothing"
    masks: Tensor  # B×Q×h×w logits


class MaskHead(nn.Module):
    def __init__(self, features: int, classes: int, queries: int, depth: int, width: int = WIDTH) -> None:
        super().__init__()
        config = VecaConfig(depth=depth, width=width, heads=max(1, width // 64), bank=queries)
        self.norm_in = nn.LayerNorm(features)
        self.enter = nn.Linear(features, width)
        self.place = nn.Linear(4 * WAVES, width)
        self.queries = nn.Parameter(torch.randn(queries, width) / width**0.5)
        self.blocks = nn.ModuleList(Block(config) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.kind = nn.Linear(width, classes + 1)
        self.shape = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.pixel = nn.Linear(width, width)

    def forward(
        self,
        cores: Tensor,  # B×C×D
        patches: Tensor,  # B×N×D, h·w = N
        grid: tuple[int, int],  # (h, w)
        finer: tuple[Tensor, tuple[int, int]] | None = None,  # B×N′×D and its lattice: these only look
    ) -> list[Found]:
        """What is found after each block, on the grid or on the finer lattice."""
        count = len(self.queries)
        tokens = torch.cat((self.queries.expand(len(patches), -1, -1), self.enter(self.norm_in(cores))), dim=1)
        stream, lattice = self.placed(patches, grid), finer[1] if finer else grid
        looking = self.placed(*finer) if finer else None
        found = []
        for block in self.blocks:
            assert isinstance(block, Block)
            if looking is not None:
                looking = block.look(looking, block.norm_attn(looking), None, block.ask(tokens, None))
            tokens, stream = block(tokens, stream, None, None)
            asked = self.norm(tokens[:, :count])
            pixels = self.pixel(self.norm(stream if looking is None else looking))
            masks = (self.shape(asked) @ pixels.transpose(1, 2)).float() / math.sqrt(asked.shape[-1])
            found.append(Found(self.kind(asked).float(), masks.unflatten(-1, lattice)))
        return found

    def placed(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """Features as the head's tokens, each with where it is."""
        place = self.place(waves(patch_coords(*grid, patches.device)).to(patches.dtype))
        stream: Tensor = self.enter(self.norm_in(patches)) + place
        return stream


def waves(coords: Tensor) -> Tensor:  # N×2 → N×4·WAVES
    """Where a patch is, for a linear layer: continuous, so that any grid and stride will do."""
    angles = coords[..., None] * (math.pi / 2) * 2.0 ** torch.arange(WAVES, device=coords.device)
    return torch.cat((angles.sin(), angles.cos()), dim=-1).flatten(-2)
