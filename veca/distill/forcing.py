"""The forced pass (docs/training.md): each block is fed the teacher's patches, only the cores flow from block to block.

The same computation as `Veca.forward_layers` with the teacher's patches at every entry, but cheaper to train: what
enters is given, so no gradient is carried back to it, and of the patches that leave a block only a share is computed.
All of them are still read by the cores.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from veca.attention import attend
from veca.model import Block, Veca
from veca.rope import Rotation


def forced_layers(
    model: Veca,
    images: Tensor,  # B×3×H×W
    cores: int,
    entering: Tensor,  # (L−1)×B×N×D: the teacher's patches that enter block 2 to L
    chosen: Tensor | None,  # n of the N patches, the same for all images; None: all
) -> list[Tensor]:
    """What leaves each block: B×(C+n)×D, cores first.

    The first block gets the student's own patch embedding, so that every parameter takes part in every step.
    """
    patches, grid = model.embed(images)
    tokens, state = model.bank.start(cores, images.shape[0])
    tokens = tokens.to(patches.dtype)
    by_patch = model.patch_rotation(grid, images.device)
    kept = []
    for index, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        if index > 0:
            patches = entering[index - 1].to(patches.dtype)
            state = model.bank.move(state, tokens, index)
        by_core = model.rotation(state.tanh())
        if model.grad_checkpointing:
            x = checkpoint(forced_block, block, tokens, patches, by_core, by_patch, chosen, use_reentrant=False)
        else:
            x = forced_block(block, tokens, patches, by_core, by_patch, chosen)
        tokens = x[:, :cores]
        kept.append(x)
    return kept


def forced_block(
    block: Block, tokens: Tensor, patches: Tensor, by_core: Rotation, by_patch: Rotation, chosen: Tensor | None
) -> Tensor:
    """One block on cores (B×C×D) and patches (B×N×D); the cores and the chosen patches leave it."""
    attn = block.attn

    def heads(layer: nn.Module, x: Tensor) -> Tensor:  # B×T×D → B×H×T×d
        out: Tensor = layer(x).reshape(*x.shape[:2], attn.heads, -1).transpose(1, 2)
        return out

    normed = block.norm_attn(patches)
    core_q, core_k, core_v = attn.project(block.norm_attn(tokens), by_core)
    patch_k, patch_v = attn.turn(heads(attn.k_proj, normed), by_patch), heads(attn.v_proj, normed)
    if chosen is not None:
        patches, normed = patches[:, chosen], normed[:, chosen]
        by_patch = by_patch.at(chosen)
    patch_q = attn.turn(heads(attn.q_proj, normed), by_patch)
    k, v = torch.cat((core_k, patch_k), dim=-2), torch.cat((core_v, patch_v), dim=-2)
    readable = (k, v) if attn.dense else (core_k, core_v)
    mixed = torch.cat((attend(core_q, k, v), attend(patch_q, *readable)), dim=-2)
    x = torch.cat((tokens, patches), dim=1) + attn.out_proj(mixed.transpose(1, 2).flatten(2))
    out: Tensor = x + block.mlp(block.norm_mlp(x))
    return out
