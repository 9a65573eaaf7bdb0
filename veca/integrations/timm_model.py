"""VECA with timm's methods. Nothing here imports timm, so that everything here can be tested without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from veca.config import VecaConfig
from veca.errors import InputError
from veca.images import MEAN, SIZE, STD
from veca.model import PatchConv, Veca

POOLS = ("token", "avg", "max", "avgmax", "")  # the first core; of the patches the mean, maximum, both; no pooling


class TimmVeca(Veca):
    """A `Veca` that timm's scripts can train and take apart: tokens from `forward_features`, logits from `forward`.

    The prefix tokens are the active cores: `num_prefix_tokens` is the budget. Every image size is served, so `img_size`
    and `dynamic_img_size` are accepted and change nothing; a size that is not in whole patches is padded with zeros at
    the right and at the bottom, unless `dynamic_img_pad` says otherwise.
    """

    def __init__(
        self,
        config: VecaConfig,
        num_classes: int = 0,
        global_pool: str = "token",
        in_chans: int = 3,
        img_size: int | tuple[int, int] | None = None,
        dynamic_img_size: bool = True,
        dynamic_img_pad: bool = True,
        cores: int | None = None,
        drop_rate: float = 0.0,  # before the head
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **settings: Any,  # of VecaConfig
    ) -> None:
        known = {field.name for field in fields(VecaConfig)}
        unknown = sorted(name for name, value in settings.items() if name not in known and value)  # 0 asks for nothing
        if unknown:
            raise InputError(f"VECA has no {', '.join(unknown)}: leave it out of create_model")
        super().__init__(replace(config, **{name: value for name, value in settings.items() if name in known}))
        self.in_chans = in_chans
        if in_chans != 3:
            old = self.patch_embed.proj
            self.patch_embed.proj = PatchConv(in_chans, old.out_channels, old.kernel_size, old.stride)  # type: ignore[arg-type]
            self.init_weights()
        self.default_cores = self.config.bank if cores is None else cores
        self.dynamic_img_pad = dynamic_img_pad
        self.head_drop = nn.Dropout(drop_rate)
        self.feature_info = [
            {"module": f"blocks.{index}", "num_chs": self.config.width, "reduction": self.config.patch_size}
            for index in range(self.config.depth)
        ]
        self.reset_classifier(num_classes, global_pool)
        self.to(device=device, dtype=dtype)

    @property
    def head_hidden_size(self) -> int:
        """Width of what the head reads."""
        return self.config.feature_width

    def set_input_size(self, img_size: int | tuple[int, int] | None = None, patch_size: int | None = None) -> None:
        """Every image size is served already."""
        if patch_size not in (None, self.patch_size):
            raise InputError(f"the patches of this model are {self.patch_size} pixels wide, and stay so")

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """B×3×H×W → B×K"""
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """B×3×H×W → B×(C+N)×D′"""
        tokens: Tensor = self.project(self.norm(self.forward_layers(self.padded(x), last_only=True).tokens[-1]))
        return tokens

    def padded(self, x: Tensor) -> Tensor:
        """Images in whole patches."""
        below, right = -x.shape[-2] % self.config.patch_size, -x.shape[-1] % self.config.patch_size
        return nn.functional.pad(x, (0, right, 0, below)) if self.dynamic_img_pad and (below or right) else x

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:  # B×(C+N)×D′ → B×K
        patches = x[:, self.num_prefix_tokens :]
        if self.global_pool == "token":
            x = x[:, 0]
        elif self.global_pool == "avg":
            x = patches.mean(dim=1)
        elif self.global_pool == "max":
            x = patches.amax(dim=1)
        elif self.global_pool == "avgmax":
            x = 0.5 * (patches.mean(dim=1) + patches.amax(dim=1))
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
        output_dict: bool = False,
    ) -> Any:
        """Patches after chosen blocks, as B×D×h×w or B×N×D; with the final tokens unless `intermediates_only`."""
        if output_fmt not in ("NCHW", "NLC"):
            raise InputError(f"output_fmt must be NCHW or NLC, not {output_fmt!r}")
        layers = self.forward_layers(self.padded(x))
        cores, patches, prefix = self.num_prefix_tokens, [], []
        for index in self.taken(indices):
            tokens = self.norm(layers.tokens[index]) if norm else layers.tokens[index]
            found = tokens[:, cores:]
            if output_fmt == "NCHW":
                found = found.transpose(1, 2).unflatten(-1, layers.grid).contiguous()
            patches.append(found)
            prefix.append(tokens[:, :cores])
        if output_dict:
            answer: dict[str, Any] = {"image_intermediates": patches}
            if return_prefix_tokens:
                answer["image_intermediates_prefix"] = prefix
            if not intermediates_only:
                answer["image_features"] = self.project(self.norm(layers.tokens[-1]))
            return answer
        both: list[Any] = list(zip(patches, prefix, strict=True)) if return_prefix_tokens else patches
        return both if intermediates_only else (self.project(self.norm(layers.tokens[-1])), both)

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
            self.head = linear.to(self.patch_embed.proj.weight)  # where the model is, in its precision

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
        "input_size": (3, SIZE, SIZE),
        "fixed_input_size": False,
        "pool_size": (SIZE // config.patch_size, SIZE // config.patch_size),
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
