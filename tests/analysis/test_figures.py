"""Every figure's arrays have the right grid and the right content; the pictures themselves were looked at."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from veca import InputError
from veca.analysis import core_figures, figures
from veca.analysis.contributions import contributions
from veca.analysis.photos import Photo, features, photo_tensor
from veca.backbones import Backbone
from veca.model import Veca

from .conftest import SMALL, lively


def test_features_over_sizes_and_models(photo: Photo, backbone: Backbone, tmp_path: Path) -> None:
    wider = Backbone("wider", lively(dataclasses.replace(SMALL, out_width=48), seed=1))
    picture = figures.features_figure([photo], [backbone, wider], sizes=(64, 128))
    for model, name in enumerate((backbone, wider)):
        assert picture.arrays[f"colours_{model}_0_64"].shape == (4, 6, 3)
        assert picture.arrays[f"colours_{model}_0_128"].shape == (8, 12, 3)
        own = features(name, photo, 128)
        expected = torch.cosine_similarity(own.cls[None], own.patches, dim=-1).reshape(8, 12)
        np.testing.assert_allclose(picture.arrays[f"global_{model}_0"], expected, atol=1e-5)
    png, npz = picture.write(tmp_path, "features")
    with Image.open(png) as image:
        assert image.width > 800
    with np.load(npz) as saved:
        np.testing.assert_array_equal(saved["colours_0_0_64"], picture.arrays["colours_0_0_64"])


def test_similarity_of_chosen_patches_in_two_photos(photo: Photo, backbone: Backbone) -> None:
    other = Photo("turned", photo.image.rotate(180))
    picture = figures.similarity_figure([photo, other], [backbone], [(70, 20), (5, 60)], size=64)
    own, turned = (features(backbone, p, 64) for p in (photo, other))
    query = own.patches[1 * 6 + 4]  # x = 70 of 96 is column 4, y = 20 of 64 is row 1
    expected = torch.cosine_similarity(query[None], turned.patches, dim=-1).reshape(4, 6)
    np.testing.assert_allclose(picture.arrays["cosine_0_1"][0], expected, atol=1e-5)
    assert picture.arrays["cosine_0_0"].shape == (2, 4, 6)
    assert picture.arrays["cosine_0_0"][0, 1, 4] == pytest.approx(1)
    chosen = figures.similarity_figure([photo], [backbone], size=64)
    assert 1 <= len(chosen.arrays["points"]) <= 4


def test_cores_to_patches(photo: Photo, backbone: Backbone) -> None:
    picture = figures.cores_figure([photo], [backbone], [0, 5], size=64, cores=8)
    images, _ = photo_tensor(photo, backbone.model, 64, torch.device("cpu"))
    out = backbone.veca(images, cores=8)
    expected = torch.cosine_similarity(out.cores[0, 5][None], out.patches[0], dim=-1).reshape(4, 6)
    np.testing.assert_allclose(picture.arrays["cosine_0_0"][1], expected.detach(), atol=1e-5)
    with pytest.raises(InputError, match="no core 8"):
        figures.cores_figure([photo], [backbone], [8], size=64, cores=8)


@torch.no_grad()
def test_layers_by_budgets(photo: Photo, backbone: Backbone) -> None:
    picture = core_figures.layers_figure([photo], [backbone], budgets=(4, 16, 999), method="pca", size=64)
    assert picture.arrays["colours"].shape == (2, 2, 4, 6, 3)  # budgets, layers but the first, grid
    assert picture.arrays["budgets"].tolist() == [4, 16]
    assert picture.arrays["layers"].tolist() == [2, 3]
    profiles = picture.arrays["profiles"]
    assert profiles.shape == (2, 2, 4, 6, 16)
    np.testing.assert_allclose(profiles.astype(np.float32).sum(-1), 1, atol=2e-3)
    assert (profiles[0, ..., 4:] == 0).all()
    images, _ = photo_tensor(photo, backbone.model, 64, torch.device("cpu"))
    last = list(contributions(backbone.veca, images, backbone.veca.forward_layers(images, 16)))[-1]
    np.testing.assert_allclose(profiles[1, 1].reshape(24, 16), last.patches[0], atol=1e-3)


@torch.no_grad()
def test_positions_are_the_models_own(photo: Photo, backbone: Backbone) -> None:
    picture = core_figures.positions_figure([photo], [backbone], size=64, cores=5)
    images, _ = photo_tensor(photo, backbone.model, 64, torch.device("cpu"))
    coords = torch.stack(backbone.veca.forward_layers(images, 5).coords)[:, 0]
    np.testing.assert_allclose(picture.arrays["coords_0_0"], (coords + 1) / 2, atol=1e-6)
    assert np.abs(np.diff(picture.arrays["coords_0_0"], axis=0)).max() > 0  # they do move
    assert "no core moves" not in words(picture)
    still = Backbone("still", copy.deepcopy(backbone.veca))
    still.veca.bank.alpha.zero_()  # as in a model that was converted from a teacher without rotation
    assert "no core moves" in words(core_figures.positions_figure([photo], [still], size=64, cores=5))


def words(picture: core_figures.Picture) -> list[str]:
    return [text.get_text() for axes in picture.sheet.figure.axes for text in axes.texts]


def test_budgets_compare_with_the_full_one(photo: Photo, backbone: Backbone) -> None:
    picture = core_figures.budgets_figure([photo], [backbone], budgets=(2, 8, 16), size=64)
    assert picture.arrays["budgets"].tolist() == [2, 8, 16]
    few, full = features(backbone, photo, 64, 2), features(backbone, photo, 64, 16)
    expected = torch.cosine_similarity(few.patches, full.patches, dim=-1).reshape(4, 6)
    np.testing.assert_allclose(picture.arrays["patches_0_0"][0], expected, atol=1e-5)
    assert picture.arrays["global_0_0"].shape == (2,)
    with pytest.raises(InputError, match="smaller than the bank"):
        core_figures.budgets_figure([photo], [backbone], budgets=(16,), size=64)


def test_figures_about_cores_refuse_a_teacher(photo: Photo) -> None:
    class NoCores(torch.nn.Module):
        patch_size = 16

    for draw in (figures.cores_figure, core_figures.layers_figure, core_figures.positions_figure):
        with pytest.raises(InputError, match="has no cores"):
            draw([photo], [Backbone("teacher", NoCores())])  # type: ignore[arg-type, operator]


def test_a_figure_of_one_photo_says_so(photo: Photo, backbone: Backbone) -> None:
    with pytest.raises(InputError, match="one photo at a time, not 2"):
        core_figures.layers_figure([photo, photo], [backbone])
    one = Backbone("flat", Veca(dataclasses.replace(SMALL, depth=1)))
    with pytest.raises(InputError, match="one layer only"):
        core_figures.layers_figure([photo], [one])
