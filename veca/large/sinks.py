"""Where features go: a sink takes boxes of them, from top to bottom, and is written whole or not at all.

A new format is a subclass of `Sink` here or elsewhere (docs/huge.md): `model.stream(image, out=MySink("file"))`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from veca.errors import InputError, require
from veca.files import whole_file, whole_folder
from veca.large.picture import Picture
from veca.large.place import grid_transform, to_full
from veca.large.source import Array, Transform

Write = Callable[[int, int, Array], None]  # column, row, h×w×D features of the grid's cells from there
Put = Callable[[Iterator[tuple[Array, Array]]], None]  # takes numbers of patches, in order, and their features, n×D


class NoRoom(InputError):
    """The disk is too small: the next image will not fit either."""


class Sink(ABC):
    """One file or folder of features."""

    rows = 8  # of the grid that it takes together

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @abstractmethod
    def opened(self, grid: tuple[int, int], width: int, dtype: np.dtype[Any]) -> AbstractContextManager[Write]:
        """Takes room for h×w features of `width` numbers; leaving it without an error puts the file in place."""

    def size(self, grid: tuple[int, int], width: int, dtype: np.dtype[Any]) -> int:
        """Bytes that it needs on the disk, at most."""
        return grid[0] * grid[1] * width * dtype.itemsize


class SharedSink(Sink):
    """A sink that several ranks fill together (`veca.parallel`): the first makes it, each puts its patches there."""

    whole = staticmethod(whole_file)  # or `whole_folder`
    bands = False  # whether only one rank may write into the same `rows` rows of the grid, or into any patch of its own

    @abstractmethod
    def prepare(self, place: Path, grid: tuple[int, int], width: int, dtype: np.dtype[Any], rows: int) -> None:
        """All of it, with zeros; where it is in `bands`, they have so many rows."""

    @abstractmethod
    def part(
        self, place: Path, grid: tuple[int, int], width: int, dtype: np.dtype[Any], rows: int
    ) -> AbstractContextManager[Put]:
        """What takes the patches of one rank."""


class NpySink(SharedSink):
    """h×w×D, as one .npy file that can be mapped."""

    @contextmanager
    def opened(self, grid: tuple[int, int], width: int, dtype: np.dtype[Any]) -> Iterator[Write]:
        with whole_file(self.path) as temporary:
            self.prepare(temporary, grid, width, dtype, self.rows)
            with self.by_patch(temporary, width, dtype) as write_patches:

                def write(column: int, top: int, features: Array) -> None:
                    for row, line in enumerate(features, start=top):
                        first = row * grid[1] + column
                        write_patches(np.arange(first, first + len(line)), line)

                yield write

    def prepare(self, place: Path, grid: tuple[int, int], width: int, dtype: np.dtype[Any], rows: int) -> None:
        with open(place, "wb") as file:
            header = {"descr": dtype.str, "fortran_order": False, "shape": (*grid, width)}
            np.lib.format.write_array_header_1_0(file, header)
            reserve(file.fileno(), file.tell() + self.size(grid, width, dtype), self.path)

    @contextmanager
    def part(self, place: Path, grid: tuple[int, int], width: int, dtype: np.dtype[Any], rows: int) -> Iterator[Put]:
        with self.by_patch(place, width, dtype) as write:

            def put(numbered: Iterator[tuple[Array, Array]]) -> None:
                for places, features in numbered:
                    write(places, features)

            yield put

    @contextmanager
    def by_patch(self, temporary: Path, width: int, dtype: np.dtype[Any]) -> Iterator[Callable[[Array, Array], None]]:
        """Takes numbers of patches, in order, and their features (n×D); several processes may do so at once."""
        with open(temporary, "r+b") as file:
            np.lib.format.read_magic(file)
            np.lib.format.read_array_header_1_0(file)
            begin, size = file.tell(), width * dtype.itemsize

            def write(numbers: Array, features: Array) -> None:
                features = np.ascontiguousarray(features, dtype)
                ends = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
                for start, stop in itertools.pairwise(ends):  # neighbours together
                    if start < stop:  # Written, not mapped: pages of a map would count as the process's memory.
                        file.seek(begin + int(numbers[start]) * size)
                        file.write(features[start:stop].data)

            yield write
            file.flush()
            os.fsync(file.fileno())


class ZarrSink(SharedSink):
    """OME-Zarr (0.4), channels first, in chunks: napari opens it in place. float16, or int8 with a scale a cell."""

    rows = 32
    whole = staticmethod(whole_folder)
    bands = True  # a chunk is one file

    def __init__(
        self,
        path: str | os.PathLike[str],
        picture: Picture | None = None,
        stride: int = 1,
        int8: bool = False,
    ) -> None:
        super().__init__(path)
        self.picture, self.stride, self.int8 = picture, stride, int8

    def size(self, grid: tuple[int, int], width: int, dtype: np.dtype[Any]) -> int:
        return grid[0] * grid[1] * (width + 4 if self.int8 else 2 * width)

    @contextmanager
    def opened(self, grid: tuple[int, int], width: int, dtype: np.dtype[Any]) -> Iterator[Write]:
        size = self.size(grid, width, dtype)
        # Chunks appear as they are written: until then a file keeps their room.
        with whole_folder(self.path) as folder, tempfile.TemporaryFile(dir=self.path.parent) as room:
            self.prepare(folder, grid, width, dtype, self.rows)
            reserve(room.fileno(), size, self.path)
            into = self.writer(folder)

            def write(column: int, top: int, features: Array) -> None:
                os.truncate(room.fileno(), size * (grid[0] - top - features.shape[0]) // grid[0])
                into(column, top, features)

            yield write

    def prepare(self, place: Path, grid: tuple[int, int], width: int, dtype: np.dtype[Any], rows: int) -> None:
        check_room(self.path, self.size(grid, width, dtype))
        group = require("zarr", "zarr").open_group(str(place), mode="w", zarr_format=2)
        chunks = (min(64, width), min(rows, grid[0]), min(256, grid[1]))
        kinds: dict[str, Any] = {"0": ((width, *grid), chunks, np.int8 if self.int8 else np.float16)}
        if self.int8:
            kinds["scales"] = (grid, chunks[1:], np.float32)
        for name, (shape, parts, kept) in kinds.items():
            options = {"chunks": parts, "dtype": np.dtype(kept), "fill_value": 0, "dimension_separator": "/"}
            group.create_array(name, shape=shape, **zarr_options(options))
        group.attrs.update(self.about())

    @contextmanager
    def part(self, place: Path, grid: tuple[int, int], width: int, dtype: np.dtype[Any], rows: int) -> Iterator[Put]:
        write = self.writer(place)

        def put(numbered: Iterator[tuple[Array, Array]]) -> None:
            for top, box in boxes(numbered, grid, rows, blank=False):
                write(0, top, box)

        yield put

    def writer(self, place: Path) -> Write:
        group = require("zarr", "zarr").open_group(str(place), mode="r+")
        values, scales = group["0"], group["scales"] if self.int8 else None

        def write(column: int, top: int, features: Array) -> None:
            down, across = slice(top, top + features.shape[0]), slice(column, column + features.shape[1])
            if scales is not None:
                scale = np.abs(features).max(-1).astype(np.float32) / 127
                features = np.rint(features / np.maximum(scale, 1e-30)[..., None])
                scales[down, across] = scale
            elif features.size and float(np.abs(features).max()) > float(np.finfo(np.float16).max):
                raise InputError(f"{self.path}: a feature is too large for float16")
            values[:, down, across] = np.moveaxis(features, -1, 0).astype(values.dtype)

        return write

    def about(self) -> dict[str, Any]:
        x, y = self.picture.downsample if self.picture is not None else (1.0, 1.0)
        mpp = None if self.picture is None else self.picture.source.mpp
        steps = [self.stride * axis * (mpp or 1.0) for axis in (y, x)]
        axes: list[dict[str, str]] = [{"name": "c", "type": "feature"}]  # of type channel, napari made a layer of each
        axes += [{"name": name, "type": "space", **({"unit": "micrometer"} if mpp else {})} for name in "yx"]
        change = [
            {"type": "scale", "scale": [1.0, *steps]},
            {"type": "translation", "translation": [0.0, *(step / 2 for step in steps)]},
        ]
        image = {
            "version": "0.4",
            "name": self.path.name,
            "axes": axes,
            "datasets": [{"path": "0", "coordinateTransformations": change}],
        }
        more = {"values": "0 times scales, cell by cell"} if self.int8 else {}
        return {"multiscales": [image], "veca": {**more, **(self.picture.about() if self.picture else {})}}


class GeoTiffSink(Sink):
    """A cloud-optimised GeoTIFF, a pixel for each cell: some channels as float32, or the first three principal
    components as colours."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        picture: Picture,
        stride: int,
        channels: list[int] | None = None,  # None: colours
    ) -> None:
        super().__init__(path)
        self.channels = channels
        self.crs, self.transform = picture.crs, grid_transform(picture, stride)

    def size(self, grid: tuple[int, int], width: int, dtype: np.dtype[Any]) -> int:
        return grid[0] * grid[1] * (width if self.channels is None else len(self.channels)) * 4

    @contextmanager
    def opened(self, grid: tuple[int, int], width: int, dtype: np.dtype[Any]) -> Iterator[Write]:
        require("rasterio", "geo")
        if self.channels is not None and not all(0 <= channel < width for channel in self.channels):
            raise InputError(f"--channels are numbers from 0 to {width - 1}")
        kept = width if self.channels is None else len(self.channels)
        size = self.size(grid, width, dtype)
        check_room(self.path, size)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.path.parent) as file:  # colours are known when all features are
            reserve(file.fileno(), size, self.path)
            values = np.memmap(file, np.float32, "r+", shape=(*grid, kept))

            def write(column: int, top: int, features: Array) -> None:
                chosen = features if self.channels is None else features[..., self.channels]
                values[top : top + features.shape[0], column : column + features.shape[1]] = chosen

            yield write
            write_geotiff(self.path, coloured(values) if self.channels is None else values, self.crs, self.transform)


def coloured(values: Array) -> Array:
    """h×w×3 uint8: principal components of unit features, fitted on those that are not blank."""
    from veca.analysis.projection import FIT_PCA, Pca, colours, unit

    rows = values.reshape(-1, values.shape[-1])
    there = np.flatnonzero(rows.any(-1))  # which copies nothing: they may be a map of gigabytes
    shown = np.zeros((len(rows), 3), np.uint8)
    if len(there) < 3:
        return shown.reshape(*values.shape[:2], 3)
    place = Pca(unit(rows[there[:: -(-len(there) // FIT_PCA)]]))
    projected = np.concatenate([place(unit(rows[part])) for part in np.array_split(there, -(-len(there) // 65536))])
    shown[there] = np.rint(colours([projected])[0] * 254).astype(np.uint8) + 1  # 0 stays nodata
    return shown.reshape(*values.shape[:2], 3)


def write_geotiff(path: Path, values: Array, crs: str | None, transform: Transform) -> None:
    """h×w×bands as a COG; zero in every band is nodata."""
    rasterio = require("rasterio", "geo")
    shape = {"height": values.shape[0], "width": values.shape[1], "count": values.shape[2], "dtype": values.dtype}
    place = {"crs": crs, "transform": rasterio.Affine(*transform)}
    with whole_file(path) as temporary, contextlib.ExitStack() as stack:
        options = {"driver": "COG", "blocksize": 256, "compress": "deflate", "nodata": 0, "overviews": "NONE"}
        file = stack.enter_context(rasterio.open(temporary, "w", **options, **shape, **place))
        file.write(np.moveaxis(np.asarray(values), -1, 0))


def write_points(path: Path, picture: Picture, centres: Array, features: Array) -> None:
    """n points as Parquet: x, y in pixels of the finest level, and the feature."""
    arrow, parquet = require("pyarrow", "parquet"), require("pyarrow.parquet", "parquet")
    places = to_full(picture, centres)
    values = arrow.FixedSizeListArray.from_arrays(arrow.array(features.astype(np.float32).ravel()), features.shape[1])
    columns = {"x": arrow.array(places[:, 0]), "y": arrow.array(places[:, 1]), "feature": values}
    with whole_file(path) as temporary:
        parquet.write_table(arrow.table(columns), temporary)


def zarr_options(options: dict[str, Any]) -> dict[str, Any]:
    """zarr's names for them in format 2."""
    separator = options.pop("dimension_separator")
    return {**options, "chunk_key_encoding": {"name": "v2", "separator": separator}}


def folder_above(path: Path) -> Path:
    """The folder in which a path is, or will be."""
    return next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.is_dir())


def check_room(path: Path, size: int) -> None:
    """What will be written fits on the disk, were it not compressed: known now, not after the last layer."""
    if (free := shutil.disk_usage(folder_above(path)).free) < size:
        raise NoRoom(f"{path}: its features need {size / 1e9:.1f} GB, and the disk has {free / 1e9:.1f} GB left")


def reserve(descriptor: int, size: int, path: Path) -> None:
    """Take the room on the disk now: that it is full should not be known after an hour."""
    if not size:  # which the system refuses
        return
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        else:
            os.truncate(descriptor, size)
    except OSError as error:
        raise NoRoom(f"cannot keep {size / 1e9:.1f} GB in {path}: {error.strerror}") from error


def boxes(
    pieces: Iterator[tuple[Array, Array]], grid: tuple[int, int], rows: int, *, blank: bool = True
) -> Iterator[tuple[int, Array]]:
    """Patches in the order of the grid (their numbers, n×D features) as boxes of whole rows, with zeros between.

    Boxes in which no patch lies are `blank`, or left out.
    """
    band: Array | None = None
    top = 0
    for numbers, features in pieces:
        while len(numbers):
            if band is None:
                if not blank:
                    top = int(numbers[0]) // grid[1] // rows * rows
                band = np.zeros((rows * grid[1], features.shape[1]), features.dtype)
            count = int(np.searchsorted(numbers, (top + rows) * grid[1]))
            band[numbers[:count] - top * grid[1]] = features[:count]
            numbers, features = numbers[count:], features[count:]
            if len(numbers):
                yield top, band.reshape(rows, grid[1], -1)
                top, band = top + rows, None
    while top < grid[0] and band is not None:
        yield top, band.reshape(rows, grid[1], -1)[: grid[0] - top]
        top, band = top + rows, np.zeros_like(band) if blank else None
