"""How much of each token's update comes from each token it reads (paper, appendix A.9; docs/inside.md).

    c_ij = ‖Σ_h a_ij^h · v_j^h W_O^h‖₂, normalised over j

Raw attention ignores that a value may be small and that heads may cancel; this does not. The norm is a quadratic form
in the H probabilities of a pair, with one H×H matrix per token read, so nothing of size N×C×D exists, and nothing of
size N×N either: patches read only cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from veca.block import Attention, Block, probabilities
from veca.model import Layers, Veca
from veca.rope import Rotation

ROWS = 1024  # patches of the dense arm that are looked at together: ROWS×(C+N) numbers, never N×N


class Contributions(NamedTuple):
    """Of one layer; rows sum to 1."""

    patches: Tensor  # B×N×C: the profile of each patch, its share from each core (dense arm: among the cores)
    cores: Tensor  # B×C×(C+N): what each core takes from every core and every patch

    @property
    def reads(self) -> Tensor:  # B×C×N
        """What each core takes from the patches alone, as a map over the photo that sums to 1."""
        return normalised(self.cores[..., self.cores.shape[1] :])

    @property
    def read_by(self) -> Tensor:  # B×C×N
        """Which patches take from each core: the columns of the profiles."""
        return self.patches.transpose(-2, -1)


@torch.inference_mode()
def contributions(model: Veca, images: Tensor, layers: Layers) -> Iterator[Contributions]:
    """The contributions in every layer, first to last, of what `model.forward_layers(images, cores)` returned."""
    by_patch = model.patch_rotation(layers.grid, images.device, layers.cells)
    entering = [layers.start, *zip(layers.cores, layers.patches, strict=True)]
    for block, (cores, patches), coords in zip(model.blocks, entering[:-1], layers.coords, strict=True):
        assert isinstance(block, Block)
        normed = block.norm_attn(cores), block.norm_attn(patches)
        yield layer_contributions(block.attn, *normed, model.rotation(coords), by_patch)


def layer_contributions(
    attention: Attention, cores: Tensor, patches: Tensor, by_core: Rotation | None, by_patch: Rotation | None
) -> Contributions:
    """The contributions in one layer, for the arguments of `Attention.forward` (B×C×D and B×N×D)."""
    side = attention.ask(cores, by_core)
    count = cores.shape[1]
    key = torch.cat((side.key, attention.keys(patches, by_patch)), dim=-2)
    grams = value_grams(torch.cat((side.value, attention.values(patches)), dim=-2), attention.out_proj.weight)
    core_rows = norms(probabilities(side.query, key), grams)
    readable = key if attention.dense else side.key
    patch_rows = [
        norms(probabilities(rows, readable)[..., :count], grams[:, :count])
        for rows in attention.queries(patches, by_patch).split(ROWS, dim=2)
    ]
    return Contributions(normalised(torch.cat(patch_rows, dim=1)), normalised(core_rows))


def value_grams(v: Tensor, out_weight: Tensor) -> Tensor:
    """The inner products of v_j^h W_O^h over the heads of each token j: B×H×T×d → B×T×H×H."""
    heads = v.shape[1]
    v = v.float().transpose(1, 2)  # B×T×H×d
    per_head = out_weight.float().unflatten(1, (heads, -1))  # D×H×d; W_O^h is the transpose of [:, h]
    rows = []
    for head in range(heads):
        mixing = torch.einsum("od,ohe->dhe", per_head[:, head], per_head)  # W_O^head (W_O^h)ᵀ: d×H×d
        rows.append((torch.einsum("btd,dhe->bthe", v[:, :, head], mixing) * v).sum(-1))
    return torch.stack(rows, dim=-2)


def norms(weights: Tensor, grams: Tensor) -> Tensor:
    """‖Σ_h a_ij^h u_j^h‖ from a (B×H×I×J) and the inner products of the u_j^h (B×J×H×H): B×I×J.

    Σ_h Σ_g a^h a^g ⟨u^h, u^g⟩, pair by pair: one einsum would copy everything into another order first.
    """
    heads = weights.shape[1]
    pairs = grams.permute(2, 3, 0, 1).unsqueeze(-2)  # H×H×B×1×J
    total = torch.zeros_like(weights[:, 0])
    for h in range(heads):
        inner = weights[:, h] * pairs[h, h]
        for g in range(h + 1, heads):
            inner.addcmul_(weights[:, g], pairs[h, g], value=2)
        total.addcmul_(weights[:, h], inner)
    return total.clamp_min_(0).sqrt_()


def normalised(values: Tensor) -> Tensor:
    """Rows that sum to 1; a row of zeros stays one."""
    return values / values.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
