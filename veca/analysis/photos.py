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
from veca.extract.extractor import Extractor
from veca.images import Source, normalise, open_image, resize_to_patches


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


def photo_pixels(photo: Photo, model: Model, size: int) -> Tensor:  # H×W×3 uint8
    """What the model sees of a photo whose shorter side becomes about `size`."""
    if size < model.patch_size:
        raise InputError(f"the size must be at least one patch ({model.patch_size} pixels), not {size}")
    return torch.from_numpy(np.array(resize_to_patches(photo.image, size, model.patch_size, name=photo.name)))


def photo_tensor(photo: Photo, model: Model, size: int, device: torch.device) -> tuple[Tensor, tuple[int, int]]:
    """The same, normalised (1×3×H×W), and its grid: for figures that look inside the model."""
    pixels = photo_pixels(photo, model, size)
    grid = (pixels.shape[0] // model.patch_size, pixels.shape[1] // model.patch_size)
    return normalise(pixels.to(device)).to(next(model.parameters()).dtype).unsqueeze(0), grid


def features(backbone: Backbone, photo: Photo, size: int, cores: int | None = None) -> Features:
    """Global and dense features of one photo; `cores` is the budget (a teacher has none)."""
    found = Extractor(backbone, cores=cores).compute(photo_pixels(photo, backbone.model, size)[None])
    return Features(found.cls[0].cpu(), found.patches[0].cpu(), found.grid)


def pixels(photo: Photo, longest: int = 900) -> np.ndarray:  # H×W×3 uint8
    """The photo for showing, no larger than it is looked at."""
    scale = min(1.0, longest / max(photo.image.size))
    width, height = (max(1, round(side * scale)) for side in photo.image.size)
    return np.asarray(photo.image.resize((width, height), Image.Resampling.LANCZOS))
