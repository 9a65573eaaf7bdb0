"""From uploaded bytes to the picture the model sees; sizes are checked from the header, before anything is decoded."""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from veca.errors import InputError
from veca.images import grid_size, open_header, open_image, resize_to_patches
from veca.serve.problems import Problem

LONGEST = 4096  # of a photo that is shown


class Picture(NamedTuple):
    pixels: np.ndarray[Any, Any]  # H×W×3 uint8, whole patches unless it is the photo itself
    grid: tuple[int, int]
    width: int  # of the upright photo
    height: int


class Decoder:
    def __init__(self, patch_size: int, max_pixels: int, model_pixels: int) -> None:
        """`max_pixels` bounds an uploaded photo, `model_pixels` what it is resized to."""
        self.patch_size, self.max_pixels, self.model_pixels = patch_size, max_pixels, model_pixels

    def picture(self, body: bytes, size: int | None, name: str) -> Picture:
        """Without a size the photo itself."""
        seen = photo = self.photo(body, size, name)
        if size is not None:
            seen = resize_to_patches(photo, size, self.patch_size, self.model_pixels, name)
        pixels = np.asarray(seen)
        height, width = pixels.shape[:2]
        return Picture(pixels, (height // self.patch_size, width // self.patch_size), photo.width, photo.height)

    def reduced(self, body: bytes, size: int, name: str) -> Image.Image:
        """The photo, no larger than anybody looks at it."""
        photo = self.photo(body, size, name)
        photo.thumbnail((LONGEST, LONGEST), Image.Resampling.LANCZOS)
        return photo

    def photo(self, body: bytes, size: int | None, name: str) -> Image.Image:
        """The upright RGB photo, once its header says that it and its resized self are small enough."""
        self.check(body, size, name)
        try:
            return open_image(body, self.max_pixels)
        except InputError as error:
            raise Problem(422, "damaged_image", f"{name}: {_without_name(error)}") from None

    def check(self, body: bytes, size: int | None, name: str) -> int:
        """How many pixels it has, if neither they nor those it is resized to are too many."""
        try:
            header = open_header(io.BytesIO(body), name)
        except InputError as error:
            raise Problem(415, "not_an_image", str(error)) from None
        width, height = header.size
        if width * height > self.max_pixels:
            message = f"{name}: {width}×{height} is over the limit of {self.max_pixels} pixels"
            raise Problem(413, "too_many_pixels", message)
        if width < 1 or height < 1:
            raise Problem(422, "damaged_image", f"{name}: its header says {width}×{height} pixels")
        if size is None:
            if width * height > self.model_pixels:
                message = (
                    f"{name}: {width}×{height} is over the limit of {self.model_pixels} pixels for a photo in its own "
                    "size; ask for a smaller one with size"
                )
                raise Problem(413, "too_many_pixels", message)
            if min(width, height) < self.patch_size:
                message = f"{name}: {width}×{height} is smaller than a patch of {self.patch_size}×{self.patch_size}"
                raise Problem(422, "too_small", message)
            return width * height
        h, w = grid_size(width, height, size, self.patch_size)
        if h * w * self.patch_size**2 > self.model_pixels:
            message = (
                f"{name}: {width}×{height} with its shorter side resized to {size} is over the limit of "
                f"{self.model_pixels} pixels; crop it, or ask for a smaller size"
            )
            raise Problem(422, "too_elongated", message)
        return width * height


def _without_name(error: InputError) -> str:
    return str(error).removeprefix("image bytes: ")
