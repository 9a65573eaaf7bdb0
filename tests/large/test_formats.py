"""Every format gives the pixels, and so the features, of the same picture as an array; what is damaged is one line."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import rasterio
import tifffile
import torch
import zarr

from veca import InputError, Veca, VecaConfig, open_source
from veca.large import formats
from veca.large.source import Array

from .files import aperio, cog, ome_tiff, ome_zarr
from .test_picture import photo


def small() -> Veca:
    torch.manual_seed(0)
    return Veca(VecaConfig(depth=2, width=48, heads=3, bank=8)).eval()


def written(kind: str, folder: Path, values: Array) -> Path:
    if kind == "ome-tiff":
        return ome_tiff(folder / "cells.ome.tif", values)
    if kind == "slide":
        return aperio(folder / "slide.svs", values)
    if kind == "slide named .tif":
        return aperio(folder / "slide.tif", values)
    if kind.startswith("ome-zarr"):
        return ome_zarr(folder / "cells.zarr", values, int(kind[-1]))
    if kind == "cog":
        return cog(folder / "scene.tif", values)
    version, layout = kind.split()[1:]
    data = values if layout == "yxc" else np.ascontiguousarray(np.moveaxis(values, -1, 0))
    chunks = (50, 70, 3) if layout == "yxc" else (3, 50, 70)
    zarr.create_array(str(folder / "array.zarr"), data=data, chunks=chunks, zarr_format=int(version))
    return folder / "array.zarr"


KINDS = {
    "ome-tiff": 3,
    "slide": 2,
    "slide named .tif": 2,
    "ome-zarr 2": 2,
    "ome-zarr 3": 2,
    "cog": 3,
    "zarr 2 yxc": 1,
    "zarr 3 cyx": 1,
}


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_those_of_the_same_pixels_in_an_array(kind: str, tmp_path: Path) -> None:
    values = photo(208, 304) | 1  # nothing is nodata
    path = written(kind, tmp_path, values)
    with open_source(path) as picture:
        assert picture.size == (304, 208)
        assert len(picture.levels) == KINDS[kind]
        np.testing.assert_array_equal(picture.rgb(0, 0, 304, 208), values)
        np.testing.assert_array_equal(picture.rgb(17, 33, 100, 90), values[33:123, 17:117])
        assert not picture.notes
        if "ome" in kind or "slide" in kind:
            assert picture.mpp == 0.5
    model = small()
    expected = model.stream(values)
    torch.testing.assert_close(model.stream(path).patches, expected.patches)
    if KINDS[kind] > 1 and kind != "cog":  # whose levels GDAL averages
        with open_source(path, level=1) as coarse:
            np.testing.assert_array_equal(coarse.rgb(0, 0, *coarse.size), values[::2, ::2])
            scan = model.scan(coarse)
            torch.testing.assert_close(scan.cores, model.scan(np.ascontiguousarray(values[::2, ::2])).cores)


def test_a_scene_has_a_place_and_bands_in_any_order(tmp_path: Path) -> None:
    values = photo(300, 400, 4, np.uint16, 3000) + 1
    values[:, :50] = 0
    path = cog(tmp_path / "scene.tif", values)
    with open_source(path) as picture:
        assert picture.notes[0] == "bands 1,2,3 of 4 are taken for red, green and blue (--bands)"
        assert picture.notes[1].startswith("16-bit values up to 3000 are stretched")
        assert (picture.mpp, picture.source.nodata) == (1e7, 0)
        assert picture.transform == (10, 0, 500_000, 0, -10, 5_000_000)
        assert rasterio.CRS.from_wkt(picture.crs).to_epsg() == 32633
        assert "10 m a pixel, WGS 84 / UTM zone 33N" in picture.describe()
    with open_source(path, bands="4,3,2", stretch="0,100", mpp="20m") as half:
        assert (half.size, half.level) == ((200, 150), 1)
        assert half.transform == (20, 0, 500_000, 0, -20, 5_000_000)
        assert half.channels.limits is not None
        np.testing.assert_allclose(half.channels.limits[0], values[:, 50:, [3, 2, 1]].min((0, 1)), rtol=0.2)


def test_what_a_file_lacks_is_said(tmp_path: Path) -> None:
    with open_source(cog(tmp_path / "plain.tif", photo(64, 64), crs=None)) as picture:
        assert picture.describe().endswith("64×64 pixels, no physical scale (mpp), no reference system (CRS)")
    with pytest.raises(InputError, match="does not tell its physical scale"):
        open_source(tmp_path / "plain.tif", mpp=1)


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slide, scene = aperio(tmp_path / "slide.ndpi", photo(64, 64)), cog(tmp_path / "scene.tif", photo(64, 64))
    array = written("zarr 3 cyx", tmp_path, photo(64, 64))
    for module in ("openslide", "rasterio", "zarr"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(formats, "has", lambda module: False)
    with pytest.raises(InputError, match=r"openslide is needed for this: pip install 'veca\[slides\]'"):
        open_source(slide)
    with pytest.raises(InputError, match=r"zarr is needed for this: pip install 'veca\[zarr\]'"):
        open_source(array)
    with open_source(scene) as picture:
        assert picture.notes == ("its reference system is not read without pip install 'veca[geo]'",)


def test_damaged_and_hostile_files_are_one_line(tmp_path: Path) -> None:
    values = photo(208, 304)
    for kind in KINDS:
        folder = tmp_path / kind.replace(" ", "-")
        folder.mkdir()
        path = written(kind, folder, values)
        files = [path] if path.is_file() else [file for file in sorted(path.rglob("*")) if file.is_file()]
        generator = np.random.default_rng(len(kind))
        for file in files[:6]:
            whole = file.read_bytes()
            for _ in range(6):
                data = bytearray(whole)
                if generator.random() < 0.4:
                    data = data[: int(generator.integers(0, len(data)))]
                for place in generator.integers(0, max(1, min(len(data), 4000)), 8).tolist() if data else ():
                    data[place] = int(generator.integers(0, 256))
                file.write_bytes(data)
                try:
                    with open_source(path) as picture:
                        width, height = (min(side, 400) for side in picture.size)
                        assert picture.rgb(0, 0, width, height).shape == (height, width, 3)
                except InputError as error:
                    assert "\n" not in str(error)
            file.write_bytes(whole)


def test_a_zarr_that_would_run_code_is_refused(tmp_path: Path) -> None:
    ran = tmp_path / "ran"

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (ran,)  # type: ignore[return-value]

    path = tmp_path / "bomb.zarr"
    zarr.create_array(str(path), data=photo(64, 64, 1)[..., 0], zarr_format=2, chunks=(64, 64))
    about = json.loads((path / ".zarray").read_text())
    about["compressor"] = {"id": "pickle", "protocol": 5}
    (path / ".zarray").write_text(json.dumps(about))
    (path / "0.0").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(InputError, match="pickle") as error:
        open_source(path)
    assert "\n" not in str(error.value)
    assert not ran.exists()
    about["compressor"] = {"id": "base64"}
    (path / ".zarray").write_text(json.dumps(about))
    with pytest.raises(InputError, match="packed by base64, which is not read here; rewrite it with zstd"):
        open_source(path)


def test_sizes_are_checked_before_anything_is_decoded(tmp_path: Path) -> None:
    path = tmp_path / "huge.zarr"
    zarr.create_array(str(path), shape=(2**20, 2**20), chunks=(2**18, 2**18), dtype="uint8", zarr_format=2)
    with pytest.raises(InputError, match="too large to decode at once"):
        open_source(path)
    zarr.open_group(str(tmp_path / "group.zarr"), mode="w")
    with pytest.raises(InputError, match="a Zarr group that is no image"):
        open_source(tmp_path / "group.zarr")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="is a folder, not an image"):
        open_source(tmp_path / "folder")
    tifffile.imwrite(tmp_path / "stack.tif", np.stack([photo(64, 64)] * 5), photometric="rgb")
    with open_source(tmp_path / "stack.tif") as picture:
        assert picture.notes[0].startswith("takes the first of 5")


def test_images_that_are_not_read_are_told(tmp_path: Path) -> None:
    with tifffile.TiffWriter(tmp_path / "two.tif") as file:
        file.write(photo(64, 96), photometric="rgb")
        file.write(photo(40, 48), photometric="rgb")
        file.write(photo(20, 24), photometric="rgb", subfiletype=1)  # a thumbnail of the second is no image
    with open_source(tmp_path / "two.tif") as picture:
        assert picture.notes == ("takes the first of 2 images in the file",)
        assert picture.size == (96, 64)


def test_a_slide_is_known_by_what_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = photo(208, 304)
    path = aperio(tmp_path / "slide.tif", values)
    with tifffile.TiffWriter(tmp_path / "tiles.tif") as file:  # a generic-tiff to OpenSlide
        file.write(values, tile=(64, 64), photometric="rgb")
    with open_source(path) as picture, open_source(tmp_path / "tiles.tif") as plain:
        assert (type(picture.source).__name__, type(plain.source).__name__) == ("SlideSource", "TiffSource")
    monkeypatch.setattr(formats, "has", lambda module: False)
    with open_source(path) as picture:
        assert (type(picture.source).__name__, picture.mpp, len(picture.levels)) == ("TiffSource", 0.5, 2)
        np.testing.assert_array_equal(picture.rgb(0, 0, 304, 208), values)


def test_the_scale_of_all_levels_counts_too(tmp_path: Path) -> None:
    path = ome_zarr(tmp_path / "cells.zarr", photo(64, 64), 2)
    about = json.loads((path / ".zattrs").read_text())
    (image,) = about["multiscales"]
    for number, dataset in enumerate(image["datasets"]):
        dataset["coordinateTransformations"] = [{"type": "scale", "scale": [1, 2**number, 2**number]}]
    image["coordinateTransformations"] = [{"type": "scale", "scale": [1, 0.5, 0.5]}]
    (path / ".zattrs").write_text(json.dumps(about))
    with open_source(path) as picture:
        assert picture.mpp == 0.5


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_of_an_uncompressed_file_only_the_box_is_read(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 256, (64, 40_000, 3), dtype=np.uint8)
    tifffile.imwrite(tmp_path / "wide.tif", values, photometric="rgb")

    def taken() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    with open_source(tmp_path / "wide.tif") as picture:
        before = taken()
        box = picture.rgb(20_000, 5, 16, 48)
        assert taken() - before < 48 * 40_000
        np.testing.assert_array_equal(box, values[5:53, 20_000:20_016])
        np.testing.assert_array_equal(picture.rgb(0, 3, 40_000, 9), values[3:12])


def test_reduced_pages_are_levels_whatever_their_factor(tmp_path: Path) -> None:
    values, path = photo(512, 640), tmp_path / "pyramid.tif"
    with tifffile.TiffWriter(path) as file:
        for step in (1, 8):
            file.write(values[::step, ::step], tile=(64, 64), photometric="rgb", subfiletype=int(step > 1))
    with open_source(path, level=1) as picture:
        assert picture.levels == [(640, 512), (80, 64)]
        np.testing.assert_array_equal(picture.rgb(0, 0, 80, 64), values[::8, ::8])


def test_whatever_gives_boxes_of_itself_is_an_array(tmp_path: Path) -> None:
    values = photo(64, 96)
    for shape in (values, values[..., 0]):
        lazy = zarr.create_array(
            str(tmp_path / f"{shape.ndim}.zarr"), data=shape, chunks=(32,) * 2 + (3,) * (shape.ndim - 2)
        )
        with open_source(lazy) as picture, open_source(shape) as same:  # as an h5py data set is
            np.testing.assert_array_equal(picture.rgb(5, 3, 70, 50), same.rgb(5, 3, 70, 50))
    np.save(tmp_path / "planes.npy", np.moveaxis(values, -1, 0))
    with pytest.raises(InputError, match=r"planes\.npy: 3×64×96 has its bands first"):
        open_source(tmp_path / "planes.npy")
    with pytest.raises(InputError):
        open_source(torch.zeros(3, 16, 16))  # type: ignore[arg-type]


def test_what_is_read_another_way_says_how(tmp_path: Path) -> None:
    (tmp_path / "cells.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    with pytest.raises(InputError, match=r"cells\.h5: HDF5 is read as Zarr: copy the array in it once"):
        open_source(tmp_path / "cells.h5")
    group = zarr.open_group(str(tmp_path / "series.zarr"), mode="w", zarr_format=2)  # as bioformats2raw writes it
    group.attrs["bioformats2raw.layout"] = 3
    ome_zarr(tmp_path / "series.zarr/0", photo(64, 64), 2)
    with pytest.raises(InputError, match=r"\(it holds 0\); name one, as in .*series\.zarr/0$"):
        open_source(tmp_path / "series.zarr")
    with open_source(tmp_path / "series.zarr/0") as picture:
        assert picture.size == (64, 64)


def test_dim_floats_are_stretched_as_dim_16_bits_are(tmp_path: Path) -> None:
    reflectance = photo(64, 64).astype(np.float32) / 255 * 0.2
    with open_source(cog(tmp_path / "scene.tif", reflectance, nodata=None)) as picture:
        assert picture.notes == ("values up to 0.2 are stretched from percentile 2 to 98 (--stretch)",)
        assert picture.rgb(0, 0, 64, 64).max() == 255
    with open_source(reflectance * 5) as picture:
        assert not picture.notes
