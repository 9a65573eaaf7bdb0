from __future__ import annotations

import numpy as np
import pytest
import torch

from veca import InputError
from veca.analysis.figures import similarity_figure
from veca.analysis.photos import Features, Photo
from veca.analysis.similarity import cosine_map, patch_at, patch_centre, typical_patches
from veca.backbones import Backbone


def test_planted_angles_are_found() -> None:
    angles = torch.linspace(0, torch.pi, 7)
    patches = torch.stack((angles.cos(), angles.sin()), dim=-1) * torch.linspace(0.5, 9, 7)[:, None]  # lengths differ
    torch.testing.assert_close(cosine_map(patches[0], patches), angles.cos())
    torch.testing.assert_close(cosine_map(patches[[0, 3]], patches)[1], (angles - angles[3]).cos())


def test_a_feature_of_zero_is_like_nothing() -> None:
    assert cosine_map(torch.zeros(4), torch.randn(3, 4)).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("x", "y", "index"), [(0, 0, 0), (99.9, 0, 4), (0, 59.9, 10), (99, 59, 14), (50, 30, 7), (19.9, 20.1, 5)]
)
def test_the_patch_under_a_pixel(x: float, y: float, index: int) -> None:
    assert patch_at(x, y, (100, 60), (3, 5)) == index
    assert patch_at(*patch_centre(index, (100, 60), (3, 5)), (100, 60), (3, 5)) == index


@pytest.mark.parametrize(("x", "y"), [(100, 0), (0, 60), (-1, 5)])
def test_a_point_outside_the_photo_is_refused(x: float, y: float) -> None:
    with pytest.raises(InputError, match="100×60"):
        patch_at(x, y, (100, 60), (3, 5))


def test_typical_patches_come_from_different_clusters() -> None:
    middles = torch.eye(8)[:4]
    patches = middles.repeat_interleave(25, 0) + 0.05 * torch.randn(100, 8)
    assert sorted(index // 25 for index in typical_patches(patches, 4)) == [0, 1, 2, 3]


def test_the_figure_shows_the_planted_map(monkeypatch: pytest.MonkeyPatch, photo: Photo) -> None:
    """Features with a known answer in place of a model's: only the columns matter, and they turn by 30° each."""
    angles = torch.arange(6) * torch.pi / 6
    rows = torch.stack((angles.cos(), angles.sin()), dim=-1).repeat(4, 1)  # a 4×6 grid
    monkeypatch.setattr("veca.analysis.figures.features", lambda *_: Features(rows[0], rows, (4, 6)))
    picture = similarity_figure([photo], [Backbone("planted", torch.nn.Identity())], [(24, 10)])  # type: ignore[arg-type]
    expected = np.cos(np.deg2rad(30 * (np.arange(6) - 1)))  # x = 24 of 96 is in column 1
    np.testing.assert_allclose(picture.arrays["cosine_0_0"], np.broadcast_to(expected, (1, 4, 6)), atol=1e-6)
    np.testing.assert_allclose(picture.arrays["points"], [[24 / 96, 10 / 64]])
