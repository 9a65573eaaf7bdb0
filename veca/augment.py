"""Crops and TrivialAugmentWide (Müller & Hutter 2021, arXiv 2103.10158) on PIL images.

    rng = random.Random(f"{seed}/{epoch}/{index}")        # any `random.Random`: the same state gives the same image
    image = augment(open_image(path), 256, rng)           # training: random crop, flip, one random operation
    image = centre(open_image(path), 256)                 # validation

All draws come from the `rng` given, so a run that restores or reseeds it continues as if never interrupted.

One operation is drawn of the 14, then one of 31 magnitudes, then for signed operations a sign. The ranges are those of
torchvision's TrivialAugmentWide, with its defaults (nearest neighbour, black outside):

| operation | magnitudes | signed |
| --- | --- | --- |
| Identity, AutoContrast, Equalize | none | |
| ShearX, ShearY | 0 … 0.99, the tangent; the top left corner stays | yes |
| TranslateX, TranslateY | 0 … 32 pixels, cut to whole ones | yes |
| Rotate | 0 … 135 degrees about the centre | yes |
| Brightness, Color, Contrast, Sharpness | factor 1 ± (0 … 0.99) | yes |
| Posterize | 8 … 2 bits kept | no |
| Solarize | threshold 255 … 0: values from it on are inverted | no |
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import NamedTuple

from PIL import Image, ImageEnhance, ImageOps

from veca.images import resize_short_side

BINS = 31
RESIZE = 1.125  # the short side before cropping, in crops


class Operation(NamedTuple):
    apply: Callable[[Image.Image, float], Image.Image]
    magnitudes: tuple[float, ...]
    signed: bool


def augment(image: Image.Image, size: int, rng: random.Random, trivial: bool = True) -> Image.Image:
    """A training view, size×size: short side to 1.125 × size, random crop, horizontal flip, TrivialAugmentWide."""
    image = resize_short_side(image, round(RESIZE * size))
    left, top = rng.randint(0, image.width - size), rng.randint(0, image.height - size)
    image = image.crop((left, top, left + size, top + size))
    if rng.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return trivial_augment(image, rng) if trivial else image


def centre(image: Image.Image, size: int) -> Image.Image:
    """A validation view, size×size: short side to 1.125 × size, centre crop."""
    image = resize_short_side(image, round(RESIZE * size))
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((left, top, left + size, top + size))


def trivial_augment(image: Image.Image, rng: random.Random) -> Image.Image:
    """One operation of `OPERATIONS` at one magnitude, all equally likely; the image is 8-bit RGB."""
    operation = OPERATIONS[rng.choice(_NAMES)]
    magnitude = rng.choice(operation.magnitudes)
    if operation.signed and rng.random() < 0.5:
        magnitude = -magnitude
    return operation.apply(image, magnitude)


def _affine(image: Image.Image, *inverse: float) -> Image.Image:
    """`inverse` maps output to input: x = a·x' + b·y' + c, y = d·x' + e·y' + f, at pixel centres."""
    return image.transform(image.size, Image.Transform.AFFINE, inverse, Image.Resampling.NEAREST)


def _identity(image: Image.Image, _: float) -> Image.Image:
    return image


def _shear_x(image: Image.Image, slope: float) -> Image.Image:
    return _affine(image, 1, slope, 0, 0, 1, 0)


def _shear_y(image: Image.Image, slope: float) -> Image.Image:
    return _affine(image, 1, 0, 0, slope, 1, 0)


def _translate_x(image: Image.Image, pixels: float) -> Image.Image:
    return _affine(image, 1, 0, -int(pixels), 0, 1, 0)


def _translate_y(image: Image.Image, pixels: float) -> Image.Image:
    return _affine(image, 1, 0, 0, 0, 1, -int(pixels))


def _rotate(image: Image.Image, degrees: float) -> Image.Image:
    return image.rotate(degrees, Image.Resampling.NEAREST)


def _brightness(image: Image.Image, change: float) -> Image.Image:
    return ImageEnhance.Brightness(image).enhance(1 + change)


def _colour(image: Image.Image, change: float) -> Image.Image:
    return ImageEnhance.Color(image).enhance(1 + change)


def _contrast(image: Image.Image, change: float) -> Image.Image:
    return ImageEnhance.Contrast(image).enhance(1 + change)


def _sharpness(image: Image.Image, change: float) -> Image.Image:
    return ImageEnhance.Sharpness(image).enhance(1 + change)


def _posterize(image: Image.Image, bits: float) -> Image.Image:
    return ImageOps.posterize(image, int(bits))


def _solarize(image: Image.Image, threshold: float) -> Image.Image:
    # torchvision compares with a float threshold, Pillow with a whole one: the next whole number is the same test
    return ImageOps.solarize(image, math.ceil(threshold))


def _auto_contrast(image: Image.Image, _: float) -> Image.Image:
    return ImageOps.autocontrast(image)


def _equalize(image: Image.Image, _: float) -> Image.Image:
    return ImageOps.equalize(image)


def _range(last: float) -> tuple[float, ...]:
    return tuple(last * step / (BINS - 1) for step in range(BINS))


_BITS = tuple(float(8 - round(6 * step / (BINS - 1))) for step in range(BINS))
_THRESHOLDS = tuple(255 - value for value in _range(255.0))

OPERATIONS: dict[str, Operation] = {
    "Identity": Operation(_identity, (0.0,), False),
    "ShearX": Operation(_shear_x, _range(0.99), True),
    "ShearY": Operation(_shear_y, _range(0.99), True),
    "TranslateX": Operation(_translate_x, _range(32.0), True),
    "TranslateY": Operation(_translate_y, _range(32.0), True),
    "Rotate": Operation(_rotate, _range(135.0), True),
    "Brightness": Operation(_brightness, _range(0.99), True),
    "Color": Operation(_colour, _range(0.99), True),
    "Contrast": Operation(_contrast, _range(0.99), True),
    "Sharpness": Operation(_sharpness, _range(0.99), True),
    "Posterize": Operation(_posterize, _BITS, False),
    "Solarize": Operation(_solarize, _THRESHOLDS, False),
    "AutoContrast": Operation(_auto_contrast, (0.0,), False),
    "Equalize": Operation(_equalize, (0.0,), False),
}
_NAMES = tuple(OPERATIONS)
