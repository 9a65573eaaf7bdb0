"""The DINO family's names on a VECA, so that a user of DINOv2 or DINOv3 swaps one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from veca.errors import InputError

if TYPE_CHECKING:
    from veca.model import Veca


class DinoNames:
    """A base of `Veca`, which has everything that is used here."""

    def forward_features(self: Veca, x: Tensor, cores: int | None = None) -> dict[str, Tensor | None]:  # type: ignore[misc]
        """DINOv3's dictionary: the global feature, the other cores where it has registers, the patches, and all tokens
        before the final norm; `masks` is None.
        """
        layers = self.forward_layers(x, cores, last_only=True)
        cores_out, patches = self.output(layers.cores[-1]), self.output(layers.patches[-1])
        return {
            "x_norm_clstoken": cores_out[:, 0],
            "x_storage_tokens": cores_out[:, 1:],  # the other cores
            "x_norm_patchtokens": patches,
            "x_prenorm": layers.tokens[-1],
            "masks": None,
        }

    def get_intermediate_layers(  # type: ignore[misc]
        self: Veca,
        x: Tensor,
        n: int | Sequence[int] = 1,
        *,
        reshape: bool = False,
        return_class_token: bool = False,
        return_extra_tokens: bool = False,
        norm: bool = True,
        cores: int | None = None,
    ) -> tuple[Tensor | tuple[Tensor, ...], ...]:
        """Patches after the last `n` blocks, or after the blocks listed (from 0), as DINOv3 returns them.

        These keep the width D: the output projection belongs to the last layer only.
        """
        wanted = list(range(self.depth - n, self.depth) if isinstance(n, int) else n)
        if any(not 0 <= index < self.depth for index in wanted):
            raise InputError(f"layers must lie between 0 and {self.depth - 1} (n at most {self.depth}), not {n!r}")
        layers = self.forward_layers(x, cores, keep=wanted)
        found = dict(zip(sorted(set(wanted)), zip(layers.cores, layers.patches, strict=True), strict=True))
        outputs: list[Tensor | tuple[Tensor, ...]] = []
        for index in wanted:
            tokens, patches = (self.norm(part) if norm else part for part in found[index])
            if reshape:
                patches = patches.transpose(1, 2).unflatten(-1, layers.grid).contiguous()
            extras = ((tokens[:, 0],) if return_class_token else ()) + ((tokens[:, 1:],) if return_extra_tokens else ())
            outputs.append((patches, *extras) if extras else patches)
        return tuple(outputs)

    @property
    def embed_dim(self: Veca) -> int:  # type: ignore[misc]
        return self.config.width

    @property
    def num_features(self: Veca) -> int:  # type: ignore[misc]
        return self.config.feature_width

    @property
    def patch_size(self: Veca) -> int:  # type: ignore[misc]
        return self.config.patch_size

    @property
    def depth(self: Veca) -> int:  # type: ignore[misc]
        return self.config.depth

    @property
    def num_prefix_tokens(self: Veca) -> int:  # type: ignore[misc]
        return self.default_cores
