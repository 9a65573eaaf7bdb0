"""One way to ask any backbone, ours or a `transformers` teacher, for the features of a photo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from veca.errors import InputError
from veca.images import Source, grid_size, open_image, resize_to_patches, to_tensor
from veca.model import Veca
from veca.teachers import Teacher, load_teacher
from veca.weights import load

Model = Veca | Teacher


class Backbone(NamedTuple):
    name: str  # what pictures call it
    model: Model

    @property
    def veca(self) -> Veca:
        """The model, where a figure is about cores."""
        if isinstance(self.model, Veca):
            return self.model
        raise InputError(f"{self.name} has no cores: give this figure a VECA model (--model)")

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


class Photo(NamedTuple):
    name: str
    image: Image.Image  # upright RGB

    @property
    def aspect(self) -> float:
        return self.image.height / self.image.width


class Features(NamedTuple):
    cls: Tensor  # D′, float32 on the CPU
    patches: Tensor  # N×D′
    grid: tuple[int, int]


def load_backbone(source: str, device: str = "cpu") -> Backbone:
    """A VECA model by any name `veca.load` takes, or a folder or hub id of a `transformers` vision model."""
    name = Path(source).name or source
    config = Path(source) / "config.json"
    if config.is_file():
        try:
            kind = json.loads(config.read_text(encoding="utf-8")).get("model_type")
        except (ValueError, AttributeError) as error:
            raise InputError(f"{config} is not readable JSON: {error}") from error
        if kind != "veca":
            return Backbone(name, load_teacher(source, device))
    try:
        return Backbone(name, load(source, device=device))
    except InputError:
        if Path(source).exists() or source.count("/") != 1:
            raise
        return Backbone(name, load_teacher(source, device))  # a hub id of another kind of model


def open_photo(source: Source, name: str | None = None, max_pixels: int = 2**28) -> Photo:
    if name is None:
        name = Path(source).stem if isinstance(source, (str, Path)) else "photo"
    return Photo(name, open_image(source, max_pixels))


def photo_tensor(photo: Photo, model: Model, size: int, device: torch.device) -> tuple[Tensor, tuple[int, int]]:
    """What the model sees of a photo whose shorter side becomes about `size` (1×3×H×W), and its grid."""
    if size < model.patch_size:
        raise InputError(f"the size must be at least one patch ({model.patch_size} pixels), not {size}")
    grid = grid_size(photo.image.width, photo.image.height, size, model.patch_size)
    pixels = resize_to_patches(photo.image, size, model.patch_size, name=photo.name)
    return to_tensor(pixels).unsqueeze(0).to(device), grid


@torch.inference_mode()
def features(backbone: Backbone, photo: Photo, size: int, cores: int | None = None) -> Features:
    """Global and dense features of one photo; `cores` is the budget (a teacher has none)."""
    model = backbone.model
    images, grid = photo_tensor(photo, model, size, backbone.device)
    out = model(images, cores=cores) if isinstance(model, Veca) else model(images, grid)
    return Features(out.cls[0].float().cpu(), out.patches[0].float().cpu(), grid)


def pixels(photo: Photo, longest: int = 900) -> np.ndarray:  # H×W×3 uint8
    """The photo for showing, no larger than it is looked at."""
    scale = min(1.0, longest / max(photo.image.size))
    width, height = (max(1, round(side * scale)) for side in photo.image.size)
    return np.asarray(photo.image.resize((width, height), Image.Resampling.LANCZOS))
