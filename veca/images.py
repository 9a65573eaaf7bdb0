"""From whatever a user has (path, bytes, PIL image, array) to the tensor the model expects.

    x = model.preprocess("photo.jpg")       # 1×3×H×W, the shorter side about 448, both sides whole patches of the model

What is decided here, so that every command sees the same picture:
- EXIF rotation is applied. Of an animation or a multi-page file the first frame is taken.
- Transparency is laid on white. Colour profiles are ignored. CMYK becomes RGB by Pillow's plain formula.
- 16-bit values 0…65535 are scaled to 0…255 (divided by 257, rounded); floats must lie in 0…1 and are scaled by 255.
- An image with more than `max_pixels` pixels is refused from its header, before anything is decoded; so is one that
  costs far more to decode than its pixels do (`veca.costly`).
"""

from __future__ import annotations

import contextlib
import io
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import numpy as np
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError

from veca.costly import why_costly
from veca.errors import InputError

if TYPE_CHECKING:
    import torch

MEAN = (0.485, 0.456, 0.406)  # ImageNet, RGB in 0…1
STD = (0.229, 0.224, 0.225)
SIZE = 448  # pixels of the shorter side where nobody names another: whole patches of 14 and of 16
MAX_PIXELS = 2**28  # 16384 × 16384, 0.8 GB as decoded RGB; every function here takes another limit (None: no limit)
BAND = 256  # rows

# Pillow reads more, but some of those start other programs (EPS) or hide a second image in the first (ICO, ICNS).
Image.init()
FORMATS = tuple(
    name for name in ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP") if name in Image.OPEN
)
SUFFIXES = (
    *(".avif", ".bmp", ".gif", ".jpg", ".jpeg", ".jpe", ".jfif", ".jp2", ".j2k", ".jpx", ".mpo"),
    *(".png", ".apng", ".ppm", ".pgm", ".pbm", ".pnm", ".tif", ".tiff", ".webp"),
)

Source = Union[str, "os.PathLike[str]", bytes, bytearray, memoryview, Image.Image, "np.ndarray[Any, Any]"]

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = {_TURNS[orientation] for orientation in (5, 6, 7, 8)}


def preprocess(
    source: Source, size: int = SIZE, patch_size: int | None = None, max_pixels: int | None = MAX_PIXELS
) -> torch.Tensor:  # 1×3×H×W float32
    """What a model of this `patch_size` expects of any image: see the top of this file; `size` is the shorter side.

    `model.preprocess` knows the model's own patch size. The aspect ratio is kept up to rounding each side to whole
    patches, at least one (`grid_size` tells the grid). Resampling is bicubic with antialiasing, straight to the final
    size; then ImageNet's mean and std.
    """
    if patch_size is None:  # 14 or 16: a guess would be wrong for every other model
        raise InputError("which model is it for? model.preprocess(photo) knows, or name patch_size=model.patch_size")
    image = resize_to_patches(open_image(source, max_pixels), size, patch_size, max_pixels, _name(source))
    return to_tensor(image).unsqueeze(0)


def resize_to_patches(
    image: Image.Image,
    size: int,
    patch_size: int,
    max_pixels: int | None = MAX_PIXELS,
    name: str = "image",
) -> Image.Image:
    """The picture that `preprocess` normalises: the shorter side about `size`, both sides whole patches."""
    h, w = grid_size(image.width, image.height, size, patch_size)
    height, width = h * patch_size, w * patch_size
    if max_pixels is not None and height * width > max_pixels:  # a 1×10000 strip would be blown up to gigabytes
        raise InputError(
            f"{name}: {image.width}×{image.height} resized to {width}×{height} is over the limit of {max_pixels} "
            f"pixels; crop it, or use a smaller size"
        )
    return image.resize((width, height), Image.Resampling.BICUBIC)


def grid_size(width: int, height: int, size: int, patch_size: int) -> tuple[int, int]:
    """The grid (h, w) that `preprocess` gives an upright image of this size: known before anything is decoded."""
    if size < 1 or patch_size < 1:
        raise InputError(f"size and patch_size must be at least 1 pixel, not {size} and {patch_size}")
    unit = min(width, height) * patch_size

    def patches(side: int) -> int:  # side · size / (short · patch), rounded half up in whole numbers
        return max(1, (2 * side * size + unit) // (2 * unit))

    return patches(height), patches(width)


def resize_short_side(image: Image.Image, size: int, name: str = "image") -> Image.Image:
    """The shorter side becomes `size`, the other keeps the aspect ratio; bicubic with antialiasing."""
    return image.resize(short_side_size(*image.size, size, name), Image.Resampling.BICUBIC)


def short_side_size(width: int, height: int, size: int, name: str = "image") -> tuple[int, int]:
    """(width, height) with the shorter side at `size`, rounded half up; a strip that would grow huge is refused."""
    short = min(width, height)
    wide, high = ((2 * side * size + short) // (2 * short) for side in (width, height))
    if wide * high > MAX_PIXELS:
        raise InputError(
            f"{name}: {width}×{height} resized to {wide}×{high} is over the limit of {MAX_PIXELS} pixels; crop it"
        )
    return wide, high


def to_tensor(image: Image.Image) -> torch.Tensor:  # 3×H×W float32
    """An 8-bit RGB image in ImageNet's normalisation."""
    import torch  # here: processes that only decode are a fifth of the size without it

    if image.mode != "RGB":
        image = open_image(image, max_pixels=None)
    return normalise(torch.from_numpy(np.array(image)))


def normalise(pixels: torch.Tensor) -> torch.Tensor:  # …×H×W×3 uint8 → …×3×H×W float32
    """ImageNet's normalisation, on the device where the pixels are: a quarter of the bytes went there."""
    import torch

    mean, std = (torch.tensor(values, device=pixels.device).view(3, 1, 1) for values in (MEAN, STD))
    return pixels.movedim(-1, -3).contiguous().float().div_(255).sub_(mean).div_(std)


def open_image(source: Source, max_pixels: int | None = MAX_PIXELS) -> Image.Image:
    """A new, upright, 8-bit RGB image; anything that is not one gets an `InputError` naming it."""
    if isinstance(source, np.ndarray):
        return _from_array(source)
    if isinstance(source, Image.Image):
        return _decode(source, _name(source), max_pixels)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _read(io.BytesIO(source), _name(source), max_pixels)
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        try:
            with open(path, "rb") as file:
                return _read(file, str(path), max_pixels)
        except FileNotFoundError:
            raise InputError(f"{path}: no such file") from None
        except IsADirectoryError:
            raise InputError(f"{path}: is a folder, not an image") from None
        except OSError as error:
            raise InputError(f"{path}: {_line(error)}") from None
    raise InputError(f"an image must be a path, bytes, PIL image or numpy array, not {type(source).__name__}")


def image_size(path: str | os.PathLike[str]) -> tuple[int, int]:
    """(width, height) of the upright image, from the header: nothing is decoded, so no limit applies."""
    try:
        with open(path, "rb") as file:
            image = open_header(file, str(path))
            turned = _turn(image) in _SIDEWAYS and image.format != "TIFF"  # whose size Pillow has turned already
            return (image.height, image.width) if turned else image.size
    except OSError as error:
        raise InputError(f"{path}: {_line(error)}") from None


def stored_values(path: str | os.PathLike[str], max_pixels: int = MAX_PIXELS) -> np.ndarray[Any, Any]:
    """The numbers in a file as they are, palette and colours not applied: masks and depth."""
    try:
        with open(path, "rb") as file:
            image = open_header(file, str(path))
            _load(image, str(path), max_pixels)
            return np.asarray(image)
    except OSError as error:
        raise InputError(f"{path}: {_line(error)}") from None


def _read(file: Any, name: str, max_pixels: int | None) -> Image.Image:
    return _decode(open_header(file, name), name, max_pixels)


def open_header(file: Any, name: str) -> Image.Image:
    """An image of which only the header was read: its size is known, and nothing is decoded yet."""
    try:
        file.seek(0)
        prefix = file.read(16)
        # As Image.open does, but for its limit of pixels: that one is global, and ours is told the caller's.
        for factory, accepts in (Image.OPEN[kind] for kind in FORMATS):
            with contextlib.suppress(SyntaxError, IndexError, TypeError, struct.error):
                accepted = accepts is None or accepts(prefix)
                if accepted and not isinstance(accepted, str):  # which is a reason why not
                    file.seek(0)
                    return factory(file, "")
    except UnidentifiedImageError:
        pass
    except Exception as error:  # hostile bytes: OSError, SyntaxError, struct.error, IndexError, …
        raise InputError(f"{name}: damaged image ({_line(error)})") from None
    raise InputError(f"{name}: not an image this can read ({', '.join(FORMATS)}), or its header is damaged")


def _load(image: Image.Image, name: str, max_pixels: int | None) -> None:
    """Decode it, if it is not too large."""
    if max_pixels is not None and image.width * image.height > max_pixels:
        raise InputError(
            f"{name}: {image.width}×{image.height} is over the limit of {max_pixels} pixels; "
            f"if you trust it, raise max_pixels"
        )
    try:
        if isinstance(image, ImageFile.ImageFile) and image.fp is not None and (costly := why_costly(image, image.fp)):
            raise InputError(f"{name}: {costly}")
        image.load()
    except InputError:
        raise
    except Exception as error:  # the same
        raise InputError(f"{name}: damaged or truncated image ({_line(error)})") from None


def _decode(image: Image.Image, name: str, max_pixels: int | None) -> Image.Image:
    _load(image, name, max_pixels)
    turn = _turn(image)  # read after loading: Pillow turns TIFF by itself and then drops the tag
    image = _to_rgb(image, name)
    return image if turn is None else image.transpose(turn)


def _turn(image: Image.Image) -> Image.Transpose | None:
    """How to set the image upright; unreadable EXIF says nothing about the picture."""
    try:
        return _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:
        return None


def _to_rgb(image: Image.Image, name: str) -> Image.Image:
    if image.mode.startswith("I;16") or image.mode == "I":  # older Pillow gives 16-bit PNG as I
        values = np.asarray(image)
        if image.mode == "I" and (values.min() < 0 or values.max() > 65535):
            raise InputError(f"{name}: 32-bit integers have no agreed range; convert it to 8 or 16 bits")
        return _from_array(values.astype(np.uint16), name)
    if image.mode == "F":
        return _from_array(np.asarray(image), name)
    try:
        return _on_white(image) if image.has_transparency_data else image.convert("RGB")
    except ValueError as error:
        raise InputError(f"{name}: cannot turn mode {image.mode} into RGB ({_line(error)})") from None


def _on_white(image: Image.Image) -> Image.Image:
    """Transparency laid on white, a band at a time: of a large photo, three whole copies would be a gigabyte."""
    whole = Image.new("RGB", image.size)
    for top in range(0, image.height, BAND):
        layer = image.crop((0, top, image.width, min(top + BAND, image.height))).convert("RGBA")
        whole.paste(Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB"), (0, top))
    return whole


def _from_array(array: np.ndarray[Any, Any], name: str = "array") -> Image.Image:
    """H×W, H×W×1, H×W×3 or H×W×4 of bool, uint8, uint16 or floats in 0…1."""
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    if not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))) or array.size == 0:
        raise InputError(f"{name}: an image array is H×W, H×W×3 or H×W×4, not {'×'.join(map(str, array.shape))}")
    if array.dtype == np.bool_:
        array = array.astype(np.uint8) * np.uint8(255)
    elif array.dtype == np.uint16:
        array = ((array.astype(np.uint32) + 128) // 257).astype(np.uint8)
    elif np.issubdtype(array.dtype, np.floating):
        low, high = float(array.min()), float(array.max())
        if not (low >= 0 and high <= 1):  # also when one is not a number
            raise InputError(f"{name}: floats must lie in 0 to 1, these go from {low:g} to {high:g}")
        array = np.rint(array.astype(np.float32) * 255).astype(np.uint8)
    elif array.dtype != np.uint8:
        raise InputError(f"{name}: image values must be uint8, uint16 or floats in 0 to 1, not {array.dtype}")
    return _to_rgb(Image.fromarray(np.ascontiguousarray(array)), name)


def _name(source: Source) -> str:
    if isinstance(source, Image.Image):
        return str(getattr(source, "filename", "") or "PIL image")
    if isinstance(source, (bytes, bytearray, memoryview)):
        return "image bytes"
    return "array" if isinstance(source, np.ndarray) else str(source)


def _line(error: BaseException) -> str:
    """An exception in one line; a library's message may hold several, or none."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__
