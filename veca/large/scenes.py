"""Scenes with a reference system: GeoTIFF and cloud-optimised GeoTIFF, by rasterio, a window at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from veca.errors import InputError, require
from veca.large.source import Array, Source, check_block, one_line


class SceneSource(Source):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.rasterio = require("rasterio", "geo")
        self.name = str(path)
        try:
            # Only this driver: others open what a file names, elsewhere on the disk or the network.
            self.file = self.open(path)
        except Exception as error:
            raise InputError(f"{path}: not a GeoTIFF that rasterio reads ({one_line(error)})") from None
        try:
            self._open(path)
        except InputError:
            self.close()
            raise
        except Exception as error:
            self.close()
            raise InputError(f"{path}: its tags are damaged ({one_line(error)})") from None

    def open(self, path: Path, **options: Any) -> Any:
        return self.rasterio.open(path, driver="GTiff", sharing=False, **options)

    def _open(self, path: Path) -> None:
        file = self.file
        self.bands = file.count
        if len(set(file.dtypes)) > 1 or not self.bands:
            raise InputError(f"{path}: its bands are of different kinds ({', '.join(sorted(set(file.dtypes)))})")
        self.dtype = np.dtype(file.dtypes[0])
        if self.dtype.kind not in "buif":
            raise InputError(f"{path}: its values are {self.dtype}, which are no picture")
        for high, wide in file.block_shapes:
            check_block(self.name, wide, high, self.dtype.itemsize * self.bands)
        self.levels, self.files = [(file.width, file.height)], [file]
        for number in range(len(file.overviews(1))):
            overview = self.open(path, overview_level=number)
            self.levels.append((overview.width, overview.height))
            self.files.append(overview)
        names = [colour.name for colour in file.colorinterp]
        if {"red", "green", "blue"} <= set(names):
            self.colours = tuple(names.index(colour) for colour in ("red", "green", "blue"))
        self.opacity = self.bands == 4 and self.colours is not None and names[3] == "alpha"
        self.nodata = None if file.nodata is None else float(file.nodata)
        kept = self.rasterio.enums.MaskFlags.per_dataset
        self.masked = not self.opacity and all(kept in flags for flags in file.mask_flag_enums)
        if file.crs is not None:
            self.crs = file.crs.to_wkt()
            self.transform = tuple(file.transform)[:6]
            with contextlib.suppress(Exception):  # degrees have no length
                if file.crs.is_projected:
                    metres = file.crs.linear_units_factor[1]
                    self.mpp = float(np.hypot(file.transform.a, file.transform.d)) * metres * 1e6

    def read(self, x: int, y: int, width: int, height: int, level: int, bands: Sequence[int]) -> Array:
        window = self.rasterio.windows.Window(x, y, width, height)
        with self.decoding():
            return np.moveaxis(self.files[level].read([band + 1 for band in bands], window=window), 0, -1)

    def measured(self, x: int, y: int, width: int, height: int, level: int) -> Array:
        window = self.rasterio.windows.Window(x, y, width, height)
        with self.decoding():
            return np.asarray(self.files[level].dataset_mask(window=window) != 0)

    @contextlib.contextmanager
    def decoding(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise InputError(f"{self.name}: a part of it cannot be decoded ({one_line(error)})") from None

    def close(self) -> None:
        for file in getattr(self, "files", [self.file]):
            file.close()
