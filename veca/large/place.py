"""Where things of a picture lie: in its file's own pixels, in its reference system, in longitude and latitude."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from veca.errors import InputError, require
from veca.files import write_json
from veca.large.picture import Picture
from veca.large.source import Array, Transform

LONLAT = "OGC:CRS84"


def grid_transform(picture: Picture, stride: float) -> Transform:
    """From cells of `stride` pixels to the reference system, or to pixels of the finest level where there is none."""
    x, y = picture.downsample
    a, b, c, d, e, f = picture.transform or (x, 0.0, 0.0, 0.0, y, 0.0)
    return (a * stride, b * stride, c, d * stride, e * stride, f)


def to_full(picture: Picture, points: Array) -> Array:
    """n×2 pixels of the picture → pixels of the finest level, in which commands and GeoJSON count."""
    return np.asarray(points, dtype=np.float64) * picture.downsample


def to_lonlat(picture: Picture, full: Array) -> Array:
    """n×2 pixels of the finest level of a scene → longitude and latitude."""
    a, b, c, d, e, f = picture.source.transform or (1, 0, 0, 0, 1, 0)
    x, y = full[:, 0], full[:, 1]
    warp = require("rasterio.warp", "geo")
    found = warp.transform(picture.crs, LONLAT, (a * x + b * y + c).tolist(), (d * x + e * y + f).tolist())
    return np.stack([np.asarray(axis) for axis in found], axis=1)


def from_map(picture: Picture, points: Array, system: str = LONLAT) -> Array:
    """n×2 places in a reference system → pixels of the finest level of a scene."""
    a, b, c, d, e, f = picture.source.transform or (1, 0, 0, 0, 1, 0)
    warp = require("rasterio.warp", "geo")
    try:
        x, y = warp.transform(system, picture.crs, points[:, 0].tolist(), points[:, 1].tolist())
        if not np.isfinite([x, y]).all():
            raise ValueError
    except Exception:
        raise InputError(
            "corners over a scene are longitude and latitude, or in the system that the file names (crs); "
            "these cannot be placed in it"
        ) from None
    found = np.linalg.solve(np.array([[a, b], [d, e]]), np.stack([np.asarray(x) - c, np.asarray(y) - f]))
    return np.asarray(found.T)


def write_regions(path: Path, picture: Picture, boxes: Array, names: Sequence[str], scores: Sequence[float]) -> None:
    """n×4 boxes (x, y, width, height in pixels of the picture) as GeoJSON: QuPath imports it over a slide, and a
    scene's opens in every GIS, in longitude and latitude."""
    features: list[dict[str, Any]] = []
    for (x, y, wide, high), name, score in zip(np.asarray(boxes).tolist(), names, scores, strict=True):
        ring = np.array([(x, y), (x + wide, y), (x + wide, y + high), (x, y + high), (x, y)], dtype=np.float64)
        ring = to_full(picture, ring)
        ring = to_lonlat(picture, ring) if picture.crs is not None else ring
        features.append(
            {
                "type": "Feature",
                "geometry": {"type": "Polygon", "coordinates": [ring.tolist()]},
                "properties": {
                    "objectType": "annotation",
                    "name": name,
                    "similarity": round(score, 5),
                    "measurements": {"similarity": round(score, 5)},  # where QuPath looks
                },
            }
        )
    write_json(path, {"type": "FeatureCollection", "features": features})
