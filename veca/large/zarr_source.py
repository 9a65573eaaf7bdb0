"""Zarr 2 and 3, and OME-Zarr with its levels: a chunk at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from veca.errors import InputError, require
from veca.large.source import Array, Source, check_block, one_line

LENGTHS = {"micrometer": 1.0, "nanometer": 1e-3, "millimeter": 1e3, "centimeter": 1e4, "meter": 1e6}
# Codecs that only pack numbers. Others may run what a chunk holds (pickle), or start other decoders.
CODECS = {
    *("bytes", "gzip", "zlib", "zstd", "blosc", "lz4", "lzma", "bz2", "crc32c", "sharding_indexed", "transpose"),
    *("shuffle", "delta", "fixedscaleoffset", "bitround", "adler32", "crc32", "fletcher32"),
}


class ZarrSource(Source):
    def __init__(self, path: Path) -> None:
        super().__init__()
        zarr = require("zarr", "zarr")
        self.name = str(path)
        try:
            self._open(zarr.open(str(path), mode="r"))
        except InputError:
            raise
        except Exception as error:  # damaged metadata raises many kinds
            raise InputError(f"{path}: not a Zarr array or image ({one_line(error)})") from None

    def _open(self, node: Any) -> None:
        if hasattr(node, "shape"):
            arrays, axes, scale = [node], plain_axes(node), None
        else:
            arrays, axes, scale = self._image(node)
        for array in arrays:
            check_array(self.name, array)
            if array.ndim != len(axes):
                raise InputError(f"{self.name}: an array of {array.ndim} axes, not of the {len(axes)} that it names")
        self.arrays, self.axes = arrays, axes
        self.places = {axis: axes.index(axis) for axis in ("y", "x")}
        self.channel = axes.index("c") if "c" in axes else None
        shape = arrays[0].shape
        self.levels = [(int(a.shape[self.places["x"]]), int(a.shape[self.places["y"]])) for a in arrays]
        if min(map(min, self.levels)) < 1:
            raise InputError(f"{self.name}: it has no pixels")
        self.bands = 1 if self.channel is None else int(shape[self.channel])
        self.dtype = np.dtype(arrays[0].dtype)
        others = [f"{n} along {axis}" for axis, n in zip(axes, shape, strict=True) if axis not in "cyx" and n > 1]
        self.notes = (f"takes the first of {', '.join(others)}",) if others else ()
        self.mpp = scale

    def _image(self, group: Any) -> tuple[list[Any], list[str], float | None]:
        about = dict(group.attrs)
        about = about.get("ome", about)
        if not about.get("multiscales"):
            inside = sorted(group.keys())
            what = (
                f"(it holds {', '.join(inside[:5])}); name one, as in {self.name}/{inside[0]}" if inside else "(empty)"
            )
            raise InputError(f"{self.name}: a Zarr group that is no image {what}")
        image = about["multiscales"][0]
        axes = [axis if isinstance(axis, str) else axis["name"] for axis in image.get("axes") or list("tczyx")]
        axes = [str(axis).lower() for axis in axes]
        if "y" not in axes or "x" not in axes:
            raise InputError(f"{self.name}: its axes are {', '.join(axes)}, without y and x")
        arrays = [group[str(level["path"])] for level in image["datasets"]]
        scale = None
        try:
            place = axes.index("x")
            unit = LENGTHS[image["axes"][place]["unit"]]
            changes = [*image["datasets"][0]["coordinateTransformations"], *image.get("coordinateTransformations", ())]
            factors = [float(change["scale"][place]) for change in changes if change["type"] == "scale"]
            scale = math.prod(factors) * unit if factors else None  # the level's own, then that of all levels
        except (KeyError, TypeError, IndexError, ValueError):
            scale = None
        return arrays, axes, scale if scale and 0 < scale < 1e9 else None

    def read(self, x: int, y: int, width: int, height: int, level: int, bands: Sequence[int]) -> Array:
        array = self.arrays[level]
        first, last = min(bands), max(bands) + 1
        wanted: list[Any] = [0] * len(self.axes)
        wanted[self.places["y"]], wanted[self.places["x"]] = slice(y, y + height), slice(x, x + width)
        if self.channel is not None:
            wanted[self.channel] = slice(first, last)
        try:
            values = np.asarray(array[tuple(wanted)])
        except Exception as error:
            raise InputError(f"{self.name}: a chunk cannot be decoded ({one_line(error)})") from None
        kept = [axis for axis in self.axes if axis in "cyx"]
        values = values.transpose([kept.index(axis) for axis in "yxc" if axis in kept])
        values = values[..., None] if self.channel is None else values
        return np.asarray(values[..., [band - first for band in bands]])


def check_array(name: str, array: Any) -> None:
    """Numbers, in chunks that fit in memory, packed by codecs that do nothing else."""
    if not hasattr(array, "chunks") or np.dtype(array.dtype).kind not in "buif":
        raise InputError(f"{name}: {getattr(array, 'path', 'a part')} is no array of numbers")
    check_block(name, int(np.prod([max(1, side) for side in array.chunks], dtype=object)), 1, array.dtype.itemsize)
    meta = array.metadata.to_dict()
    used = list(codec_names([meta.get("codecs"), meta.get("filters"), meta.get("compressor")]))
    if unknown := sorted(set(used) - CODECS):
        raise InputError(f"{name}: packed by {', '.join(unknown)}, which is not read here; rewrite it with zstd")


def codec_names(part: Any) -> Any:
    """Of codecs in metadata, also of those inside others (shards)."""
    if isinstance(part, (list, tuple)):
        for item in part:
            yield from codec_names(item)
    elif isinstance(part, dict):
        if "name" in part or "id" in part:
            yield str(part.get("name", part.get("id"))).removeprefix("numcodecs.")
        for key in ("codecs", "index_codecs", "configuration"):
            yield from codec_names(part.get(key)) if isinstance(part.get(key), (list, tuple, dict)) else ()
    elif part is not None:
        yield str(getattr(part, "codec_id", type(part).__name__))


def plain_axes(array: Any) -> list[str]:
    """Of an array that stands alone: by its names where it has them; else the smaller of its ends is the bands'."""
    names = [str(name).lower() for name in getattr(array.metadata, "dimension_names", None) or ()]
    if "y" in names and "x" in names:
        return ["c" if name in ("c", "channel", "band", "bands") else name for name in names]
    if array.ndim == 2:
        return ["y", "x"]
    if array.ndim == 3:
        return ["y", "x", "c"] if array.shape[2] <= array.shape[0] else ["c", "y", "x"]
    raise InputError(f"{array.ndim} axes and no names for them; an image is H×W, H×W×bands or bands×H×W")
