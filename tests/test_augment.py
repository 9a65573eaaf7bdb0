"""Crops and the 14 operations of TrivialAugmentWide, each against a computation that does not use Pillow."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from veca.augment import OPERATIONS, augment, centre, trivial_augment

Array = np.ndarray[Any, Any]


def photo(width: int = 61, height: int = 47) -> Array:
    """Smooth colours with some grain: every value occurs, and neighbours differ."""
    y, x = np.mgrid[:height, :width]
    waves = np.stack([np.sin(x / 9) + np.cos(y / 7), np.sin((x + y) / 11), np.cos(x / 5) * np.sin(y / 6)], axis=-1)
    grain = np.random.default_rng(0).normal(0, 12, waves.shape)
    return np.clip(waves * 60 + 120 + grain, 3, 247).astype(np.uint8)


def apply(name: str, magnitude: float, pixels: Array) -> Array:
    return np.asarray(OPERATIONS[name].apply(Image.fromarray(pixels), magnitude))


def moved(pixels: Array, x: Array, y: Array) -> Array:
    """Nearest neighbour at the input coordinates of each output pixel's centre, black outside."""
    height, width = pixels.shape[:2]
    column, row = np.floor(x).astype(int), np.floor(y).astype(int)
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    result = pixels[row.clip(0, height - 1), column.clip(0, width - 1)]
    return np.where(inside[..., None], result, 0)


def centres(pixels: Array) -> tuple[Array, Array]:
    y, x = np.mgrid[: pixels.shape[0], : pixels.shape[1]] + 0.5
    return x, y


def grey(pixels: Array) -> Array:
    return np.rint(pixels.astype(np.float64) @ [0.299, 0.587, 0.114])


def blended(base: Array, pixels: Array, factor: float) -> Array:
    return np.clip(base + (pixels.astype(np.float64) - base) * factor, 0, 255)


def agree_but_for_ties(result: Array, expected: Array) -> None:
    """Pillow steps in 16-bit fixed point: a coordinate on the border of two pixels may fall to either."""
    assert (result != expected).any(axis=-1).mean() < 0.005


@pytest.mark.parametrize("slope", [0.33, -0.66, 0.99])
def test_shear(slope: float) -> None:
    pixels = photo()
    x, y = centres(pixels)
    agree_but_for_ties(apply("ShearX", slope, pixels), moved(pixels, x + slope * y, y))
    agree_but_for_ties(apply("ShearY", slope, pixels), moved(pixels, x, y + slope * x))


@pytest.mark.parametrize("shift", [0.0, 5.9, -17.06, 32.0])
def test_translate(shift: float) -> None:
    pixels, whole = photo(), math.trunc(shift)
    x, y = centres(pixels)
    assert np.array_equal(apply("TranslateX", shift, pixels), moved(pixels, x - whole, y))
    assert np.array_equal(apply("TranslateY", shift, pixels), moved(pixels, x, y - whole))


@pytest.mark.parametrize("degrees", [13.5, -58.5, 135.0])
def test_rotate(degrees: float) -> None:
    pixels = photo()
    x, y = centres(pixels)
    x, y = x - pixels.shape[1] / 2, y - pixels.shape[0] / 2
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    expected = moved(pixels, cos * x - sin * y + pixels.shape[1] / 2, sin * x + cos * y + pixels.shape[0] / 2)
    agree_but_for_ties(apply("Rotate", degrees, pixels), expected)


def test_rotate_by_a_right_angle_turns_counter_clockwise() -> None:
    pixels = photo(40, 40)
    assert np.array_equal(apply("Rotate", 90, pixels), np.rot90(pixels))


@pytest.mark.parametrize("change", [-0.99, -0.33, 0.0, 0.495, 0.99])
def test_brightness_colour_contrast(change: float) -> None:
    pixels = photo()
    mean = np.full_like(pixels, np.rint(grey(pixels).mean()))
    bases = {"Brightness": np.zeros_like(pixels), "Color": grey(pixels)[..., None], "Contrast": mean}
    for name, base in bases.items():
        assert np.abs(apply(name, change, pixels) - blended(base, pixels, 1 + change)).max() <= 2, name


@pytest.mark.parametrize("change", [-0.99, 0.66])
def test_sharpness_moves_away_from_a_smoothed_image(change: float) -> None:
    pixels = photo()
    kernel = torch.ones(3, 1, 3, 3, dtype=torch.float64)
    kernel[:, :, 1, 1] = 5
    planes = torch.from_numpy(pixels.copy()).double().permute(2, 0, 1)[None]
    smooth = pixels.astype(np.float64)  # the border has no neighbours and stays
    smooth[1:-1, 1:-1] = torch.nn.functional.conv2d(planes, kernel / 13, groups=3)[0].permute(1, 2, 0).numpy()
    assert np.abs(apply("Sharpness", change, pixels) - blended(smooth, pixels, 1 + change)).max() <= 2


def test_posterize_keeps_the_leading_bits() -> None:
    pixels = photo()
    for bits in (8, 5, 2):
        assert np.array_equal(apply("Posterize", bits, pixels), pixels // 2 ** (8 - bits) * 2 ** (8 - bits))


@pytest.mark.parametrize("threshold", [255.0, 127.5, 8.5, 0.0])
def test_solarize_inverts_from_the_threshold_on(threshold: float) -> None:
    pixels = photo()
    assert np.array_equal(apply("Solarize", threshold, pixels), np.where(pixels < threshold, pixels, 255 - pixels))


def test_auto_contrast_stretches_each_channel_to_the_full_range() -> None:
    pixels = photo() // 2 + np.array([10, 60, 90], np.uint8)
    low, high = pixels.min(axis=(0, 1)).astype(float), pixels.max(axis=(0, 1)).astype(float)
    result = apply("AutoContrast", 0, pixels)
    assert np.abs(result - (pixels - low) * 255 / (high - low)).max() <= 1
    assert result.min() == 0
    assert result.max() == 255


def test_equalize_follows_the_cumulative_histogram() -> None:
    pixels = photo(200, 150)
    result = apply("Equalize", 0, pixels)
    for channel in range(3):
        values = pixels[..., channel]
        counts = np.bincount(values.reshape(-1), minlength=256)
        step = (values.size - counts[values.max()]) // 255
        below = np.cumsum(counts) - counts
        assert np.array_equal(result[..., channel], np.minimum(255, (below + step // 2) // step)[values])


def test_identity_changes_nothing() -> None:
    pixels = photo()
    assert np.array_equal(apply("Identity", 0, pixels), pixels)


def test_ranges_are_those_of_the_docstring() -> None:
    ends = {name: (op.magnitudes[0], op.magnitudes[-1]) for name, op in OPERATIONS.items() if len(op.magnitudes) > 1}
    assert ends == {
        **dict.fromkeys(("ShearX", "ShearY"), (0, 0.99)),
        **dict.fromkeys(("TranslateX", "TranslateY"), (0, 32)),
        "Rotate": (0, 135),
        **dict.fromkeys(("Brightness", "Color", "Contrast", "Sharpness"), (0, 0.99)),
        "Posterize": (8, 2),
        "Solarize": (255, 0),
    }
    assert {len(OPERATIONS[name].magnitudes) for name in ends} == {31}
    assert len(OPERATIONS) == 14
    assert {name for name, op in OPERATIONS.items() if op.signed} == set(ends) - {"Posterize", "Solarize"}
    for name in ends:
        steps = np.diff(OPERATIONS[name].magnitudes)
        assert np.allclose(steps, steps[0]) or set(steps) == {0, -1}  # even, or whole bits


class Watched(random.Random):
    """A source that remembers which operations were drawn from it."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.drawn: list[Any] = []

    def choice(self, options: Sequence[Any]) -> Any:
        self.drawn.append(super().choice(options))
        return self.drawn[-1]


def test_operations_and_magnitudes_are_equally_likely() -> None:
    image, rng = Image.fromarray(photo(8, 8)), Watched(0)
    for _ in range(2800):
        trivial_augment(image, rng)
    names = Counter(rng.drawn[::2])
    assert set(names) == set(OPERATIONS)
    assert all(140 < count < 260 for count in names.values())  # 200 expected, standard deviation 14
    pairs = zip(rng.drawn[::2], rng.drawn[1::2], strict=True)
    degrees = Counter(magnitude for name, magnitude in pairs if name == "Rotate")
    assert set(degrees) <= set(OPERATIONS["Rotate"].magnitudes)
    assert len(degrees) > 25


def test_signed_operations_go_both_ways() -> None:
    white = Image.new("RGB", (64, 64), "white")
    left = right = 0
    for seed in range(800):
        rng = Watched(seed)
        pixels = np.asarray(trivial_augment(white, rng))
        if rng.drawn[0] == "TranslateX" and rng.drawn[1] >= 1:
            left += int(pixels[0, 0, 0] == 0)
            right += int(pixels[0, -1, 0] == 0)
    assert left > 10
    assert right > 10


def ramp(width: int, height: int) -> Image.Image:
    """Red tells x, green tells y."""
    y, x = np.mgrid[:height, :width]
    return Image.fromarray(np.stack([x * 255 / (width - 1), y * 255 / (height - 1), 0 * x], -1).astype(np.uint8))


def test_centre_is_the_middle_of_the_image_resized_to_nine_eighths() -> None:
    pixels = photo(200, 120)
    result = np.asarray(centre(Image.fromarray(pixels), 64)).astype(float)
    planes = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].float()
    size = (72, 120)  # 64 · 1.125 and 72 · 200 / 120
    resized = torch.nn.functional.interpolate(planes, size, mode="bicubic", antialias=True, align_corners=False)
    expected = resized[0, :, 4:68, 28:92].permute(1, 2, 0).clamp(0, 255).numpy()
    assert np.abs(result - expected).max() <= 1.01


@pytest.mark.parametrize(("width", "height"), [(100, 60), (60, 100), (64, 64), (20, 33)])
def test_augment_crops_everywhere_and_flips(width: int, height: int) -> None:
    image, starts, flips = ramp(width, height), set(), 0
    runs = 0
    for seed in range(1200):
        rng = Watched(seed)
        result = np.asarray(augment(image, 32, rng)).astype(int)
        assert result.shape == (32, 32, 3)
        if rng.drawn[0] != "Identity":
            continue
        runs += 1
        flipped = result[16, 0, 0] > result[16, -1, 0]
        flips += int(flipped)
        upright = result[:, ::-1] if flipped else result
        starts.add((upright[0, 0, 0], upright[0, 0, 1]))
    assert 0.25 < flips / runs < 0.75
    # 1.125 · 32 = 36: four pixels of play on the short side, and all of them are used
    play = [round(36 * side / min(width, height)) - 32 for side in (width, height)]
    for axis in (0, 1):
        found = len({start[axis] for start in starts})
        assert min(play[axis] + 1, 12) <= found <= play[axis] + 1


def test_all_draws_come_from_the_given_source() -> None:
    image = Image.fromarray(photo(90, 70))
    rng = random.Random(5)
    for _ in range(7):
        augment(image, 32, rng)
    state = rng.getstate()
    first = [np.asarray(augment(image, 32, rng)) for _ in range(20)]
    random.seed(99)
    np.random.seed(99)  # noqa: NPY002  (the global source must not matter)
    torch.manual_seed(99)
    again = random.Random()
    again.setstate(state)
    second = [np.asarray(augment(image, 32, again)) for _ in range(20)]
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert len({view.tobytes() for view in first}) > 10
