"""A source at a chosen resolution and in three channels, against Pillow and plain arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from veca import InputError, open_source
from veca.images import open_image
from veca.large.source import Array


def photo(height: int, width: int, bands: int = 3, dtype: type = np.uint8, top: int = 256) -> Array:
    """Smooth, and different in every band."""
    generator = np.random.default_rng(bands)
    coarse = generator.random((bands, height // 16 + 2, width // 16 + 2))
    layers = [np.asarray(Image.fromarray(layer.astype(np.float32)).resize((width, height))) for layer in coarse]
    return (np.stack(layers, axis=-1).clip(0, 1) * (top - 1)).astype(dtype)


@pytest.mark.parametrize("scale", [0.5, 0.3, 0.071, 1.7])
def test_a_scale_is_pillows_resize_and_has_no_seams(scale: float) -> None:
    values = photo(150, 201)
    picture = open_source(values, scale=scale)
    width, height = picture.size
    assert (width, height) == (round(201 * scale), round(150 * scale))
    whole = picture.rgb(0, 0, width, height)
    expected = np.asarray(Image.fromarray(values).resize((width, height), Image.Resampling.BICUBIC))
    assert np.abs(whole.astype(int) - expected).max() <= (1 if scale > 0.25 else 6)  # squares are averaged first
    generator = np.random.default_rng(1)
    for _ in range(20):
        x, y = (int(generator.integers(0, side)) for side in (width, height))
        wide, high = (int(generator.integers(1, side - at + 1)) for side, at in ((width, x), (height, y)))
        np.testing.assert_array_equal(picture.rgb(x, y, wide, high), whole[y : y + high, x : x + wide])


def test_levels_and_physical_scale_of_an_ome_tiff_whose_channels_are_pages(tmp_path: Path) -> None:
    values = np.moveaxis(photo(96, 160, 3, np.uint16, 65536), -1, 0)
    path = tmp_path / "cells.ome.tif"
    with tifffile.TiffWriter(path) as file:
        physical = {"axes": "CYX", "PhysicalSizeX": 0.25, "PhysicalSizeXUnit": "µm"}
        file.write(values, subifds=1, tile=(32, 32), metadata=physical, photometric="minisblack")
        file.write(values[:, ::2, ::2], subfiletype=1, tile=(32, 32), photometric="minisblack")
    with open_source(path) as picture:
        assert (picture.size, picture.levels, picture.mpp) == ((160, 96), [(160, 96), (80, 48)], 0.25)
        np.testing.assert_array_equal(
            picture.rgb(5, 7, 100, 60), np.asarray(open_image(np.moveaxis(values, 0, -1)))[7:67, 5:105]
        )
    expected = np.asarray(open_image(np.ascontiguousarray(np.moveaxis(values[:, ::2, ::2], 0, -1))))
    for choice in ({"level": 1}, {"mpp": 0.5}, {"scale": 0.5}):
        with open_source(path, **choice) as picture:  # type: ignore[arg-type]
            assert (picture.level, picture.size, picture.mpp) == (1, (80, 48), 0.5)
            np.testing.assert_array_equal(picture.rgb(0, 0, 80, 48), expected)
    with pytest.raises(InputError, match=r"it has levels 0 to 1 \(160×96, 80×48\), not 2"):
        open_source(path, level=2)
    with pytest.raises(InputError, match="give one of level, mpp and scale"):
        open_source(path, level=1, scale=0.5)


def test_separate_planes_and_many_bands_are_chosen_by_number(tmp_path: Path) -> None:
    values = photo(64, 80, 5)
    for number, options in enumerate([{"tile": (32, 32), "compression": "deflate"}, {}, {"rowsperstrip": 7}]):
        path = tmp_path / f"{number}.tif"
        planes = np.moveaxis(values, -1, 0)
        tifffile.imwrite(path, planes, planarconfig="separate", photometric="rgb", **options)  # type: ignore[arg-type]
        with open_source(path, bands="4,3,2") as picture:
            np.testing.assert_array_equal(picture.rgb(3, 5, 70, 50), values[5:55, 3:73, [3, 2, 1]])
            assert picture.view == {"bands": [4, 3, 2]}
            assert not picture.notes
        with open_source(path) as picture:
            assert picture.notes == ("bands 1,2,3 of 5 are taken for red, green and blue (--bands)",)
    with open_source(values, bands=[5]) as grey:
        np.testing.assert_array_equal(grey.rgb(0, 0, 80, 64), values[..., [4, 4, 4]])
    for wrong in ("1,2", "0,1,2", "4,5,6", "red", ""):
        with pytest.raises(InputError, match="--bands takes"):
            open_source(values, bands=wrong)
    with pytest.raises(InputError, match="2 values a pixel"):
        open_source(values[..., :2])


def test_dark_16_bit_values_are_stretched_and_told() -> None:
    values = photo(64, 80, 4, np.uint16, 3000)
    picture = open_source(values[..., :3])
    assert picture.notes == ("16-bit values up to 2999 are stretched from percentile 2 to 98 (--stretch)",)
    assert picture.view == {"stretch": [2, 98]}
    low, high = np.percentile(values[..., :3].reshape(-1, 3), (2, 98), axis=0)
    expected = np.rint(((values[..., :3] - low) / (high - low) * 255).clip(0, 255))
    assert np.abs(picture.rgb(0, 0, 80, 64) - expected).max() <= 1
    chosen = open_source(values, bands="4,3,2", stretch="0,100")
    assert not chosen.notes
    assert chosen.rgb(0, 0, 80, 64).max() == 255
    np.testing.assert_array_equal(open_source(values, **chosen.view).rgb(0, 0, 80, 64), chosen.rgb(0, 0, 80, 64))
    bright = photo(64, 80, 3, np.uint16, 65536)
    np.testing.assert_array_equal(open_source(bright).rgb(0, 0, 80, 64), np.asarray(open_image(bright)))


def test_values_without_an_agreed_range_need_a_stretch() -> None:
    decibels = photo(64, 80, 1, np.float32, 41) - 30
    with pytest.raises(InputError, match=r"floats must lie in 0 to 1.*--stretch 2,98"):
        open_source(decibels)
    with pytest.raises(InputError, match=r"not int32; or give --stretch 2,98"):
        open_source(decibels.astype(np.int32))
    decibels[0, 0] = np.nan
    seen = open_source(decibels, stretch=(2, 98)).rgb(0, 0, 80, 64)
    assert seen.min() == 0
    assert seen.max() == 255
    for wrong in ("98,2", "2", "-1,98", "2,101", "a,b"):
        with pytest.raises(InputError, match="--stretch takes"):
            open_source(decibels, stretch=wrong)


def test_lengths_have_units() -> None:
    with pytest.raises(InputError, match="does not tell its physical scale"):
        open_source(photo(32, 32), mpp=1)
    from veca.large.picture import micrometres

    assert [micrometres(text, "mpp") for text in (0.5, "0.5", "2um", "2 µm", "10m", "1e-3mm")] == [
        0.5, 0.5, 2, 2, 1e7, 1
    ]  # fmt: skip
    for wrong in ("", "0", "-1", "ten", "3 miles", "nan", "1.2.3"):
        with pytest.raises(InputError, match="is a length such as"):
            micrometres(wrong, "mpp")


def test_an_overview_of_a_large_picture_is_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from veca.large import picture as module

    values = photo(300, 400)
    whole = open_source(values).overview(100)
    assert whole.shape == (75, 100, 3)
    monkeypatch.setattr(module, "AT_ONCE", 5000)
    np.testing.assert_array_equal(open_source(values).overview(100), whole)
