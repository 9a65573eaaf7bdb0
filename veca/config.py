"""The network's shape: `VecaConfig`, and the five sizes by name (paper, Table 1; tiny is ours)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from reprlib import repr as short
from typing import Any, Literal

from veca.errors import InputError

# Far beyond any sensible model, and small enough that a hostile config.json cannot hang whoever loads it.
LIMITS = {
    "depth": 256,
    "width": 16384,
    "heads": 1024,
    "patch_size": 256,
    "bank": 4096,
    "out_width": 65536,
    "table_size": 1024,
}


@dataclass(frozen=True)
class VecaConfig:
    """Everything that decides the names and shapes of the weights, and what the forward pass computes.

    The defaults are the paper's network, size small. The options at the end let a student take the shape of a DINOv2
    or DINOv3 block, so that it can start from a teacher's weights.
    """

    depth: int = 12
    """layers"""
    width: int = 384
    """D, of a token"""
    heads: int = 6
    """H"""
    mlp_ratio: float = 2.66667
    """width inside the MLP, in D"""
    patch_size: int = 16
    """p, in pixels"""
    bank: int = 64
    """M, the number of cores there are; how many are active is chosen at each call"""
    out_width: int | None = None
    """the teacher's width, where it differs from D"""
    norm_eps: float = 1e-5
    """of the LayerNorms"""
    rope_zero_fraction: float = 0.125
    """this share of the rotary periods is infinite: those channels do not turn"""
    attention: Literal["core", "dense"] = "core"
    """dense: the control arm, in which every token reads every token"""
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    """gelu: as in a DINOv2 or DINOv3 block"""
    positions: Literal["rope", "table"] = "rope"
    """table: an additive table too, as in DINOv2"""
    table_size: int = 37
    """the table covers this many patches along each axis before it is resized to the grid"""

    def __post_init__(self) -> None:
        for name, limit in LIMITS.items():
            value = getattr(self, name)
            if name == "out_width" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
                raise InputError(f"VecaConfig.{name} must be a whole number from 1 to {limit}, not {short(value)}")
        for name in ("mlp_ratio", "norm_eps", "rope_zero_fraction"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise InputError(f"VecaConfig.{name} must be a number, not {short(value)}")
        if self.width % self.heads or self.head_width % 4:
            raise InputError(
                f"VecaConfig.width must be a multiple of 4 × heads (rotary positions turn pairs of channels along two "
                f"axes); {self.width} and {self.heads} heads are not"
            )
        if not 0 < self.mlp_ratio <= 64:
            raise InputError(f"VecaConfig.mlp_ratio must lie in (0, 64], not {self.mlp_ratio!r}")
        if self.hidden_width < 1:
            raise InputError(f"VecaConfig.mlp_ratio {self.mlp_ratio!r} of width {self.width} leaves no MLP")
        if not 0 < self.norm_eps <= 1:
            raise InputError(f"VecaConfig.norm_eps must lie in (0, 1], not {self.norm_eps!r}")
        if not 0 <= self.rope_zero_fraction <= 1:
            raise InputError(f"VecaConfig.rope_zero_fraction must lie in [0, 1], not {self.rope_zero_fraction!r}")
        for name, choices in (("attention", ("core", "dense")), ("mlp", ("swiglu", "gelu"))):
            if getattr(self, name) not in choices:
                raise InputError(f"VecaConfig.{name} must be one of {choices}, not {short(getattr(self, name))}")
        if self.positions not in ("rope", "table"):
            raise InputError(f"VecaConfig.positions must be 'rope' or 'table', not {short(self.positions)}")

    @property
    def head_width(self) -> int:  # d
        return self.width // self.heads

    @property
    def hidden_width(self) -> int:
        """Width inside the MLP; SwiGLU's first projection is twice as wide."""
        return int(self.width * self.mlp_ratio)

    @property
    def feature_width(self) -> int:  # D′
        return self.out_width or self.width

    @property
    def turns(self) -> bool:
        """Whether any channel turns with its token's position; where none does, the cores' positions mean nothing."""
        periods = self.head_width // 4
        return round(self.rope_zero_fraction * periods) < periods

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> VecaConfig:
        """Read a dictionary such as config.json holds; unknown names are refused, missing ones get the default."""
        if not isinstance(values, dict):
            raise InputError(f"the model's config is a {type(values).__name__}, not a table of settings")
        known = {field.name for field in fields(cls)}
        unknown = sorted(map(str, set(values) - known))
        if unknown:
            raise InputError(
                f"unknown settings in the model's config: {', '.join(map(short, unknown[:5]))}; known: {sorted(known)}"
            )
        return cls(**values)


MODELS: dict[str, VecaConfig] = {
    "veca_tiny": VecaConfig(width=192, heads=3),
    "veca_small": VecaConfig(width=384, heads=6),
    "veca_small_plus": VecaConfig(width=384, heads=6, mlp_ratio=4.0),
    "veca_base": VecaConfig(width=768, heads=12),
    "veca_large": VecaConfig(depth=24, width=1024, heads=16),
}


def list_models() -> list[str]:
    """The names that `create_model` takes."""
    return list(MODELS)


def model_config(name: str, **overrides: Any) -> VecaConfig:
    """The configuration of a named size, with some settings replaced."""
    if name not in MODELS:
        raise InputError(f"no model is called {name!r}; there are {', '.join(MODELS)}")
    unknown = sorted(set(overrides) - {field.name for field in fields(VecaConfig)})
    if unknown:
        raise InputError(f"VecaConfig has no setting {', '.join(unknown)}")
    return replace(MODELS[name], **overrides)
