"""One block, two verbs (paper, section 3.1): cores *read* every token, patches *look* at the cores.

A block works on two tensors, the cores (B×C×D) and the patches (B×N×D). No patch meets another patch, so patches may
come in any number, from anywhere and in any parts:

    side = block.ask(cores, by_core)                      # what the cores ask for, and what they tell
    view = block.norm_attn(patches)
    seen = block.read(side, view, by_patch)               # of parts of the patches, merged in any order
    patches = block.look(patches, view, by_patch, side)   # each patch alone
    cores = block.settle(cores, side, seen)

`Block.forward` is the same with all patches at once: 2NC + C² comparisons, and no tensor with N² entries. The dense
control arm has the same parameters; there every token reads every token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from veca.config import VecaConfig
from veca.rope import Rotation, rotate

FEW = 128  # rows or columns of probabilities that may be kept for the backward pass


class Read(NamedTuple):
    """softmax(q kᵀ/√d) v over the tokens read so far, kept so that more can join (docs/research/mathematics.md)."""

    peak: Tensor
    """B×H×C×1, the largest logit"""
    total: Tensor
    """B×H×C×1, Σ exp(logit − peak)"""
    mixed: Tensor
    """B×H×C×d, Σ exp(logit − peak) · value"""

    @staticmethod
    def of_nothing(query: Tensor) -> Read:
        """What queries (B×H×C×d) take where there is no token; gradients pass, and are zero."""
        mixed = query.float() * 0
        total = mixed.sum(-1, keepdim=True)
        return Read(torch.full_like(total, -torch.inf), total, mixed)

    def merge(self, other: Read) -> Read:
        """Of the tokens of both, in any order."""
        peak = torch.maximum(self.peak, other.peak)
        level = peak.clamp(min=torch.finfo(peak.dtype).min)  # of nothing and nothing: −∞ − −∞ would be no number
        ours, theirs = (self.peak - level).exp(), (other.peak - level).exp()
        return Read(
            peak, self.total * ours + other.total * theirs, torch.addcmul(self.mixed * ours, other.mixed, theirs)
        )

    def result(self) -> Tensor:  # B×H×C×d
        return self.mixed / self.total


class CoreSide(NamedTuple):
    """The cores in one layer, B×H×C×d each: what they ask with, and what others find in them."""

    query: Tensor
    key: Tensor
    value: Tensor


class AttentionMaps(NamedTuple):
    """The probabilities of one layer, for looking at; each row sums to 1."""

    cores: Tensor  # B×H×C×(C+N): what each core reads
    patches: Tensor  # B×H×N×C: what each patch reads (B×H×N×(C+N) in the dense arm)


class Attention(nn.Module):
    """Core-periphery attention, on normalised tokens."""

    def __init__(self, config: VecaConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dense = config.attention == "dense"
        self.q_proj = nn.Linear(config.width, config.width)
        self.k_proj = nn.Linear(config.width, config.width)
        self.v_proj = nn.Linear(config.width, config.width)
        self.out_proj = nn.Linear(config.width, config.width)

    def forward(
        self,
        cores: Tensor,  # B×C×D
        patches: Tensor,  # B×N×D
        by_core: Rotation | None,
        by_patch: Rotation | None,
        looking: Tensor | None = None,  # n of the N patches, by number: only these look; None: all
        reading: Tensor | None = None,  # likewise: only these are read
    ) -> tuple[Tensor, Tensor]:
        """The updates of the cores (B×C×D) and of the patches that look (B×n×D).

        Not `read` and `look` one after the other: all keys at once let `attend` use PyTorch's fused kernel.
        """
        read, by_read = (
            (patches, by_patch) if reading is None else (patches[:, reading], by_patch and by_patch.at(reading))
        )
        side, key, value = self.ask(cores, by_core), self.keys(read, by_read), self.values(read)
        everything = torch.cat((side.key, key), dim=-2), torch.cat((side.value, value), dim=-2)
        if looking is not None:
            patches, by_patch = patches[:, looking], by_patch and by_patch.at(looking)
        told = everything if self.dense else (side.key, side.value)
        return (
            self.out(self.attend(side.query, *everything)),
            self.out(self.attend(self.queries(patches, by_patch), *told)),
        )

    def ask(self, cores: Tensor, by: Rotation | None) -> CoreSide:
        return CoreSide(self.queries(cores, by), self.keys(cores, by), self.values(cores))

    def queries(self, x: Tensor, by: Rotation | None) -> Tensor:  # B×T×D → B×H×T×d, rotated, as keys are
        return self.turn(self.split(self.q_proj(x)), by)

    def keys(self, x: Tensor, by: Rotation | None) -> Tensor:
        return self.turn(self.split(self.k_proj(x)), by)

    def values(self, x: Tensor) -> Tensor:
        return self.split(self.v_proj(x))

    def out(self, mixed: Tensor) -> Tensor:  # B×H×T×d → B×T×D
        update: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return update

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v)

    def split(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return heads

    def turn(self, x: Tensor, by: Rotation | None) -> Tensor:
        return x if by is None else rotate(x, by)

    def maps(
        self, cores: Tensor, patches: Tensor, by_core: Rotation | None, by_patch: Rotation | None
    ) -> AttentionMaps:
        """The probabilities behind `forward` for the same arguments."""
        query, key, _ = self.ask(cores, by_core)
        everything = torch.cat((key, self.keys(patches, by_patch)), dim=-2)
        looks = probabilities(self.queries(patches, by_patch), everything if self.dense else key)
        return AttentionMaps(probabilities(query, everything), looks)


class Block(nn.Module):
    """Attention, then an MLP, each on normalised tokens and added to the stream."""

    def __init__(self, config: VecaConfig) -> None:
        super().__init__()
        self.gated = config.mlp == "swiglu"
        self.norm_attn = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.attn = Attention(config)
        self.norm_mlp = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.fc1 = nn.Linear(config.width, config.hidden_width * (2 if self.gated else 1))
        self.fc2 = nn.Linear(config.hidden_width, config.width)

    def forward(
        self,
        cores: Tensor,
        patches: Tensor,
        by_core: Rotation | None,
        by_patch: Rotation | None,
        looking: Tensor | None = None,
        reading: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Cores (B×C×D) and patches (B×N×D) → both after this block; of the patches only those `looking`, by number,
        and only those `reading` are read.
        """
        told = self.attn(self.norm_attn(cores), self.norm_attn(patches), by_core, by_patch, looking, reading)
        return self.finish(cores, told[0]), self.finish(patches if looking is None else patches[:, looking], told[1])

    def ask(self, cores: Tensor, by: Rotation | None) -> CoreSide:
        return self.attn.ask(self.norm_attn(cores), by)

    def read(self, side: CoreSide, view: Tensor, by: Rotation | None) -> Read:
        """What the cores take from these patches alone; `view` is their norm, B×n×D."""
        return read(side.query, self.attn.keys(view, by), self.attn.values(view))

    def look(self, patches: Tensor, view: Tensor, by: Rotation | None, side: CoreSide) -> Tensor:
        """These patches after this block, whatever others there are; `view` is their norm."""
        return self.finish(patches, self.attn.out(self.attn.attend(self.attn.queries(view, by), side.key, side.value)))

    def settle(self, cores: Tensor, side: CoreSide, seen: Read) -> Tensor:
        """The cores after this block: they read themselves too."""
        return self.finish(cores, self.attn.out(read(*side).merge(seen).result().to(cores.dtype)))

    def finish(self, x: Tensor, update: Tensor) -> Tensor:
        x = x + update
        out: Tensor = x + self.mlp(self.norm_mlp(x))
        return out

    def mlp(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x)
        if self.gated:
            u, v = hidden.chunk(2, dim=-1)
            hidden = nn.functional.silu(u) * v
        else:
            hidden = nn.functional.gelu(hidden)
        out: Tensor = self.fc2(hidden)
        return out


def read(q: Tensor, k: Tensor, v: Tensor) -> Read:
    """What queries (B×H×C×d) take from keys and values (B×H×T×d): one part of a softmax, in float32."""
    logits = ((q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)).float()
    peak = logits.detach().amax(-1, keepdim=True)  # any number near it would do: no gradient passes here
    weights = (logits - peak).exp()
    return Read(peak, weights.sum(-1, keepdim=True), (weights.to(v.dtype) @ v).float())


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q kᵀ/√d) v: `read(q, k, v).result()`, by PyTorch's fused kernel where that is the faster.

    On a CPU it goes back through bfloat16 three times as slowly as the plain operations do. These keep the
    probabilities, which between cores and patches are few.
    """
    few = min(q.shape[-2], k.shape[-2]) <= FEW
    if few and q.requires_grad and q.device.type == "cpu" and q.dtype == torch.bfloat16:
        return read(q, k, v).result().to(v.dtype)
    mixed: Tensor = nn.functional.scaled_dot_product_attention(q, k, v)
    return mixed


def probabilities(q: Tensor, k: Tensor) -> Tensor:
    """softmax(q kᵀ/√d) in float32, for looking at."""
    rows: Tensor = (q.float() @ k.float().transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1)
    return rows
