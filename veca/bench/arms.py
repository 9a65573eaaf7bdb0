"""The contenders of a benchmark, each as a function to call: VECA, its dense control arm, DINOv3, plain products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from veca.attention import attend
from veca.bench.flops import dinov3_config
from veca.config import VecaConfig
from veca.errors import require
from veca.model import Veca

Call = Callable[[], object]


class Arm(NamedTuple):
    """One row of the table: which network, with how many cores (0: it has none)."""

    name: str  # veca, dense, dinov3, or products: the matrix products of veca and nothing else
    cores: int

    @property
    def label(self) -> str:
        return f"{self.name}, {self.cores} cores" if self.cores else self.name


def network(arm: Arm, config: VecaConfig, size: int, batch: int, device: torch.device, compiled: bool) -> Call:
    """A whole forward pass of `batch` size×size images, random weights."""
    torch.manual_seed(0)
    if arm.name == "products":
        return products(config, size, arm.cores, batch, device)
    images = torch.randn(batch, 3, size, size, device=device)
    if arm.name == "dinov3":
        model = require("transformers", "bench").DINOv3ViTModel(dinov3_config(config)).eval().to(device)
        return lambda: model(images)
    attention: Literal["core", "dense"] = "dense" if arm.name == "dense" else "core"
    ours: Callable[..., object] = Veca(replace(config, attention=attention)).eval().to(device)
    if compiled:
        ours = torch.compile(ours)
    return lambda: ours(images, cores=arm.cores)


def attention_path(arm: Arm, config: VecaConfig, size: int, batch: int, device: torch.device, _: bool) -> Call:
    """The attention of every layer alone, from queries, keys and values to the mixed values (paper, Fig. S.7)."""
    patches, heads, cores = (size // config.patch_size) ** 2, config.heads, arm.cores
    tokens = patches + (5 if arm.name == "dinov3" else cores)  # DINOv3: a class token and four registers
    q, k, v = torch.randn(3, batch, heads, tokens, config.head_width, device=device)

    def dense() -> None:
        for _ in range(config.depth):
            attend(q, k, v)

    def core_periphery() -> None:
        for _ in range(config.depth):
            rows = attend(q[:, :, :cores], k, v), attend(q[:, :, cores:], k[:, :, :cores], v[:, :, :cores])
            torch.cat(rows, dim=-2)

    return core_periphery if arm.name == "veca" else dense


def products(config: VecaConfig, size: int, cores: int, batch: int, device: torch.device) -> Call:
    """Every matrix product of a VECA forward pass, of the same shapes, into memory that is there already."""
    width, hidden, heads, d = config.width, config.hidden_width, config.heads, config.head_width
    patches = (size // config.patch_size) ** 2
    tokens, pixels = batch * (patches + cores), 3 * config.patch_size**2
    first = hidden * (2 if config.mlp == "swiglu" else 1)

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device) * 0.05

    # (rows, weights of every layer, result): weights differ by layer, as they do in a network
    linear = [(new(tokens, width), new(config.depth, width, width), new(tokens, width)) for _ in range(4)]
    linear.append((linear[0][0], new(config.depth, first, width), new(tokens, first)))
    linear.append((new(tokens, hidden), new(config.depth, width, hidden), linear[0][2]))
    embed = (new(batch * patches, pixels), new(width, pixels), new(batch * patches, width))
    groups = batch * heads
    core_query, patch_query = new(groups, cores, d), new(groups, patches, d)
    keys, core_keys = new(groups, patches + cores, d), new(groups, cores, d)
    core_logits, patch_logits = new(groups, cores, patches + cores), new(groups, patches, cores)

    def run() -> None:
        torch.mm(embed[0], embed[1].t(), out=embed[2])
        for layer in range(config.depth):
            for rows, weights, result in linear:
                torch.mm(rows, weights[layer].t(), out=result)
            torch.bmm(core_query, keys.transpose(1, 2), out=core_logits)
            torch.bmm(core_logits, keys)
            torch.bmm(patch_query, core_keys.transpose(1, 2), out=patch_logits)
            torch.bmm(patch_logits, core_keys)

    return run
