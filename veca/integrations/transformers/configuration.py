"""`VecaConfig` as `transformers` wants it: the flat config.json that `model.save` writes, and a few more fields."""

from __future__ import annotations

from dataclasses import field
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedConfig
from transformers.backbone_utils import BackboneConfigMixin

import veca.config
from veca.errors import InputError
from veca.images import SIZE
from veca.model import Veca
from veca.remote import AUTO_MAP, write_code


class VecaConfig(BackboneConfigMixin, PreTrainedConfig):  # type: ignore[misc]
    """The fields of `veca.VecaConfig`, then what only `transformers` needs.

    The library's own names for width, depth and heads (`hidden_size`, `num_hidden_layers`, …) work too.
    """

    model_type = "veca"
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "width",
        "num_hidden_layers": "depth",
        "num_attention_heads": "heads",
        "layer_norm_eps": "norm_eps",
    }

    depth: int = 12
    width: int = 384
    heads: int = 6
    mlp_ratio: float | int = 2.66667
    patch_size: int = 16
    bank: int = 64
    out_width: int | None = None
    norm_eps: float = 1e-5
    rope_zero_fraction: float | int = 0.125
    attention: str = "core"
    mlp: str = "swiglu"
    positions: str = "rope"
    table_size: int = 37

    image_size: int = SIZE  # what the image processor resizes to; any size in whole patches will do
    num_channels: int = 3
    cores: int | None = None  # the budget where a call does not name one; None: the whole bank
    card: dict[str, Any] = field(default_factory=dict)  # where the weights came from
    apply_layernorm: bool = True  # of the backbone's feature maps
    reshape_hidden_states: bool = True  # feature maps as B×D×h×w, not B×(1+N)×D with the first core before the patches
    semantic_loss_ignore_index: int = 255
    depth_head: str = "bins"  # or "regression"; both as in `veca probe depth`
    depth_bins: int = 256
    min_depth: float = 1e-3  # metres
    max_depth: float = 10.0
    mask_queries: int = 50  # as in `veca probe masks`
    mask_layers: int = 3
    mask_fine: int | None = None  # pixels from one value of a mask to the next; None: a patch
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None
    auto_map: dict[str, str] = field(default_factory=lambda: dict(AUTO_MAP))

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_channels != 3:
            raise InputError(f"VECA sees RGB: num_channels must be 3, not {self.num_channels!r}")
        self.stage_names = ["stem", *(f"stage{number}" for number in range(1, self.depth + 1))]
        self.set_output_features_output_indices(
            out_indices=kwargs.pop("out_indices", None), out_features=kwargs.pop("out_features", None)
        )
        super().__post_init__(**kwargs)

    @property
    def num_register_tokens(self) -> int:
        """Cores beside the first: code for DINOv3 finds the patches behind 1 + this many tokens."""
        return (self.cores or self.bank) - 1

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """As in `transformers`, with the file that lets the folder be loaded by `trust_remote_code=True`."""
        self.auto_map = dict(AUTO_MAP)  # a model from the hub names the file there
        super().save_pretrained(save_directory, **kwargs)
        write_code(save_directory)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing: it would make `save_pretrained` copy the package's files into each folder."""

    def plain(self) -> veca.config.VecaConfig:
        """The part that `veca.Veca` is built from."""
        names = [one.name for one in fields_of(veca.config.VecaConfig)]
        return veca.config.VecaConfig(**{name: getattr(self, name) for name in names})

    @classmethod
    def from_plain(cls, model: Veca, **more: Any) -> VecaConfig:
        """The configuration of a plain model; `more` are fields of this class."""
        cores = model.default_cores if model.default_cores != model.config.bank else None
        return cls(**{**model.config.to_dict(), "cores": cores, "card": model.card, **more})
