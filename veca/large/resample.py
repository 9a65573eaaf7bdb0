"""Antialiased bicubic resampling of any box of a picture, whose pixels do not depend on the box that was asked for.

Weights are whole multiples of 2⁻¹⁴ that sum to 1. So every product with an 8-bit value and every partial sum is exact
in float32, in whatever order, and boxes that touch or overlap agree bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from veca.large.source import Array

UNIT = 2**14


class Taps(NamedTuple):
    """Which pixels of an axis make each of some resampled ones."""

    first: int  # of those that are needed
    last: int  # one beyond
    places: Array  # taps×n, counted from `first`
    weight: Array  # taps×n


def taps(start: int, stop: int, length: int, factor: float) -> Taps:
    """For the pixels start ≤ i < stop of an axis of `length` pixels, of which each resampled one takes `factor`."""
    wide = max(factor, 1.0)
    centre = (np.arange(start, stop) + 0.5) * factor
    index = np.floor(centre - 2 * wide).astype(np.int64) + np.arange(int(np.ceil(4 * wide)) + 2)[:, None]
    weight = bicubic((index + 0.5 - centre) / wide)
    weight[(index < 0) | (index >= length)] = 0
    weight = np.rint(weight / weight.sum(0) * UNIT)
    largest = weight.argmax(0), np.arange(stop - start)
    weight[largest] += UNIT - weight.sum(0)
    used = np.where(weight != 0, index, centre.astype(np.int64).clip(0, length - 1))
    first, last = int(used.min()), int(used.max()) + 1
    return Taps(first, last, used - first, (weight / UNIT).astype(np.float32))


def bicubic(x: Array) -> Array:
    """The usual kernel, a = −1/2."""
    x = np.abs(x)
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.asarray(np.where(x < 1, near, np.where(x < 2, far, 0.0)))


def resample(pixels: Array, across: Taps, down: Taps) -> Array:
    """The needed pixels, uint8 h×w×c, to the wanted ones: rows first, as Pillow does."""
    rows = pixels.astype(np.float32)
    wide = sum(rows[:, index] * weight[:, None] for index, weight in zip(across.places, across.weight, strict=True))
    rows = np.rint(np.clip(wide, 0, 255))
    high = sum(rows[index] * weight[:, None, None] for index, weight in zip(down.places, down.weight, strict=True))
    return np.asarray(np.rint(np.clip(high, 0, 255)).astype(np.uint8))
