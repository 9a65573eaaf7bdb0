"""The viewer on the files that people have: slides, OME-Zarr, scenes; boxes in the files' own pixels."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from large.files import aperio, cog, ome_zarr
from PIL import Image

from veca import Veca, open_source

from .conftest import SIDE, SQUARES, View

PARTS = (slice(0, 1200), slice(0, 1600))


@pytest.mark.parametrize("kind", ["slide", "ome-zarr", "scene"])
def test_a_file_with_levels_is_shown_and_looked_at(
    kind: str, start: Callable[..., View], library: Veca, pixels: np.ndarray, tmp_path: Path
) -> None:
    values = pixels[PARTS]
    if kind == "slide":
        path, view = aperio(tmp_path / "slide.svs", values), ["--mpp", "1"]
    elif kind == "ome-zarr":
        path, view = ome_zarr(tmp_path / "cells.zarr", values, 2), ["--level", "1"]
    else:
        path, view = cog(tmp_path / "scene.tif", values, nodata=None), ["--mpp", "20m"]
    page = start(path, *view).scanned()
    with open_source(path, scale=0.5) as picture:
        shown = picture.rgb(0, 0, 800, 600)
    state = page.state()
    assert (state["size"], state["downsample"]) == ([800, 600], [2, 2])
    tile = np.asarray(Image.open(io.BytesIO(page.get("tile/0/1/0.jpg").content)))
    assert np.abs(tile.astype(int) - shown[:512, 512:]).mean() < 12
    box = (SQUARES[0][0] // 2, SQUARES[0][1] // 2, SIDE // 2, SIDE // 2)
    asked = {**dict(zip(("x", "y", "width", "height"), map(str, box), strict=True)), "level": "0"}
    answer = page.get("features.npy", params=asked)
    expected = library.scan(shown).look(box=box).features.numpy()
    np.testing.assert_allclose(np.load(io.BytesIO(answer.content)), expected, atol=2e-3)
    name = re.search(r'filename="(.*)"', answer.headers["content-disposition"])
    assert name
    assert name[1] == f"features-{SQUARES[0][0]}-{SQUARES[0][1]}-{SIDE}-{SIDE}-level0.npy"
    found = page.get("places", params=asked).json()["places"][:2]
    for (left, top), (x, y, width, height) in zip(
        sorted(SQUARES[1:]), sorted(place["file"] for place in found), strict=True
    ):
        across = min(left + SIDE, x + width) - max(left, x)
        down = min(top + SIDE, y + height) - max(top, y)
        assert min(across, down) > SIDE / 2
