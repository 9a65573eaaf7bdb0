"""Frozen teachers: any `transformers` vision model with a class token and patch tokens (docs/training.md).

    teacher = load_teacher("facebook/dinov3-vits16-pretrain-lvd1689m")      # a hub id, or a folder
    out = teacher(images, grid=(16, 16), layers=True)                       # the features a student is to match

Which tokens are the class token, registers and patches is read from the model's own config, and checked against the
number of tokens that come out.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from veca.errors import InputError, require

EXTRA_TOKENS = {"deit": 1}  # a distillation token after the class token, which no config field tells


class TeacherOutput(NamedTuple):
    cls: Tensor  # B×D′
    patches: Tensor  # B×N×D′, after the teacher's final norm
    layers: Tensor | None  # L×B×N×D′, the patches that leave each block, before the final norm


class Teacher(nn.Module):
    """A vision model in evaluation mode, without gradients, whose register tokens are dropped."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        config: Any = model.config
        self.name = name
        self.kind = str(config.model_type)
        self.config = config
        patch_size = getattr(config, "patch_size", None)
        if isinstance(patch_size, (tuple, list)):
            patch_size = patch_size[0] if len(set(patch_size)) == 1 else None
        if not isinstance(patch_size, int) or not isinstance(getattr(config, "hidden_size", None), int):
            raise InputError(
                f"the teacher {name} ({self.kind}) has no square patches and hidden size in its config: "
                "use a vision transformer such as DINOv2 or DINOv3"
            )
        self.patch_size: int = patch_size
        self.width: int = config.hidden_size
        self.depth: int = config.num_hidden_layers
        self.registers = int(getattr(config, "num_register_tokens", 0) or 0) + EXTRA_TOKENS.get(self.kind, 0)
        self.model = model.eval().requires_grad_(False)
        # Models with a table for one image size (ViT, DeiT) only take others when told to resize it.
        self.resizes = "interpolate_pos_encoding" in inspect.signature(model.forward).parameters

    def train(self, mode: bool = True) -> Teacher:
        """A teacher stays in evaluation mode, whatever the module around it does."""
        return super().train(False)

    @torch.no_grad()
    def forward(
        self, images: Tensor, grid: tuple[int, int], layers: bool = False, micro_batch: int | None = None
    ) -> TeacherOutput:
        """images: B×3×H×W → features on the student's grid, computed `micro_batch` images at a time."""
        size = (grid[0] * self.patch_size, grid[1] * self.patch_size)
        outputs = []
        for part in torch.split(images, micro_batch or len(images)):
            if tuple(part.shape[-2:]) != size:  # another patch size: the grids must agree
                part = nn.functional.interpolate(part, size=size, mode="bicubic", antialias=True, align_corners=False)
            outputs.append(self._run(part, grid, layers))
        if len(outputs) == 1:
            return outputs[0]
        return TeacherOutput(
            torch.cat([out.cls for out in outputs]),
            torch.cat([out.patches for out in outputs]),
            torch.cat([out.layers for out in outputs if out.layers is not None], dim=1) if layers else None,
        )

    def _run(self, images: Tensor, grid: tuple[int, int], layers: bool) -> TeacherOutput:
        options: dict[str, Any] = {"interpolate_pos_encoding": True} if self.resizes else {}
        result = self.model(pixel_values=images, output_hidden_states=layers, **options)
        tokens = result.last_hidden_state
        patches = grid[0] * grid[1]
        first = 1 + self.registers
        if tokens.ndim != 3 or tokens.shape[1] != first + patches:
            raise InputError(
                f"the teacher {self.name} ({self.kind}) gave {'×'.join(map(str, tokens.shape))} for {patches} patches; "
                f"its config promises a class token and {self.registers} registers before them"
            )
        hidden = None
        if layers:
            if result.hidden_states is None or len(result.hidden_states) != self.depth + 1:
                raise InputError(f"the teacher {self.name} ({self.kind}) does not show its layers: use --hints 0")
            hidden = torch.stack([tokens_[:, first:] for tokens_ in result.hidden_states[1:]]).float()
        return TeacherOutput(tokens[:, 0].float(), tokens[:, first:].float(), hidden)


def load_teacher(source: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> Teacher:
    """A teacher from a folder or a hub id; one that cannot be had gets one line that says how to get it."""
    transformers = require("transformers", "train")
    name = str(source)
    if Path(name).exists() and not (Path(name) / "config.json").is_file():
        raise InputError(f"{name} is not a teacher: a folder with config.json and model.safetensors is needed")
    try:
        with _quiet(transformers):
            config = transformers.AutoConfig.from_pretrained(name)
            model = transformers.AutoModel.from_pretrained(name, config=vision_part(config), dtype=dtype)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:  # a download that broke off, too
        raise InputError(how_to_get(name, error)) from error
    return Teacher(model.to(device), name)


def vision_part(config: Any) -> Any:
    """The vision half of a two-tower model (CLIP), or the config itself."""
    return getattr(config, "vision_config", config)


def how_to_get(name: str, error: Exception) -> str:
    text = str(error)
    reason = " ".join(text.split())[:160]
    if "gated" in text.lower() or "401" in text or "403" in text:
        return (
            f"the teacher {name} is gated: accept its licence at https://huggingface.co/{name}, then `hf auth login` "
            "(or download it elsewhere and give the folder)"
        )
    if Path(name).is_dir():
        return f"the teacher in {name} cannot be read: {reason}"
    return (
        f"no teacher at {name!r}: it is not a folder here, and the hub did not give it ({reason}); check the id, the "
        f"network, or run `hf download {name} --local-dir teacher` where there is one and give the folder"
    )


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """No progress bars and advice from transformers while a teacher is read."""
    logging, hub = transformers.utils.logging, getLogger("huggingface_hub")
    level, hub_level, bars = logging.get_verbosity(), hub.level, logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    hub.setLevel("ERROR")
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        hub.setLevel(hub_level)
        if bars:
            logging.enable_progress_bar()
