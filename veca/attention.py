"""Core-periphery attention (paper, section 3.1): cores read every token, patches read only the cores.

For N patches and C cores that is 2NC + C² comparisons, and no tensor with N² entries exists. The dense control arm has
the same parameters, and every token reads every token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from veca.config import VecaConfig
from veca.rope import Rotation, rotate

FEW = 128  # rows or columns of probabilities that may be kept for the backward pass


class AttentionMaps(NamedTuple):
    """The probabilities of one layer, for looking at; each row sums to 1."""

    cores: Tensor  # B×H×C×(C+N): what each core reads
    patches: Tensor  # B×H×N×C: what each patch reads (B×H×N×(C+N) in the dense arm)


class Attention(nn.Module):
    def __init__(self, config: VecaConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dense = config.attention == "dense"
        self.turns = config.rope_zero_fraction < 1  # a converted DINOv2 has no rotation: nothing to compute then
        self.q_proj = nn.Linear(config.width, config.width)
        self.k_proj = nn.Linear(config.width, config.width)
        self.v_proj = nn.Linear(config.width, config.width)
        self.out_proj = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, cores: int, by: Rotation) -> Tensor:
        """x: B×(C+N)×D, the first `cores` tokens being the cores."""
        q, k, v = self.project(x, by)
        if self.dense:
            mixed = attend(q, k, v)
        else:
            core_rows = attend(q[:, :, :cores], k, v)
            patch_rows = attend(q[:, :, cores:], k[:, :, :cores], v[:, :, :cores])
            mixed = torch.cat((core_rows, patch_rows), dim=-2)
        out: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def project(self, x: Tensor, by: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, rotated, and values: B×H×T×d each."""
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.turn(q, by), self.turn(k, by), v

    def turn(self, x: Tensor, by: Rotation) -> Tensor:
        return rotate(x, by) if self.turns else x

    def maps(self, x: Tensor, cores: int, by: Rotation) -> AttentionMaps:
        """The probabilities behind `forward` for the same arguments."""
        q, k, _ = self.project(x, by)
        readable = k if self.dense else k[:, :, :cores]
        return AttentionMaps(probabilities(q[:, :, :cores], k), probabilities(q[:, :, cores:], readable))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q kᵀ / √d) v.

    PyTorch's fused kernel on a CPU goes back through bfloat16 three times as slowly as three plain operations do. These
    keep the probabilities, which between cores and patches are few.
    """
    few = min(q.shape[-2], k.shape[-2]) <= FEW
    if few and q.requires_grad and q.device.type == "cpu" and q.dtype == torch.bfloat16:
        rows: Tensor = ((q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)).float().softmax(-1)
        return rows.to(v.dtype) @ v
    mixed: Tensor = nn.functional.scaled_dot_product_attention(q, k, v)
    return mixed


def probabilities(q: Tensor, k: Tensor) -> Tensor:
    """softmax(q kᵀ / √d) in float32."""
    logits = q.float() @ k.float().transpose(-2, -1) * q.shape[-1] ** -0.5
    rows: Tensor = logits.softmax(-1)
    return rows
