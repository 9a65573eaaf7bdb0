from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from veca.large.picture import open_source
from veca.viewer import pyramid as module
from veca.viewer.pyramid import Pyramid

from .conftest import halves


def quiet(what: str, done: int, total: int) -> None:
    assert 0 < done <= total


@pytest.mark.parametrize("kept", [1 << 30, 700_000, 0])  # all levels, only the last one, none
def test_any_box_of_any_level(kept: int, monkeypatch: pytest.MonkeyPatch, pixels: np.ndarray) -> None:
    monkeypatch.setattr(module, "KEPT", kept)
    monkeypatch.setattr(module, "BAND", 100_000)
    pyramid = Pyramid(open_source(pixels), 16)
    assert pyramid.sizes == [(1604, 1206), (802, 603), (401, 302)]
    pyramid.reduce(quiet)
    assert sorted(pyramid.kept) == {1 << 30: [1, 2], 700_000: [2], 0: []}[kept]
    for level, (width, height) in enumerate(pyramid.sizes):
        expected = halves(pixels, level)
        np.testing.assert_array_equal(pyramid.read(level, 0, 0, width, height), expected)
        np.testing.assert_array_equal(pyramid.read(level, 37, 51, 100, 90), expected[51:141, 37:137])
        np.testing.assert_array_equal(pyramid.read(level, width - 5, height - 3, 5, 3), expected[-3:, -5:])


def test_files_are_read_as_they_are_shown(image: Path, pixels: np.ndarray) -> None:
    np.testing.assert_array_equal(Pyramid(open_source(image), 16).read(0, 10, 20, 300, 200), pixels[20:220, 10:310])


def test_a_strip_of_an_image_keeps_its_shorter_side() -> None:
    assert Pyramid(open_source(np.zeros((40, 5000, 3), np.uint8)), 16).sizes == [(5000, 40), (2500, 20)]
