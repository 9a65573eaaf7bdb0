"""`VecaConfig` as `transformers` wants it: the flat config.json that `model.save` writes, and a few more fields."""

from __future__ import annotations

from dataclasses import field
from dataclasses import fields as fields_of
from typing import Any, ClassVar

from transformers import PreTrainedConfig
from transformers.backbone_utils import BackboneConfigMixin

import veca.config
from veca.model import Veca


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

    cores: int | None = None  # the budget where a call does not name one; None: the whole bank
    card: dict[str, Any] = field(default_factory=dict)  # where the weights came from
    apply_layernorm: bool = True  # of the backbone's feature maps
    reshape_hidden_states: bool = True  # feature maps as B×D×h×w, not B×N×D
    semantic_loss_ignore_index: int = 255
    depth_head: str = "bins"  # or "regression"; both as in `veca probe depth`
    depth_bins: int = 256
    min_depth: float = 1e-3  # metres
    max_depth: float = 10.0
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.stage_names = ["stem", *(f"stage{number}" for number in range(1, self.depth + 1))]
        self.set_output_features_output_indices(
            out_indices=kwargs.pop("out_indices", None), out_features=kwargs.pop("out_features", None)
        )
        super().__post_init__(**kwargs)

    @property
    def num_register_tokens(self) -> int:
        """Cores beside the first: code for DINOv3 finds the patches behind 1 + this many tokens."""
        return (self.cores or self.bank) - 1

    def plain(self) -> veca.config.VecaConfig:
        """The part that `veca.Veca` is built from."""
        names = [one.name for one in fields_of(veca.config.VecaConfig)]
        return veca.config.VecaConfig(**{name: getattr(self, name) for name in names})

    @classmethod
    def from_plain(cls, model: Veca, **more: Any) -> VecaConfig:
        """The configuration of a plain model; `more` are fields of this class."""
        cores = model.default_cores if model.default_cores != model.config.bank else None
        return cls(**{**model.config.to_dict(), "cores": cores, "card": model.card, **more})
