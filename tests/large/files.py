"""Real files in the formats that people have, written by the formats' own libraries."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import rasterio
import tifffile
import zarr
from rasterio.transform import from_origin

from veca.large.source import Array

APERIO = "Aperio Image Library v10.0.50\r\n{width}x{height} (64x64) JPEG/RGB Q=90|AppMag = 20|MPP = 0.5"


def ome_tiff(path: Path, values: Array) -> Path:
    """Red, green and blue in one page, and two coarser levels."""
    with tifffile.TiffWriter(path, ome=True) as file:
        about = {"axes": "YXS", "PhysicalSizeX": 0.5, "PhysicalSizeXUnit": "µm", "PhysicalSizeY": 0.5}
        file.write(values, subifds=2, tile=(64, 64), photometric="rgb", compression="deflate", metadata=about)
        for step in (2, 4):
            file.write(values[::step, ::step], subfiletype=1, tile=(64, 64), photometric="rgb")
    return path


def aperio(path: Path, values: Array) -> Path:
    """As a scanner of slides writes it: tiles, a coarser level, a physical scale in the description."""
    with tifffile.TiffWriter(path) as file:
        for step in (1, 2):
            level = values[::step, ::step]
            text = APERIO.format(width=level.shape[1], height=level.shape[0])
            file.write(level, tile=(64, 64), photometric="rgb", description=text, metadata=None)
            if step == 1:  # a thumbnail comes second
                file.write(values[::8, ::8], photometric="rgb", description=text, metadata=None)
    return path


def ome_zarr(path: Path, values: Array, version: int) -> Path:
    """c, y, x; OME-Zarr 0.4 in Zarr 2, 0.5 in Zarr 3."""
    group = zarr.open_group(str(path), mode="w", zarr_format=version)
    planes = np.moveaxis(values, -1, 0)
    datasets = []
    for level, step in enumerate((1, 2)):
        part = np.ascontiguousarray(planes[:, ::step, ::step])
        group.create_array(str(level), data=part, chunks=(1, 64, 64))
        change = [{"type": "scale", "scale": [1, 0.5 * step, 0.5 * step]}]
        datasets.append({"path": str(level), "coordinateTransformations": change})
    axes = [{"name": "c", "type": "channel"}]
    axes += [{"name": name, "type": "space", "unit": "micrometer"} for name in "yx"]
    about = [{"version": "0.4" if version == 2 else "0.5", "axes": axes, "datasets": datasets}]
    group.attrs.update({"multiscales": about} if version == 2 else {"ome": {"version": "0.5", "multiscales": about}})
    return path


def cog(path: Path, values: Array, nodata: float | None = 0, crs: str | None = "EPSG:32633", **options: object) -> Path:
    """A cloud-optimised GeoTIFF with pixels of 10 metres."""
    place = {"crs": crs, "transform": from_origin(500_000, 5_000_000, 10, 10)} if crs else {}
    shape = {"height": values.shape[0], "width": values.shape[1], "count": values.shape[2], "dtype": values.dtype}
    with rasterio.open(path, "w", driver="COG", blocksize=128, nodata=nodata, **shape, **place, **options) as file:
        file.write(np.moveaxis(values, -1, 0))
    return path
