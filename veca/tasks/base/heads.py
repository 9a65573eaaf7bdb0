"""A trained head and what is needed to use it, as `head.safetensors` and `head.json`.

Most are one plain linear layer (`Head`); where a task trains more, the file holds its module's tensors (`ModuleHead`),
and the task's own file says what its head.json has beside the first three lines below.

The batch norm that precedes the linear layer while training is folded into it, so a linear head is `weight` (K×F)
and `bias` (K): logits are `weight @ feature + bias`. head.json has

    format, task         1; the name of the task
    model, weights       the backbone as it was named, and the digest of its weights (checked when the head is used)
    cores, size          the budget (null: none), the side in pixels of the crop the backbone sees
    patches              the share of the patches that it spends (all, where it is not said)
    feature              global (F = D) or patches+global (F = 2·D: patch first, then the global feature)
    classes, several     the K names; whether an image may have several labels (sigmoid instead of softmax)
    zoom                 segment, depth: the picture's short side is resized to zoom × size
    kind, nearest, farthest, trim    depth: bins or regression, the range in metres, the cut made before anything else

Depth from bins is `Σ (relu(logit)+0.1)·centre / Σ (relu(logit)+0.1)` with K centres evenly spaced from nearest to
farthest; from regression it is `nearest + (farthest−nearest)·sigmoid(logit)`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from veca.backbones import Backbone, load_backbone
from veca.devices import pick_dtype
from veca.errors import InputError
from veca.files import whole_file, write_json
from veca.tasks import find_task, task_names

FORMAT = 1


class SavedHead(ABC):
    """What every head on the disk has."""

    task: str  # its name
    about: dict[str, Any]  # the backbone, its size and budget, and what the task needs

    @abstractmethod
    def stored(self) -> dict[str, Tensor]:
        """What head.safetensors holds."""

    def backbone(self, model: str | None, device: torch.device) -> Backbone:
        """What the head was trained on, in its precision; `model` says where it is now. Other weights are refused."""
        dtype = pick_dtype(self.about.get("dtype", "float32"), device)
        found = load_backbone(model or self.about["model"], device, dtype)
        if found.digest != self.about["weights"]:
            raise InputError(f"{found.source}: not the weights this head was trained on ({self.about['model']})")
        found.patches = self.about.get("patches", 1.0)
        return found

    def save(self, folder: str | Path) -> None:
        folder = Path(folder)
        with whole_file(folder / "head.safetensors") as temporary:
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in self.stored().items()}, temporary)
        write_json(folder / "head.json", {"format": FORMAT, "task": self.task, **self.about})


@dataclass
class Head(SavedHead):
    """One linear layer."""

    task: str
    weight: Tensor  # K×F
    bias: Tensor  # K
    about: dict[str, Any] = field(default_factory=dict)

    def __call__(self, features: Tensor) -> Tensor:  # …×F → …×K
        return nn.functional.linear(features, self.weight, self.bias)

    def on_grid(self, whole: Tensor, patches: Tensor) -> Tensor:
        """whole: D, patches: N×D of a square view → K×h×w."""
        split = patches.shape[-1]  # the global part is the same for every patch, so it is applied once
        logits = patches @ self.weight[:, :split].T + (self.weight[:, split:] @ whole + self.bias)
        return square(logits)

    def stored(self) -> dict[str, Tensor]:
        return {"weight": self.weight, "bias": self.bias}

    @classmethod
    def load(cls, folder: str | Path) -> Head:
        found = load_head(folder)
        if not isinstance(found, Head):
            raise InputError(f"{Path(folder) / 'head.safetensors'}: must hold weight (K×F) and bias (K)")
        return found


@dataclass
class ModuleHead(SavedHead):
    """More than a linear layer: the tensors of a module, by their names in it."""

    task: str
    tensors: dict[str, Tensor]
    about: dict[str, Any] = field(default_factory=dict)

    def stored(self) -> dict[str, Tensor]:
        return self.tensors

    def fill(self, module: nn.Module) -> None:
        """Give the module these weights; they must be exactly its own."""
        own = module.state_dict()
        if {name: tensor.shape for name, tensor in self.tensors.items()} != {name: own[name].shape for name in own}:
            raise InputError(f"this head's tensors are not those of a {self.task} head with its head.json's settings")
        module.load_state_dict(self.tensors)


def load_head(folder: str | Path) -> Head | ModuleHead:
    """The head of any task."""
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
    task = about.pop("task")
    if not find_task(task).linear:
        return ModuleHead(task, tensors, about)
    if set(tensors) != {"weight", "bias"} or tensors["weight"].shape[:1] != tensors["bias"].shape:
        raise InputError(f"{folder / 'head.safetensors'}: must hold weight (K×F) and bias (K)")
    return Head(task, tensors["weight"], tensors["bias"], about)


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
