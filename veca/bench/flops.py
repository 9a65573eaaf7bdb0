"""FLOPs of one image, by PyTorch's own counter on the meta device: no memory, no arithmetic, any resolution."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from veca.config import VecaConfig
from veca.errors import require
from veca.mixed import tokens_of
from veca.model import Veca

PREFIX = {"dinov2": 1, "dinov3": 5}  # tokens before the patches: a class token, and DINOv3's four registers


def veca_flops(config: VecaConfig, size: int, cores: int) -> int:
    """FLOPs of a forward pass over one size×size image; one multiply-add counts as two."""
    with torch.device("meta"):
        model = Veca(config).eval()
    return _count(model, size, cores=cores)


def closed_form_flops(config: VecaConfig, size: int, cores: int, share: float = 1.0) -> int:
    """The same number written out: linear layers over N+C tokens, and attention's 2NC + C² comparisons. With a share of
    the patches N is what is spent; choosing them costs no product.
    """
    width, hidden = config.width, config.hidden_width
    patches = tokens_of((size // config.patch_size,) * 2, share)
    tokens = patches + cores
    comparisons = tokens**2 if config.attention == "dense" else 2 * patches * cores + cores**2
    first = hidden * (2 if config.mlp == "swiglu" else 1)
    block = 2 * tokens * width * (4 * width + first + hidden) + 4 * comparisons * width
    embed = 2 * patches * 3 * config.patch_size**2 * width
    heads = (config.depth - 1) * 2 * cores * width * 2
    project = 2 * tokens * width * config.out_width if config.out_width else 0
    return config.depth * block + embed + heads + project


def attention_layer_flops(config: VecaConfig, size: int, cores: int) -> int:
    """One attention layer with its four projections; without cores, full attention as DINOv3 has it (Table S14)."""
    patches, width = (size // config.patch_size) ** 2, config.width
    tokens = patches + (cores or PREFIX["dinov3"])
    comparisons = 2 * patches * cores + cores**2 if cores else tokens**2
    return 8 * tokens * width**2 + 4 * comparisons * width


def dino(name: str, config: VecaConfig) -> nn.Module:
    """transformers' dinov2 or dinov3 with the depth, width, heads and patch size of `config`."""
    transformers = require("transformers", "bench")
    shape = {
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "patch_size": config.patch_size,
    }
    if name == "dinov2":
        older = transformers.Dinov2Config(**shape, mlp_ratio=4, image_size=37 * config.patch_size)
        model: nn.Module = transformers.Dinov2Model(older)
    else:
        newer = transformers.DINOv3ViTConfig(**shape, intermediate_size=config.width * 4, num_register_tokens=4)
        model = transformers.DINOv3ViTModel(newer)
    return model.eval()


def closed_form_dino_flops(name: str, config: VecaConfig, size: int) -> int:
    """The same as `dino_flops`, written out: full attention, an MLP four times as wide."""
    width, patches = config.width, (size // config.patch_size) ** 2
    tokens = patches + PREFIX[name]
    block = 2 * tokens * width * (4 + 8) * width + 4 * tokens**2 * width
    return config.depth * block + 2 * patches * 3 * config.patch_size**2 * width


def dino_flops(name: str, config: VecaConfig, size: int) -> int:
    """FLOPs of a dinov2 or dinov3 of the same depth, width, heads and patch size."""
    with torch.device("meta"):
        model = dino(name, config)
    return _count(model, size)


def _count(model: nn.Module, size: int, **arguments: Any) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.empty(1, 3, size, size, device="meta"), **arguments)
    return int(counter.get_total_flops())
