"""Which patches of an image are worth reading: a mask (picture, GeoJSON, array), or `auto`: all but blank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageChops, ImageDraw
from torch import Tensor, nn

from veca.errors import InputError
from veca.files import read_json
from veca.images import stored_values
from veca.large.picture import Picture, Strips, TensorPicture
from veca.large.place import LONLAT, from_map
from veca.large.source import Array

REDUCED = 2048  # pixels along the longer side of the copy on which blank background is found
DARK = 64  # of 255: below, noise alone would count as colour
TISSUE = 0.1  # a patch is kept if this much of it is not blank: borders of tissue count


def mask_of(where: Any, grid: tuple[int, int], strips: Strips | None = None) -> Tensor:
    """A mask of any resolution, laid over the grid: patches that it covers at least by half (h×w)."""
    name, least = "the mask", 0.5
    if isinstance(where, (str, os.PathLike)):
        name = str(where)
        if name == "auto" or name.lower().endswith((".geojson", ".json")):
            if strips is None or not isinstance(strips.picture, Picture):
                raise InputError(f"where {name} needs an image, not a tensor")
            where, least = (not_blank(strips), TISSUE) if name == "auto" else (drawn(Path(where), strips, grid), 0.5)
        else:
            where = stored_values(where)
    mask = torch.as_tensor(np.array(where) if isinstance(where, np.ndarray) else where)
    if mask.ndim == 3:  # a picture: any colour but black
        mask = (mask != 0).any(-1) if mask.shape[-1] <= 4 else mask
    if mask.ndim != 2 or not mask.numel():
        raise InputError(f"{name}: a mask is H×W, not {'×'.join(map(str, mask.shape))}")
    covered = nn.functional.adaptive_avg_pool2d((mask != 0).float()[None, None], grid)[0, 0]
    if name == "auto" and not (covered >= least).any():
        raise InputError("where auto finds the whole image blank; give a mask, or none")
    return covered >= least


def not_blank(strips: Strips) -> Array:
    """h×w: nodata in a scene, glass on a slide, on a reduced copy."""
    mask = content(strips.picture)
    part = [max(1, round(side * inside / whole)) for side, inside, whole in
            zip(mask.shape, (strips.height, strips.width), reversed(strips.size), strict=True)]  # fmt: skip
    return mask[: part[0], : part[1]]


def content(picture: Picture | TensorPicture) -> Array:
    assert isinstance(picture, Picture)
    source = picture.source
    small = picture.at(min(1.0, REDUCED / max(picture.size)) / max(picture.downsample))
    if source.masked or source.nodata is not None or (source.crs is not None and source.opacity):
        return measured(small)
    if source.crs is not None:
        raise InputError(f"{source.name}: where auto needs a nodata value or a mask in the file; give a mask")
    rgb = small.rgb(0, 0, *small.size)
    low, high = rgb.min(-1).astype(np.float32), rgb.max(-1).astype(np.float32)
    saturation = np.rint((high - low) / np.maximum(high, DARK) * 255).astype(np.uint8)
    return np.asarray(saturation > otsu(saturation))


def measured(small: Picture) -> Array:
    """Where a scene has values: of every n-th pixel of a level, so that nothing is averaged with nodata."""
    source, (width, height) = small.source, small.levels[small.level]
    step = max(1, width // small.size[0], height // small.size[1])
    bands = [source.bands - 1] if source.opacity else small.channels.bands
    nothing = 0.0 if source.opacity else source.nodata
    rows: list[Array] = []
    for top in range(0, height, step):
        if source.masked:
            with source.lock:
                rows.append(source.measured(0, top, width, 1, small.level)[0, ::step])
            continue
        assert nothing is not None
        with source.lock:
            values = source.read(0, top, width, 1, small.level, bands)[0, ::step]
        rows.append(np.asarray((~np.isnan(values) if np.isnan(nothing) else values != nothing).any(-1)))
    return np.stack(rows)


def otsu(values: Array) -> int:
    """The threshold that splits 8-bit values into two groups, each as alike in itself as can be."""
    count = np.bincount(values.ravel(), minlength=256).astype(np.float64)
    below, total = count.cumsum(), (count * np.arange(256)).cumsum()
    above = below[-1] - below
    with np.errstate(divide="ignore", invalid="ignore"):
        between = below * above * (total / below - (total[-1] - total) / above) ** 2
    return int(np.nan_to_num(between, nan=-1, posinf=-1, neginf=-1).argmax())


def drawn(path: Path, strips: Strips, grid: tuple[int, int]) -> Array:
    """The polygons of a GeoJSON file, four pixels a patch: in pixels of the finest level, as QuPath writes them, or,
    over a scene, in longitude and latitude or in the reference system that the file names."""
    picture = strips.picture
    assert isinstance(picture, Picture)
    scale = 4 * np.array([grid[1] / strips.width, grid[0] / strips.height]) / picture.downsample
    mask = Image.new("L", (4 * grid[1], 4 * grid[0]))
    found = False
    try:
        told = read_json(path)
        system = named_system(told)
        for polygon in polygons(told):
            own = mask if len(polygon) == 1 else Image.new("L", mask.size)  # a hole is one of its polygon only
            for number, ring in enumerate(polygon):
                corners = np.asarray(ring, dtype=np.float64)[:, :2]
                if not np.isfinite(corners).all():
                    raise ValueError("a corner that is no number")
                corners = from_map(picture, corners, system) if picture.crs is not None else corners
                places = [(float(x), float(y)) for x, y in (corners * scale).clip(-1e6, 1e6)]
                if len(places) >= 3:
                    # the first ring is the border, others are holes
                    ImageDraw.Draw(own).polygon(places, fill=0 if number else 1)
                    found = True
            mask = mask if own is mask else ImageChops.lighter(mask, own)
    except (TypeError, ValueError, KeyError, IndexError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: not GeoJSON with polygons") from None
    if not found:
        raise InputError(f"{path}: it has no polygons")
    return np.asarray(mask)


def named_system(told: dict[str, Any]) -> str:
    """Longitude and latitude, unless the file names another one, as QGIS and GDAL may write it."""
    crs = told.get("crs")
    return LONLAT if crs is None else str(crs["properties"]["name"])


def polygons(part: Any) -> Any:
    """Lists of rings, from whatever GeoJSON they are wrapped in."""
    if part is None:
        return
    kind = part.get("type")
    if kind == "FeatureCollection":
        for feature in part["features"]:
            yield from polygons(feature)
    elif kind == "Feature":
        yield from polygons(part["geometry"])
    elif kind == "GeometryCollection":
        for geometry in part["geometries"]:
            yield from polygons(geometry)
    elif kind == "Polygon":
        yield part["coordinates"]
    elif kind == "MultiPolygon":
        yield from part["coordinates"]
