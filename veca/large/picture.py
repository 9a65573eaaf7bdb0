"""What the model sees of a source: three 8-bit channels at one resolution, of which any box can be read.

    picture = veca.open_source("slide.svs", mpp=1.0)         # or level=, or scale=; bands=, stretch=
    picture.size, picture.mpp, picture.crs, picture.transform, picture.levels
    picture.rgb(x, y, width, height)                         # height×width×3 uint8, exact at every seam
    model.scan(picture);  model.stream(picture)

What a value means is decided by `veca.images`, as for whole images, and by `veca.large.channels`.
"""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any, Union

import numpy as np
from PIL import Image
from torch import Tensor

from veca.errors import InputError
from veca.images import MAX_PIXELS, open_image, to_tensor
from veca.large.arrays import ArraySource
from veca.large.channels import Channels, choose
from veca.large.formats import open_file
from veca.large.resample import resample, taps
from veca.large.source import Array, Source, Transform

AT_ONCE = 1 << 24  # pixels of the source that are resampled together
UNITS = {"um": 1.0, "µm": 1.0, "mm": 1e3, "cm": 1e4, "m": 1e6, "km": 1e9}


class Picture:
    """A source at one resolution. Coordinates are pixels of that resolution."""

    def __init__(self, source: Source, scale: float | None, level: int | None, channels: Channels) -> None:
        self.source, self.channels = source, channels
        self.name, self.levels, self.crs = source.name, source.levels, source.crs
        full = source.levels[0]
        if level is not None:
            self.level, self.size = level, source.levels[level]
        else:
            self.level, self.size = fitting_level(source.levels, 1.0 if scale is None else scale)
        self.asked = {"level": level, "scale": scale if scale != 1 else None}
        self.downsample = full[0] / self.size[0], full[1] / self.size[1]
        """pixels of the finest level for each of this picture's, along x and along y"""

    @property
    def mpp(self) -> float | None:
        """micrometres a pixel"""
        return None if self.source.mpp is None else self.source.mpp * self.downsample[0]

    @property
    def transform(self) -> Transform | None:
        """where this picture's pixels lie in its reference system"""
        if self.source.transform is None:
            return None
        a, b, c, d, e, f = self.source.transform
        x, y = self.downsample
        return (a * x, b * y, c, d * x, e * y, f)

    @property
    def view(self) -> dict[str, Any]:
        """How `open_source` makes this picture of its source again; empty where nothing was chosen."""
        channels = self.channels
        found = {
            **self.asked,
            "bands": [band + 1 for band in channels.bands] if channels.chosen else None,
            "stretch": None if channels.stretch is None else list(channels.stretch),
        }
        return {name: value for name, value in found.items() if value is not None}

    @property
    def notes(self) -> tuple[str, ...]:
        """what was chosen for the user, in a line each"""
        return (*self.source.notes, *self.channels.notes)

    def describe(self) -> str:
        """One line: what is read, and what the file does not say."""
        width, height = self.size
        parts = [f"{width}×{height} pixels"]
        if len(self.levels) > 1:
            parts.append(f"level {self.level} of 0 to {len(self.levels) - 1}")
        parts.append("no physical scale (mpp)" if self.mpp is None else f"{metric(self.mpp)} a pixel")
        parts.append("no reference system (CRS)" if self.crs is None else reference_name(self.crs))
        return f"{self.name}: {', '.join(parts)}{''.join(f'; {note}' for note in self.notes)}"

    def about(self) -> dict[str, Any]:
        """What an output records of the picture it was made of."""
        limits = self.channels.limits
        return {
            **self.view,
            "size": list(self.size),
            "downsample": list(self.downsample),
            "mpp": self.mpp,
            "crs": self.crs,
            "transform": None if self.transform is None else list(self.transform),
            "limits": None if limits is None else limits.T.tolist(),
        }

    def at(self, scale: float) -> Picture:
        """The same source and channels at another resolution: `scale` 1 is the finest level."""
        return Picture(self.source, scale, None, self.channels)

    def rgb(self, x: int, y: int, width: int, height: int) -> Array:
        """A box inside the picture: height×width×3 uint8, whatever other boxes are read."""
        full = self.levels[self.level]
        if full == self.size:
            return self._stored(x, y, width, height)
        factors = full[0] / self.size[0], full[1] / self.size[1]
        # Far from the stored size, whole squares of pixels are averaged first: that is fast, and 2 are left to filter.
        by = max(1, int(min(factors) / 2))
        across = taps(x, x + width, -(-full[0] // by), factors[0] / by)
        down = taps(y, y + height, -(-full[1] // by), factors[1] / by)
        if height > 1 and (across.last - across.first) * (down.last - down.first) * by * by > AT_ONCE:
            half = height // 2
            return np.concatenate([self.rgb(x, y, width, half), self.rgb(x, y + half, width, height - half)])
        left, top = across.first * by, down.first * by
        box = left, top, min(across.last * by, full[0]) - left, min(down.last * by, full[1]) - top
        stored = self._stored(*box)
        return resample(stored if by == 1 else np.asarray(Image.fromarray(stored).reduce(by)), across, down)

    def _stored(self, x: int, y: int, width: int, height: int) -> Array:
        return self.channels.rgb(self.values(x, y, width, height), self.name)

    def values(self, x: int, y: int, width: int, height: int) -> Array:
        """Stored values of the chosen bands, of a box of the level that this picture is made of."""
        with self.source.lock:
            return self.source.read(x, y, width, height, self.level, self.channels.bands)

    def read(self, top: int, bottom: int, left: int, right: int) -> Tensor:
        """The same box, normalised: 1×3×h×w float32."""
        return to_tensor(Image.fromarray(self.rgb(left, top, right - left, bottom - top)))[None]

    def overview(self, side: int) -> Array:
        """The whole picture, its longer side at most so many pixels: h×w×3 uint8."""
        small = self.at(min(1.0, side / max(self.size)) / max(self.downsample))
        return small.rgb(0, 0, *small.size)

    def close(self) -> None:
        self.source.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TensorPicture:
    """Pixels that are normalised already, as the model takes them."""

    name = "tensor"
    view: dict[str, Any] = {}  # noqa: RUF012
    notes: tuple[str, ...] = ()

    def __init__(self, images: Tensor) -> None:
        images = images[None] if images.ndim == 3 else images
        if images.ndim != 4 or images.shape[:2] != (1, 3) or not images.is_floating_point():
            shape = "×".join(map(str, images.shape))
            raise InputError(
                f"a tensor to stream is one normalised image, 3×H×W or 1×3×H×W, not {images.dtype} {shape}"
            )
        self.images = images
        self.size = (images.shape[3], images.shape[2])

    def read(self, top: int, bottom: int, left: int, right: int) -> Tensor:
        return self.images[:, :, top:bottom, left:right].float()

    def close(self) -> None:
        pass


StripSource = Union[str, "os.PathLike[str]", Image.Image, "np.ndarray[Any, Any]", Tensor, Source, Picture]


class Strips:
    """A picture cut to whole patches: what streaming and scans read."""

    def __init__(self, picture: Picture | TensorPicture, patch_size: int, owned: bool = False) -> None:
        self.picture, self.owned = picture, owned  # a picture that the user opened stays open
        self.size = picture.size
        """(width, height) of the whole picture"""
        self.width, self.height = (side // patch_size * patch_size for side in self.size)
        if not self.width or not self.height:
            size = "×".join(map(str, self.size))
            raise InputError(f"{picture.name}: {size} is smaller than a patch of {patch_size}×{patch_size}")
        if isinstance(picture, TensorPicture) and (self.width, self.height) != self.size:
            raise InputError(
                f"the height and width of images must be multiples of the patch size {patch_size}, "
                f"not {self.size[1]}×{self.size[0]}"
            )

    def read(self, top: int, bottom: int, left: int = 0, right: int | None = None) -> Tensor:
        """Rows top ≤ y < bottom of columns left ≤ x < right, normalised: 1×3×(bottom−top)×(right−left) float32."""
        return self.picture.read(top, bottom, left, self.width if right is None else right)

    def __enter__(self) -> Strips:
        return self

    def __exit__(self, *_: object) -> None:
        if self.owned:
            self.picture.close()


def open_strips(source: StripSource, patch_size: int) -> Strips:
    """Any source in whole patches. What was chosen for the user is a warning; `open_source` makes the choice."""
    if isinstance(source, Tensor):
        return Strips(TensorPicture(source), patch_size)
    if isinstance(source, Picture):
        return Strips(source, patch_size)
    picture = open_source(source)
    for note in picture.notes:
        warnings.warn(f"{picture.name}: {note}", stacklevel=3)
    try:
        return Strips(picture, patch_size, owned=True)
    except InputError:
        picture.close()
        raise


def open_source(
    source: str | os.PathLike[str] | Image.Image | Array | Source,
    level: int | None = None,
    mpp: float | str | None = None,
    scale: float | None = None,
    bands: Any = None,
    stretch: Any = None,
) -> Picture:
    """An image of any size at a chosen resolution, in three channels; see the top of this file.

    `level` is one of the file's own (0 the finest), `mpp` micrometres a pixel (or with a unit, "10m"), `scale` a
    factor. `bands` are one or three numbers from 1, `stretch` the percentiles that become black and white. The file's
    header is checked here; boxes are decoded when they are asked for.
    """
    if sum(value is not None for value in (level, mpp, scale)) > 1:
        raise InputError("give one of level, mpp and scale: each of them chooses the resolution")
    if isinstance(source, Source):
        opened = source
    elif not isinstance(source, Tensor) and all(hasattr(source, name) for name in ("shape", "dtype", "__getitem__")):
        opened = ArraySource(source)
    elif isinstance(source, (str, os.PathLike)):
        opened = open_file(Path(source))
    else:
        opened = ArraySource(np.asarray(open_image(source, MAX_PIXELS)), "image")
    try:
        if level is not None and not (isinstance(level, int) and 0 <= level < len(opened.levels)):
            sizes = ", ".join(f"{width}×{height}" for width, height in opened.levels)
            raise InputError(f"{opened.name}: it has levels 0 to {len(opened.levels) - 1} ({sizes}), not {level!r}")
        if mpp is not None:
            scale = scale_for(opened, mpp)
        if scale is not None and not (isinstance(scale, (int, float)) and 0 < scale <= 16):
            raise InputError(f"scale lies above 0 and at most at 16, not {scale!r}")
        return Picture(opened, scale, level, choose(opened, bands, stretch))
    except BaseException:
        opened.close()
        raise


def scale_for(source: Source, mpp: float | str) -> float:
    if source.mpp is None:
        raise InputError(f"{source.name}: the file does not tell its physical scale (mpp); use scale or level")
    return source.mpp / micrometres(mpp, "mpp")


def micrometres(given: float | str, flag: str) -> float:
    """Of a number, or of one with a unit: 0.5, "0.5um", "10m"."""
    found = re.fullmatch(r"([0-9.]+(?:e-?[0-9]+)?) *([a-zµ]*)", str(given))
    try:
        value = float(found[1]) * UNITS[found[2] or "um"] if found else 0.0
    except (ValueError, KeyError):
        value = 0.0
    if not 0 < value < float("inf"):
        raise InputError(f"{flag} is a length such as 0.5 (micrometres), 0.5um or 10m, not {given!r}")
    return value


def metric(value: float) -> str:
    unit, size = next(((unit, size) for unit, size in (("m", 1e6), ("mm", 1e3)) if value >= size), ("µm", 1.0))
    return f"{value / size:.4g} {unit}"


def reference_name(crs: str) -> str:
    found = re.match(r'\w+\["([^"]+)"', crs)
    return found[1] if found else crs[:60]


def fitting_level(levels: list[tuple[int, int]], scale: float) -> tuple[int, tuple[int, int]]:
    """The coarsest level that is at least as fine as wanted, and the size to resample it to.

    A level within a pixel of that size is taken as it is.
    """
    width, height = (max(1, round(side * scale)) for side in levels[0])
    for number, level in enumerate(levels):
        if abs(level[0] - width) <= 1 and abs(level[1] - height) <= 1:
            return number, level
    fine = (number for number, level in enumerate(levels) if level[0] >= width and level[1] >= height)
    return max(fine, default=0), (width, height)
