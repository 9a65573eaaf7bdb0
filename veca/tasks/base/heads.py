"""A trained head: one plain linear layer and what is needed to use it, as `head.safetensors` and `head.json`.

The batch norm that precedes the linear layer while training is folded into it, so every head is `weight` (K×F) and
`bias` (K). F is D for a global feature, 2·D for `[patch, global]`. docs/probes.md describes each field of head.json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from veca.errors import InputError
from veca.files import whole_file, write_json
from veca.tasks import task_names

FORMAT = 1


@dataclass
class Head:
    task: str  # its name
    weight: Tensor  # K×F
    bias: Tensor  # K
    about: dict[str, Any] = field(default_factory=dict)  # the backbone, its size and budget, and what the task needs

    def __call__(self, features: Tensor) -> Tensor:  # …×F → …×K
        return nn.functional.linear(features, self.weight, self.bias)

    def on_grid(self, whole: Tensor, patches: Tensor) -> Tensor:
        """whole: D, patches: N×D of a square view → K×h×w."""
        split = patches.shape[-1]  # the global part is the same for every patch, so it is applied once
        logits = patches @ self.weight[:, :split].T + (self.weight[:, split:] @ whole + self.bias)
        return square(logits)

    def save(self, folder: str | Path) -> None:
        folder = Path(folder)
        with whole_file(folder / "head.safetensors") as temporary:
            tensors = {"weight": self.weight.detach().cpu().contiguous(), "bias": self.bias.detach().cpu().contiguous()}
            save_file(tensors, temporary)
        write_json(folder / "head.json", {"format": FORMAT, "task": self.task, **self.about})

    @classmethod
    def load(cls, folder: str | Path) -> Head:
        folder = Path(folder)
        try:
            about = json.loads((folder / "head.json").read_text(encoding="utf-8"))
            tensors = load_file(folder / "head.safetensors")
        except FileNotFoundError as error:
            lacks = Path(error.filename or "head.safetensors").name
            raise InputError(f"{folder}: not a head, it lacks {lacks}") from None
        except (OSError, ValueError, RecursionError, SafetensorError) as error:
            raise InputError(f"{folder}: not a readable head ({error})") from None
        if not isinstance(about, dict) or about.pop("format", None) != FORMAT or about.get("task") not in task_names():
            raise InputError(f"{folder / 'head.json'}: not a head of this version")
        if lacking := [name for name in ("model", "weights", "cores", "size") if name not in about]:
            raise InputError(f"{folder / 'head.json'}: not a whole head, it lacks {', '.join(lacking)}")
        if set(tensors) != {"weight", "bias"} or tensors["weight"].shape[:1] != tensors["bias"].shape:
            raise InputError(f"{folder / 'head.safetensors'}: must hold weight (K×F) and bias (K)")
        return cls(about.pop("task"), tensors["weight"], tensors["bias"], about)


class NormedLinear(nn.Module):
    """What is trained on dense features: batch norm, then a linear layer."""

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(features)
        self.linear = nn.Linear(features, outputs)
        nn.init.normal_(self.linear.weight, std=0.01)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:  # M×F → M×K
        out: Tensor = self.linear(self.norm(x))
        return out

    @torch.no_grad()
    def folded(self) -> tuple[Tensor, Tensor]:
        """weight and bias of the one linear layer that does the same in evaluation mode."""
        norm = self.norm
        assert norm.running_mean is not None
        assert norm.running_var is not None
        scale = norm.weight / (norm.running_var + norm.eps).sqrt()
        weight = self.linear.weight * scale
        bias = self.linear.bias + self.linear.weight @ (norm.bias - norm.running_mean * scale)
        return weight.clone(), bias.clone()


def square(values: Tensor) -> Tensor:
    """N×K of a square grid, row by row → K×h×w."""
    side = round(values.shape[0] ** 0.5)
    return values.T.reshape(values.shape[1], side, side)
