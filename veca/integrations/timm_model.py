"""VECA with timm's methods. Nothing here imports timm, so that everything here can be tested without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from veca.config import VecaConfig
from veca.errors import InputError
from veca.images import MEAN, STD
from veca.model import Veca

POOLS = ("token", "avg", "")  # the first core, the mean of the patches, no pooling


class TimmVeca(Veca):
    """A `Veca` that timm's scripts can train and take apart: tokens from `forward_features`, logits from `forward`.

    The prefix tokens are the active cores: `num_prefix_tokens` is the budget. Any image size in whole patches is
    served, so `img_size` is accepted and has no effect.
    """

    def __init__(
        self,
        config: VecaConfig,
        num_classes: int = 0,
        global_pool: str = "token",
        in_chans: int = 3,
        img_size: int | tuple[int, int] | None = None,
        cores: int | None = None,
        drop_rate: float = 0.0,  # before the head
        **settings: Any,  # of VecaConfig
    ) -> None:
        super().__init__(replace(config, **settings))
        if in_chans != 3:
            raise InputError(f"VECA sees RGB: in_chans must be 3, not {in_chans}")
        self.default_cores = self.config.bank if cores is None else cores
        self.head_drop = nn.Dropout(drop_rate)
        self.feature_info = [
            {"module": f"blocks.{index}", "num_chs": self.config.width, "reduction": self.config.patch_size}
            for index in range(self.config.depth)
        ]
        self.reset_classifier(num_classes, global_pool)

    @property
    def head_hidden_size(self) -> int:
        return self.config.feature_width

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # B×3×H×W → B×K
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor) -> Tensor:  # type: ignore[override]  # B×3×H×W → B×(C+N)×D′
        tokens: Tensor = self.project(self.norm(self.forward_layers(x, last_only=True).tokens[-1]))
        return tokens

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:  # B×(C+N)×D′ → B×K
        if self.global_pool == "token":
            x = x[:, 0]
        elif self.global_pool == "avg":
            x = x[:, self.num_prefix_tokens :].mean(dim=1)
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def forward_intermediates(
        self,
        x: Tensor,  # B×3×H×W
        indices: int | Sequence[int] | None = None,  # the last so many blocks, or these; all without it
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,  # changes nothing here: `prune_intermediate_layers` saves the work
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """Patches after chosen blocks, as B×D×h×w or B×N×D; with the final tokens unless `intermediates_only`."""
        if output_fmt not in ("NCHW", "NLC"):
            raise InputError(f"output_fmt must be NCHW or NLC, not {output_fmt!r}")
        layers = self.forward_layers(x)
        cores, found = self.num_prefix_tokens, []
        for index in self.taken(indices):
            tokens = self.norm(layers.tokens[index]) if norm else layers.tokens[index]
            patches = tokens[:, cores:]
            if output_fmt == "NCHW":
                patches = patches.transpose(1, 2).unflatten(-1, layers.grid).contiguous()
            found.append((patches, tokens[:, :cores]) if return_prefix_tokens else patches)
        return found if intermediates_only else (self.project(self.norm(layers.tokens[-1])), found)

    def taken(self, indices: int | Sequence[int] | None) -> list[int]:
        """Numbers of blocks from what timm calls indices, in order."""
        count = len(self.blocks)
        last = count if indices is None else indices
        wanted = range(count - last, count) if isinstance(last, int) else last
        numbers = sorted({index + count if index < 0 else index for index in wanted})
        if not numbers or not 0 <= numbers[0] <= numbers[-1] < count:
            raise InputError(f"indices must lie between 0 and {count - 1}, not {indices!r}")
        return numbers

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the blocks after the last one wanted."""
        numbers = self.taken(indices)
        self.blocks = self.blocks[: numbers[-1] + 1]
        if prune_norm:
            self.norm = nn.Identity()  # type: ignore[assignment]
        if prune_head:
            self.project = nn.Identity()
            self.reset_classifier(0, "")
        return numbers

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        if global_pool is not None:
            if global_pool not in POOLS:
                raise InputError(f"global_pool must be one of {POOLS}, not {global_pool!r}")
            self.global_pool = global_pool
        self.num_classes = num_classes
        self.head: nn.Module = nn.Identity()
        if num_classes:
            linear = nn.Linear(self.config.feature_width, num_classes)
            nn.init.trunc_normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
            self.head = linear

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Which parameters belong together, for layer-wise rates: what comes before the blocks, then block by block."""
        return {
            "stem": r"^bank|^table|^patch_embed",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm|^project", (99999,))],
        }

    def no_weight_decay(self) -> set[str]:
        return {"bank.tokens", "bank.states", "bank.alpha", "table"}


def pretrained_cfg(config: VecaConfig, file: str = "") -> dict[str, Any]:
    """What timm keeps beside a model: how to prepare images for it, and where its weights are."""
    return {
        "file": file,
        "num_classes": 0,
        "input_size": (3, 16 * config.patch_size, 16 * config.patch_size),
        "fixed_input_size": False,
        "pool_size": None,
        "crop_pct": 256 / 288,
        "interpolation": "bicubic",
        "mean": MEAN,
        "std": STD,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "paper_ids": "arXiv:2605.12491",
        "paper_name": "Elastic Attention Cores for Scalable Vision Transformers",
    }


def backbone_tensors(tensors: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """A model folder's tensors as this model names them: those of a transformers model lose their prefix."""
    if any(name.startswith("veca.") for name in tensors):
        tensors = {name.removeprefix("veca."): value for name, value in tensors.items() if name.startswith("veca.")}
    dtype = next(model.parameters()).dtype
    return {name: value.to(dtype) if torch.is_floating_point(value) else value for name, value in tensors.items()}
