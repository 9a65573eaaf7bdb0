"""Photos with names, and the features that any backbone, ours or a `transformers` teacher, gives of them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from veca.backbones import Backbone, Model
from veca.errors import InputError
from veca.images import Source, grid_size, open_image, resize_to_patches, to_tensor


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
    return to_tensor(pixels).unsqueeze(0).to(device, next(model.parameters()).dtype), grid


@torch.inference_mode()
def features(backbone: Backbone, photo: Photo, size: int, cores: int | None = None) -> Features:
    """Global and dense features of one photo; `cores` is the budget (a teacher has none)."""
    images, grid = photo_tensor(photo, backbone.model, size, backbone.device)
    whole, patches = backbone(images, cores)
    return Features(whole[0].cpu(), patches[0].cpu(), grid)


def pixels(photo: Photo, longest: int = 900) -> np.ndarray:  # H×W×3 uint8
    """The photo for showing, no larger than it is looked at."""
    scale = min(1.0, longest / max(photo.image.size))
    width, height = (max(1, round(side * scale)) for side in photo.image.size)
    return np.asarray(photo.image.resize((width, height), Image.Resampling.LANCZOS))
