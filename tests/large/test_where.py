"""Blank background is found and left out; masks are pictures or GeoJSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import rasterio
import torch
from PIL import Image
from skimage.filters import threshold_otsu

from veca import InputError, open_source
from veca.large.arrays import ArraySource
from veca.large.picture import Strips
from veca.large.place import to_lonlat
from veca.large.source import Array
from veca.large.where import mask_of, otsu
from veca.windows import windowed

from .files import aperio, cog
from .test_formats import small
from .test_picture import photo


def tissue(height: int = 320, width: int = 480) -> Array:
    """A slide: noisy, nearly white glass, and a pink part on the left."""
    generator = np.random.default_rng(0)
    values = generator.integers(235, 246, (height, width, 3), dtype=np.uint8)
    part = photo(height, width // 2)
    values[:, : width // 2] = np.stack([200 + part[..., 0] // 8, part[..., 1] // 3, 100 + part[..., 2] // 8], -1)
    return values


def test_otsu_is_scikit_images() -> None:
    for seed in range(4):
        generator = np.random.default_rng(seed)
        values = np.concatenate([generator.normal(40, 20, 5000), generator.normal(170, 15, 900)]).clip(0, 255)
        assert abs(otsu(values.astype(np.uint8)) - threshold_otsu(values.astype(np.uint8))) <= 1


def test_glass_is_neither_read_nor_looked_with(tmp_path: Path) -> None:
    path = aperio(tmp_path / "slide.svs", tissue())
    expected = np.zeros((20, 30), bool)
    expected[:, :15] = True
    with open_source(path) as picture:
        assert mask_of("auto", (20, 30), Strips(picture, 16)).numpy().tolist() == expected.tolist()
        model = small()
        masked = model.stream(picture, where="auto")
        given = model.scan(picture, where=expected)
        looked = given.look().features
    patches = masked.patches[0].view(20, 30, -1)
    assert not patches[:, 15:].any()
    torch.testing.assert_close(patches[:, :15], looked[:, :15], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(masked.cores[0], given.cores, atol=1e-4, rtol=1e-4)
    model.stream(path, where="auto", out=tmp_path / "f.npy")
    np.testing.assert_allclose(np.load(tmp_path / "f.npy").reshape(600, -1), masked.patches[0].numpy(), atol=1e-5)


def test_a_black_background_is_blank_too() -> None:
    values = tissue()
    values[160:, :] = np.random.default_rng(1).integers(0, 7, (160, 480, 3), dtype=np.uint8)  # what a sensor hears
    expected = np.zeros((20, 30), bool)
    expected[:10, :15] = True
    with open_source(values) as picture:
        assert mask_of("auto", (20, 30), Strips(picture, 16)).numpy().tolist() == expected.tolist()


def test_a_mask_inside_of_a_scene_is_its_nodata(tmp_path: Path) -> None:
    values, path = photo(640, 960, 3, np.uint16, 3000) + 1, tmp_path / "scene.tif"
    there = np.zeros((640, 960), np.uint8)
    there[:, 320:] = 255
    values[:, :320] = 60_000  # of what the mask leaves out
    place = {"crs": "EPSG:32633", "transform": rasterio.transform.from_origin(500_000, 5_000_000, 10, 10)}
    shape = {"height": 640, "width": 960, "count": 3, "dtype": "uint16", "tiled": True}
    with (
        rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True),
        rasterio.open(path, "w", driver="GTiff", blockxsize=128, blockysize=128, **shape, **place) as file,
    ):
        file.write(np.moveaxis(values, -1, 0))
        file.write_mask(there)
        file.build_overviews([2, 4])
    with open_source(path) as picture:
        assert picture.source.nodata is None
        assert picture.notes[0].startswith("16-bit values up to 3000 are stretched")
        for scale in (1.0, 0.5):
            grid = (round(40 * scale), round(60 * scale))
            inside = mask_of("auto", grid, Strips(picture.at(scale), 16)).numpy()
            assert inside.tolist() == (np.arange(grid[1]) >= grid[1] // 3)[None].repeat(grid[0], 0).tolist()


def test_nodata_of_a_scene_is_left_out(tmp_path: Path) -> None:
    values = photo(320, 480, 4, np.uint16, 3000) + 1
    values[:160] = 0
    with open_source(cog(tmp_path / "scene.tif", values), bands="3,2,1") as picture:
        inside = mask_of("auto", (20, 30), Strips(picture, 16))
        assert inside.numpy().tolist() == (np.arange(20)[:, None] >= 10).repeat(30, 1).tolist()
    with (
        open_source(cog(tmp_path / "full.tif", values[..., :3], nodata=None)) as picture,
        pytest.raises(InputError, match="needs a nodata value or a mask"),
    ):
        mask_of("auto", (20, 30), Strips(picture, 16))


def test_geojson_masks(tmp_path: Path) -> None:
    ring = [[96, 32], [320, 32], [320, 256], [96, 256], [96, 32]]
    hole = [[160, 96], [256, 96], [256, 192], [160, 192], [160, 96]]
    expected = np.zeros((20, 30), bool)
    expected[2:16, 6:20] = True
    expected[6:12, 10:16] = False
    file = tmp_path / "mask.geojson"

    def save(rings: object) -> None:
        shape = {"type": "Polygon", "coordinates": rings}
        whole = {"type": "FeatureCollection", "features": [{"type": "Feature", "geometry": shape, "properties": {}}]}
        file.write_text(json.dumps(whole))

    save([ring, hole])
    for options in ({}, {"scale": 0.5}):
        with open_source(photo(326, 489), **options) as picture:  # type: ignore[arg-type]
            patch = 16 if not options else 8
            grid = (picture.size[1] // patch, picture.size[0] // patch)
            assert mask_of(str(file), grid, Strips(picture, patch)).numpy()[:20, :30].tolist() == expected.tolist()
    with open_source(cog(tmp_path / "scene.tif", photo(320, 480))) as scene:
        save([to_lonlat(scene, np.array(part)).tolist() for part in (ring, hole)])
        assert mask_of(file, (20, 30), Strips(scene, 16)).numpy().tolist() == expected.tolist()
    with open_source(photo(320, 480)) as picture:
        for wrong in ('{"type": "Point", "coordinates": [1, 2]}', '{"type": "Polygon"}', "[1]", "no json",
                      '{"type": "Polygon", "coordinates": [[["a", 1], [2, 3], [4, 5]]]}'):  # fmt: skip
            file.write_text(wrong)
            with pytest.raises(InputError, match=r"mask\.geojson"):
                mask_of(file, (20, 30), Strips(picture, 16))
        Image.fromarray((expected * 255).astype(np.uint8)).save(tmp_path / "mask.png")
        assert mask_of(tmp_path / "mask.png", (20, 30), Strips(picture, 16)).numpy().tolist() == expected.tolist()


def test_a_hole_is_one_of_its_own_polygon(tmp_path: Path) -> None:
    def square(left: int, top: int, side: int) -> list[list[int]]:
        right, bottom = left + side, top + side
        return [[left, top], [right, top], [right, bottom], [left, bottom], [left, top]]

    rings = [[square(0, 0, 160)], [square(16, 16, 128), square(48, 48, 64)]]
    file = tmp_path / "mask.geojson"
    file.write_text(json.dumps({"type": "MultiPolygon", "coordinates": rings}))
    with open_source(photo(320, 480)) as picture:
        inside = mask_of(file, (20, 30), Strips(picture, 16)).numpy()
    assert inside[:10, :10].all()
    assert inside.sum() == 100


def test_geojson_may_name_its_reference_system(tmp_path: Path) -> None:
    ring = [[500_960, 4_999_680], [503_200, 4_999_680], [503_200, 4_997_440], [500_960, 4_997_440]]
    file = tmp_path / "mask.geojson"
    shape = {"type": "Polygon", "coordinates": [[*ring, ring[0]]]}
    whole = {"type": "FeatureCollection", "features": [{"type": "Feature", "geometry": shape, "properties": {}}]}
    with open_source(cog(tmp_path / "scene.tif", photo(320, 480))) as scene:
        named = {"type": "name", "properties": {"name": "urn:ogc:def:crs:EPSG::32633"}}
        file.write_text(json.dumps({**whole, "crs": named}))
        inside = mask_of(file, (20, 30), Strips(scene, 16)).numpy()
        expected = np.zeros((20, 30), bool)
        expected[2:16, 6:20] = True
        assert inside.tolist() == expected.tolist()
        for crs in ({}, {"crs": {"type": "name", "properties": {"name": "nowhere"}}}):  # metres, taken for degrees
            file.write_text(json.dumps({**whole, **crs}))
            with pytest.raises(InputError, match="these cannot be placed in it") as error:
                mask_of(file, (20, 30), Strips(scene, 16))
            assert "\n" not in str(error.value)


class Watched(ArraySource):
    """Remembers how far to the left and to the right it was read."""

    def read(self, x: int, y: int, width: int, height: int, level: int, bands: Sequence[int]) -> Array:
        self.left, self.right = min(x, getattr(self, "left", x)), max(x + width, getattr(self, "right", 0))
        return super().read(x, y, width, height, level, bands)


@pytest.mark.parametrize("window", [None, 64])
def test_columns_outside_the_mask_are_not_decoded(window: int | None) -> None:
    values, inside = photo(160, 320), torch.zeros(10, 20, dtype=torch.bool)
    inside[2:7, 5:9] = True
    inside[6:8, 8:12] = True
    source, model = Watched(values), small()
    picture = open_source(source)
    strips = Strips(picture, 16)
    if window is None:
        found = model.stream(picture, where=inside).patches[0].view(10, 20, -1)
        expected = model.scan(values, where=inside).look().features
        assert (source.left, source.right) == (5 * 16, 12 * 16)
    else:
        found = torch.from_numpy(np.concatenate([rows for _, rows in windowed(model, strips, window, None, inside)]))
        whole = np.concatenate([rows for _, rows in windowed(model, Strips(open_source(values), 16), window)])
        expected = torch.from_numpy(whole) * inside[..., None]
        assert (source.left, source.right) == (2 * 16, 14 * 16)  # of windows that touch it
    torch.testing.assert_close(found[inside], expected[inside], atol=1e-4, rtol=1e-4)
    assert not found[~inside].any()
