"""The names that the paper's authors give to the tensors and settings of a checkpoint, and ours for them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor

from veca.config import VecaConfig
from veca.errors import InputError

# Their name → ours; what no rule touches is called the same.
RENAMED = (
    (r"^pos_linears\.(\d+)\.", r"bank.heads.\1."),
    (r"^pos_alpha$", "bank.alpha"),
    (r"^final_norm\.", "norm."),
    (r"\.norm_ffn\.", ".norm_mlp."),
)
CHUNKED = {"query_token_chunks": "bank.tokens", "qcoord_chunks": "bank.states"}  # theirs: a list of 1×8×…; ours: one
MLP_RATIO = 2.66667


def is_official(tensors: Mapping[str, Tensor]) -> bool:
    return "patch_embed.proj.weight" in tensors and "query_token_chunks.0" in tensors


def tensors_of_official(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under our names, the chunks of the bank joined."""
    ours: dict[str, Tensor] = {}
    own_names = ("bank.", "blocks.", "norm.", "patch_embed.")
    for name, tensor in tensors.items():
        if name.split(".")[0] in CHUNKED:
            continue
        renamed = name
        for pattern, replacement in RENAMED:
            renamed = re.sub(pattern, replacement, renamed)
        if not renamed.startswith(own_names):  # the one layer left is the projection to the teacher's width
            renamed = "project." + name.rsplit(".", 1)[-1]
        if renamed in ours:
            raise InputError(f"tensor {name} of the checkpoint has no place in a VECA model")
        ours[renamed] = tensor
    for theirs, name in CHUNKED.items():
        count = sum(key.startswith(f"{theirs}.") for key in tensors)
        chunks = [tensors.get(f"{theirs}.{index}") for index in range(count)]
        if not chunks or any(chunk is None or chunk.ndim != 3 for chunk in chunks):
            raise InputError(f"the checkpoint's {theirs} are incomplete: {count} found, not numbered 0 to {count - 1}")
        if len({tuple(chunk.shape[2:]) for chunk in chunks if chunk is not None}) > 1:
            raise InputError(f"the checkpoint's {theirs} have different widths: they are not of one model")
        ours[name] = torch.cat([chunk[0] for chunk in chunks if chunk is not None])
    return ours


def config_of_official(tensors: Mapping[str, Tensor], settings: object) -> VecaConfig:
    """Their configuration as ours: shapes speak for themselves, the rest is honoured where it is given."""
    given: Mapping[str, Any] = settings if isinstance(settings, Mapping) else {}
    unsupported = [
        f"{name}={short(given[name])}"
        for name, only in (("patch_embed_use_ln", False), ("rope_zero_freqs_from", "low"), ("in_channels", 3))
        if given.get(name, only) != only
    ]
    if unsupported:
        raise InputError(f"the checkpoint was trained with {', '.join(unsupported)}, which this network does not have")
    for name, tensor in tensors.items():
        if (name == "patch_embed.proj.weight" and tensor.ndim != 4) or (
            name.startswith("query_token_chunks.") and tensor.ndim != 3
        ):
            raise InputError(f"tensor {name} of the checkpoint has {tensor.ndim} axes: it is not one of a VECA model")
    numbers = ("mlp_ratio", "num_heads", "rope_p_zero_freqs")
    odd = next((name for name in numbers if type(given.get(name, 0)) not in (int, float)), None)
    if odd:
        raise InputError(f"the checkpoint's config says {odd} = {short(given[odd])}, which is not a number")
    width, _, patch_size, _ = tensors["patch_embed.proj.weight"].shape
    blocks = [int(match[1]) for name in tensors if (match := re.match(r"blocks\.(\d+)\.", name))]
    first = tensors.get("blocks.0.fc2.weight")
    if not blocks or first is None or first.ndim != 2:
        raise InputError("the checkpoint lacks tensor blocks.0.fc2.weight: it is not a whole VECA model")
    hidden = first.shape[1]
    ratio = float(given.get("mlp_ratio", MLP_RATIO))
    project = tensors_of_official(tensors).get("project.weight")
    bank = sum(tensor.shape[1] for name, tensor in tensors.items() if name.startswith("query_token_chunks."))
    config = VecaConfig(
        depth=max(blocks) + 1,
        width=width,
        heads=int(given.get("num_heads", max(1, width // 64))),
        mlp_ratio=ratio if int(width * ratio) == hidden else hidden / width,
        patch_size=patch_size,
        bank=bank,
        out_width=given.get("distill_output_dim") or (None if project is None else project.shape[0]),
        rope_zero_fraction=float(given.get("rope_p_zero_freqs", 0.125)),
    )
    for name, value in (("hidden_dim", width), ("num_layers", config.depth), ("num_query_tokens", bank)):
        if given.get(name, value) != value:
            raise InputError(f"the checkpoint's config says {name} = {short(given[name])}, but its tensors say {value}")
    return config
