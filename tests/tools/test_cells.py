"""Cells of large photographs: labels, tiles, the split and the head, against planted answers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import cells
import numpy as np
import pytest
import torch
from PIL import Image

from veca import create_model

XML = """<annotation><size><width>3840</width><height>2160</height></size><object><name>starfish</name><bndbox>
<xmin>60</xmin><ymin>0</ymin><xmax>180</xmax><ymax>60</ymax></bndbox></object></annotation>"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for folder in ("Annotations", "JPEGImages"):
        (tmp_path / folder).mkdir()
    for number in range(48):
        (tmp_path / f"Annotations/{number:03}.xml").write_text(XML)
    Image.effect_noise((384, 216), 60).convert("RGB").save(tmp_path / "JPEGImages/000.jpg")
    return tmp_path


def test_a_cell_has_the_kinds_of_the_boxes_around_its_centre(data: Path) -> None:
    labels = cells.read_photos(data)[0].labels().reshape(*cells.CELLS, len(cells.KINDS))
    assert np.argwhere(labels).tolist() == [[0, 1, 1], [0, 2, 1]]  # cells are 60 pixels wide


def test_train_and_test_come_from_different_stretches(data: Path) -> None:
    photos = cells.read_photos(data)
    train, test = cells.split(photos, 2)
    assert (len(train), len(test)) == (32, 16)
    stretches = [{photos.index(photo) // 2 for photo in part} for part in (train, test)]
    assert not stretches[0] & stretches[1]


@pytest.mark.parametrize("length", [18, 32, 36, 54, 64, 72, 96, 128])
def test_tiles_cover_an_axis(length: int) -> None:
    for overlap in (False, True):
        starts, size = cells.cuts(length, 32, overlap)
        counts = np.zeros(length, int)
        for start in starts:
            assert 0 <= start <= length - size
            counts[start : start + size] += 1
        assert size <= 32
        assert counts.min() == 1
        assert overlap or counts.max() == 1
        if overlap:
            assert all(after - before <= 24 for before, after in pairwise(starts))


def test_features_go_to_cells_by_their_mean() -> None:
    grid = torch.arange(72 * 128.0).reshape(72, 128, 1)
    found = cells.to_cells(grid).reshape(cells.CELLS)
    assert found[3, 5] == pytest.approx(float(grid[6:8, 10:12].mean()))


def test_a_head_finds_what_features_tell_and_nothing_else() -> None:
    draw = np.random.default_rng(0)
    labels = [(draw.random((300, len(cells.KINDS))) < 0.1).astype(np.float32) for _ in range(12)]
    noise = [torch.from_numpy(draw.normal(size=(300, 8)).astype(np.float32)) for _ in labels]
    told = [torch.cat((one, torch.from_numpy(truth)), 1) for one, truth in zip(noise, labels, strict=True)]
    assert cells.score(iter(told), labels, 8)["mAP"] == pytest.approx(1, abs=1e-3)
    assert cells.score(iter(noise), labels, 8)["mAP"] == pytest.approx(0.1, abs=0.06)


def test_one_tile_is_the_whole_and_a_larger_photograph_needs_several(data: Path, tmp_path: Path) -> None:
    for name in ("judged", "teacher"):
        create_model("veca_tiny", depth=1, patch_size=14).save(tmp_path / name)
    settings = cells.Settings(data=data, model=str(tmp_path / "judged"), teacher=str(tmp_path / "teacher"), cores=(8,))
    ways, photo = cells.Ways(settings, "float32"), cells.read_photos(data)[0]
    rows = [cells.Row("teacher", None, 1.0, tiles) for tiles in ("", "apart", "overlapping")]
    whole, apart, overlapping = (ways.grid(row, photo.pixels(448)) for row in rows)
    assert whole.shape[:2] == (18, 32)
    torch.testing.assert_close(apart, whole)
    torch.testing.assert_close(overlapping, whole)
    pixels = photo.pixels(896)
    found = ways.grid(rows[1], pixels)
    torch.testing.assert_close(found[:18, 32:], ways.grid(rows[0], pixels[:252, 448:]), atol=1e-4, rtol=1e-3)
    assert [row.name for row in cells.rows_of(settings, 448)] == ["teacher", "judged-8cores", "judged-8cores-share0.25"]
