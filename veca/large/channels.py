"""Which three channels the model sees of a source, and how its values become 8 bits: `--bands` and `--stretch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from veca.errors import InputError
from veca.images import open_image
from veca.large.source import Array, Source

SAMPLE = 128  # pixels along a side of each of 8×8 boxes
DIM = 65535 // 4  # 16-bit values of which 98 % are below this would come out nearly black


@dataclass(frozen=True)
class Channels:
    """What was chosen, and what of it must be told."""

    bands: tuple[int, ...]  # from 0: one (grey), three, or three and opacity
    stretch: tuple[float, float] | None = None  # percentiles
    limits: Array | None = None  # 2×bands: what becomes 0 and what becomes 255
    notes: tuple[str, ...] = ()
    chosen: bool = False  # whether the bands were chosen by the user, or are a choice to be told

    def rgb(self, values: Array, name: str) -> Array:
        """Stored values, h×w×bands, as h×w×3 uint8."""
        if self.limits is not None:
            opaque = values[..., 3:]
            low, high = self.limits[:, : min(3, len(self.bands))].astype(np.float32)
            scaled = (values[..., :3].astype(np.float32) - low) * (255 / (high - low))
            values = np.rint(np.nan_to_num(scaled, nan=0, posinf=255, neginf=0).clip(0, 255)).astype(np.uint8)
            if opaque.size:
                full = 1 if opaque.dtype.kind == "f" else np.iinfo(opaque.dtype).max
                values = np.concatenate([values, np.rint(opaque / full * 255).astype(np.uint8)], axis=2)
        try:
            return np.asarray(open_image(np.ascontiguousarray(values), max_pixels=None))
        except InputError as error:
            raise InputError(f"{name}: {str(error).partition(': ')[2]}; or give --stretch 2,98") from None


def choose(source: Source, bands: Any = None, stretch: Any = None) -> Channels:
    """What the user asks for, or a default that is told; what cannot be made sense of is refused."""
    chosen, notes = bands_of(source, bands)
    told = bands is not None or bool(notes)
    if stretch is not None:
        percentiles = numbers(stretch, "--stretch", (2,))
        if not 0 <= percentiles[0] < percentiles[1] <= 100:
            raise InputError(f"--stretch takes two percentiles from 0 to 100, as in 2,98, not {stretch!r}")
        pair = (percentiles[0], percentiles[1])
        return Channels(chosen, pair, limits(sample(source, chosen), pair), notes, told)
    if source.dtype.kind == "u" and source.dtype.itemsize == 2:
        seen = sample(source, chosen)
        if np.percentile(seen[:, :3], 98) < DIM:
            note = f"16-bit values up to {int(seen[:, :3].max())} are stretched from percentile 2 to 98 (--stretch)"
            return Channels(chosen, (2, 98), limits(seen, (2, 98)), (*notes, note), told)
    elif source.dtype.kind == "f":
        seen = sample(source, chosen)
        low, high = float(seen.min()), float(seen.max())
        if low >= 0 and np.percentile(seen[:, :3], 98) < 0.25 and high <= 1:
            note = f"values up to {high:.2g} are stretched from percentile 2 to 98 (--stretch)"
            return Channels(chosen, (2, 98), limits(seen, (2, 98)), (*notes, note), told)
        if not (low >= 0 and high <= 1):
            raise InputError(
                f"{source.name}: floats must lie in 0 to 1, these go from {low:g} to {high:g}; or give --stretch 2,98"
            )
    elif source.dtype not in (np.dtype(np.uint8), np.dtype(np.bool_)):
        raise InputError(
            f"{source.name}: image values must be uint8, uint16 or floats in 0 to 1, not {source.dtype}; "
            f"or give --stretch 2,98"
        )
    return Channels(chosen, notes=notes, chosen=told)


def bands_of(source: Source, given: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    if given is not None:
        wanted = numbers(given, "--bands", (1, 3))
        if any(band != int(band) or not 1 <= band <= source.bands for band in wanted):
            raise InputError(f"{source.name}: --bands takes numbers from 1 to {source.bands}, not {given!r}")
        return tuple(int(band) - 1 for band in wanted), ()
    if source.opacity:
        return (*(source.colours or (0, 1, 2)), source.bands - 1), ()
    if source.bands in (1, 3):
        return source.colours or tuple(range(source.bands)), ()
    if source.bands == 2:
        raise InputError(f"{source.name}: it has 2 values a pixel; choose one or three of them with --bands")
    first = source.colours or (0, 1, 2)
    names = ",".join(str(band + 1) for band in first)
    return first, (f"bands {names} of {source.bands} are taken for red, green and blue (--bands)",)


def sample(source: Source, bands: Sequence[int]) -> Array:
    """Values from all over the image, n×bands: of a coarse level where there is one, else of 64 boxes."""
    level = max((i for i, size in enumerate(source.levels) if min(size) >= 256), default=0)
    width, height = source.levels[level]
    if width * height <= (8 * SAMPLE) ** 2:
        boxes = [(0, 0, width, height)]
    else:
        wide, high = min(SAMPLE, width), min(SAMPLE, height)
        lefts, tops = (np.unique(np.linspace(0, full - side, 8).astype(int)).tolist()
                       for full, side in ((width, wide), (height, high)))  # fmt: skip
        boxes = [(x, y, wide, high) for y in tops for x in lefts]
    with source.lock:
        values = np.concatenate([source.read(*box, level, bands).reshape(-1, len(bands)) for box in boxes])
        there = [source.measured(*box, level).ravel() for box in boxes] if source.masked else None
    valid = np.isfinite(values).all(1) if values.dtype.kind == "f" else np.ones(len(values), bool)
    if source.nodata is not None and np.isfinite(source.nodata):
        valid &= (values != source.nodata).any(1)
    if there is not None:
        valid &= np.concatenate(there)
    if not valid.any():
        raise InputError(f"{source.name}: no value of the sample is a measurement (nodata, or not a number)")
    return np.asarray(values[valid])


def limits(values: Array, percentiles: tuple[float, float]) -> Array:
    found = np.percentile(values.astype(np.float64), percentiles, axis=0)
    found[1] = np.where(found[1] > found[0], found[1], found[0] + 1)  # one value everywhere is black
    return np.asarray(found)


def numbers(given: Any, flag: str, counts: tuple[int, ...]) -> list[float]:
    """Of "4,3,2", or of any sequence."""
    try:
        found = [float(part) for part in (given.split(",") if isinstance(given, str) else given)]
        if len(found) not in counts or not all(np.isfinite(found)):
            raise ValueError
    except (TypeError, ValueError):
        wanted = " or ".join(map(str, counts))
        raise InputError(f"{flag} takes {wanted} numbers with commas between them, not {given!r}") from None
    return found
