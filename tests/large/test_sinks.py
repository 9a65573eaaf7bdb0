"""Features written in each format are read back by that format's own library."""

from __future__ import annotations

import shutil
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import rasterio
import zarr

from veca import InputError, open_source
from veca.features_stream import StreamSettings, check_disk, sink_for
from veca.large.sinks import GeoTiffSink, NoRoom, NpySink, Sink, ZarrSink, boxes, coloured, write_points
from veca.large.source import Array

from .files import aperio, cog
from .test_formats import small
from .test_picture import photo


def features(height: int, width: int, channels: int = 20) -> Array:
    return np.random.default_rng(0).normal(size=(height, width, channels)).astype(np.float32)


def write(sink: Sink, values: Array) -> None:
    with sink.opened(values.shape[:2], values.shape[2], values.dtype) as put:  # type: ignore[arg-type]
        for top in range(0, len(values), sink.rows):
            put(0, top, values[top : top + sink.rows, :7])
            put(7, top, values[top : top + sink.rows, 7:])


def test_npy_takes_boxes(tmp_path: Path) -> None:
    values = features(21, 33)
    write(NpySink(tmp_path / "f.npy"), values)
    np.testing.assert_array_equal(np.load(tmp_path / "f.npy"), values)


@pytest.mark.parametrize("int8", [False, True])
def test_zarr_is_an_ome_zarr_with_the_patches_place(int8: bool, tmp_path: Path) -> None:
    values = features(40, 70)
    values[32:, :] = 0
    with open_source(aperio(tmp_path / "slide.tif", photo(80 * 14, 70 * 14 * 2)), level=1) as picture:
        write(ZarrSink(tmp_path / "f.zarr", picture, 14, int8), values)
    group = zarr.open_group(str(tmp_path / "f.zarr"), mode="r")
    found = np.moveaxis(group["0"][:], 0, -1)  # type: ignore[index, arg-type]
    if int8:
        assert group["0"].dtype == np.int8  # type: ignore[union-attr]
        found = found * group["scales"][:][..., None]  # type: ignore[index]
    largest = np.abs(values).max(-1, keepdims=True)
    assert (np.abs(found - values) <= largest * (0.5 / 127 + 1e-3)).all()
    (image,) = group.attrs["multiscales"]  # type: ignore[misc]
    assert [axis["name"] for axis in image["axes"]] == ["c", "y", "x"]  # type: ignore[index, call-overload]
    scale, move = image["datasets"][0]["coordinateTransformations"]  # type: ignore[index, call-overload]
    assert scale["scale"] == [1, 14, 14]  # a micrometre a pixel at level 1
    assert move["translation"] == [0, 7, 7]
    assert not (tmp_path / "f.zarr/0/0/1").exists()  # chunks without features take no room
    with open_source(tmp_path / "f.zarr", bands="1,2,3", stretch="2,98") as again:  # and it is a source itself
        assert (again.size, again.mpp) == ((70, 40), 14)


def test_what_float16_cannot_hold_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    values = features(4, 9)
    values[2, 3, 4] = 1e5
    with pytest.raises(InputError, match="too large for float16"):
        write(ZarrSink(tmp_path / "f.zarr"), values)
    assert not list(tmp_path.iterdir())


def test_a_geotiff_has_the_patches_place_on_earth(tmp_path: Path) -> None:
    values = features(30, 40)
    values[:, :10] = 0
    path = cog(tmp_path / "scene.tif", photo(300, 400))
    with open_source(path, scale=0.5) as picture:
        write(GeoTiffSink(tmp_path / "channels.tif", picture, 5, [3, 17]), values)
        write(GeoTiffSink(tmp_path / "colours.tif", picture, 5), values)
    with rasterio.open(tmp_path / "channels.tif") as file:
        np.testing.assert_array_equal(file.read(), np.moveaxis(values[..., [3, 17]], -1, 0))
        assert file.crs.to_epsg() == 32633
        assert tuple(file.transform)[:6] == (100, 0, 500_000, 0, -100, 5_000_000)
        assert file.tags(ns="IMAGE_STRUCTURE")["LAYOUT"] == "COG"
    with rasterio.open(tmp_path / "colours.tif") as file:
        shown = np.moveaxis(file.read(), 0, -1)
        assert (file.count, file.dtypes[0], file.nodata) == (3, "uint8", 0)
        np.testing.assert_array_equal(shown, coloured(values))
        assert not shown[:, :10].any()
        assert (shown[:, 10:] > 0).all()
    with open_source(path) as picture, pytest.raises(InputError, match="--channels are numbers from 0 to 19"):
        write(GeoTiffSink(tmp_path / "none.tif", picture, 5, [20]), values)
    assert not (tmp_path / "none.tif").exists()


def test_points_are_a_table(tmp_path: Path) -> None:
    values = features(1, 6)[0]
    with open_source(photo(64, 64), scale=0.5) as picture:
        write_points(tmp_path / "p.parquet", picture, np.arange(12).reshape(6, 2), values)
    table = pyarrow.parquet.read_table(tmp_path / "p.parquet")
    assert table.column("x").to_pylist() == [0, 4, 8, 12, 16, 20]
    np.testing.assert_array_equal(np.array(table.column("feature").to_pylist(), np.float32), values)


def test_patches_in_order_become_boxes_of_rows() -> None:
    values = features(11, 5, 3).reshape(55, 3)
    kept = np.flatnonzero(np.random.default_rng(1).random(55) < 0.4)
    kept = kept[(kept < 15) | (kept > 32)]
    expected = np.zeros_like(values)
    expected[kept] = values[kept]
    for size in (1, 4, 100):
        pieces = ((kept[i : i + size], values[kept[i : i + size]]) for i in range(0, len(kept), size))
        found = list(boxes(pieces, (11, 5), 4))
        assert [top for top, _ in found] == [0, 4, 8]
        np.testing.assert_array_equal(np.concatenate([box for _, box in found]).reshape(55, 3), expected)


def test_room_is_asked_for_what_is_written(tmp_path: Path) -> None:
    """Of an image whose features in float32 would be a little more than the disk has free."""
    free = shutil.disk_usage(tmp_path).free
    width = small().config.feature_width
    grid = (free // (4 * width * 1000) * 11 // 10, 1000)
    patches = grid[0] * grid[1]
    with open_source(photo(64, 64)) as picture:

        def check(patches: int = patches, **options: object) -> None:
            settings = StreamSettings(paths=(), out=tmp_path, **options)  # type: ignore[arg-type]
            check_disk(sink_for(tmp_path / "a.tif", picture, 16, settings), small(), grid, patches, settings)

        for refused in ({}, {"format": "tif"}, {"format": "zarr", "spill": tmp_path}):
            with pytest.raises(NoRoom, match="the disk has"):
                check(**refused)  # type: ignore[arg-type]
        check(tokens="float16")
        check(format="zarr")
        check(format="zarr-int8")
        check(format="tif", channels="0,5,9")
        check(format="zarr-int8", spill=tmp_path, patches=patches // 2)  # of half of them, tokens in float32
        assert sink_for(
            Path("a"), picture, 16, StreamSettings(paths=(), out=tmp_path, format="zarr-int8")
        ).size((30, 40), 20, np.dtype(np.float32)) == 30 * 40 * (20 + 4)  # fmt: skip


def test_colours_of_a_map_are_made_without_a_copy_of_it(tmp_path: Path) -> None:
    values = np.memmap(tmp_path / "f", np.float32, "w+", shape=(300, 2000, 48))
    values[:, :500] = features(300, 500, 48)
    tracemalloc.start()
    shown = coloured(values)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.7 * values.nbytes
    assert shown[:, :500].all()
    assert not shown[:, 500:].any()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("kind", ["npy", "zarr", "tif"])
def test_room_on_the_disk_is_taken_before_the_first_layer(kind: str, tmp_path: Path) -> None:
    """What the file system has given to files of this process that have no name yet, or a temporary one."""
    values = photo(512, 512)
    taken: dict[str, int] = {}

    def report(what: str, done: int, total: int) -> None:
        held = [file for file in Path("/proc/self/fd").iterdir() if file.exists()]
        sizes = [file.stat().st_size for file in held if str(tmp_path) in str(file.readlink())]
        taken.setdefault(what, max(sizes, default=0))

    with open_source(values) as picture:
        sinks = {
            "npy": NpySink(tmp_path / "f.npy"),
            "zarr": ZarrSink(tmp_path / "f.zarr", picture, 16),
            "tif": GeoTiffSink(tmp_path / "f.tif", picture, 16),
        }
        small().stream(picture, out=sinks[kind], report=report)
    assert taken["layer 1 of 2"] >= 32 * 32 * 48 * (2 if kind == "zarr" else 4)
    assert [file.name for file in tmp_path.iterdir()] == [f"f.{kind}"]
