from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.neighbors import NearestNeighbors

from veca.analysis.figures import joint_colours, resample
from veca.analysis.photos import Features
from veca.analysis.projection import Pca, align, colours, oklab_to_rgb, project, unit


def clusters(count: int, each: int, width: int = 24, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    middles = np.linalg.qr(generator.normal(size=(width, width)))[0][:count] * 3
    labels = np.repeat(np.arange(count), each)
    return (middles[labels] + 0.2 * generator.normal(size=(len(labels), width))).astype(np.float32), labels


def test_pca_is_sklearns_up_to_sign() -> None:
    rows, _ = clusters(5, 40)
    ours, theirs = Pca(rows)(rows), PCA(3).fit_transform(rows)
    np.testing.assert_allclose(np.abs(ours), np.abs(theirs), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(Pca(rows).variance, PCA(3).fit(rows).explained_variance_, rtol=1e-3)


def test_pca_has_three_dimensions_where_features_have_two() -> None:
    assert Pca(np.random.default_rng(0).normal(size=(9, 2)).astype(np.float32))(np.ones((4, 2), np.float32)).shape == (
        4,
        3,
    )


@pytest.mark.parametrize("method", ["pca", pytest.param("umap", marks=pytest.mark.end_to_end)])  # umap compiles first
def test_planted_clusters_stay_apart(method: str) -> None:
    """Four clusters over two groups: neighbours in the projection are of one cluster, whatever their group."""
    rows, labels = clusters(4, 60)
    groups = [rows[::2], rows[1::2]]
    points = np.concatenate(project(groups, method))  # type: ignore[arg-type]
    together = np.concatenate((labels[::2], labels[1::2]))
    near = NearestNeighbors(n_neighbors=6).fit(points).kneighbors(points, return_distance=False)[:, 1:]
    assert (together[near] == together[:, None]).mean() > 0.98
    middles = np.stack([points[together == label].mean(0) for label in range(4)])
    within = max(points[together == label].std(0).max() for label in range(4))
    apart = np.linalg.norm(middles[:, None] - middles[None], axis=-1)[np.triu_indices(4, 1)].min()
    assert apart > 3 * within


def test_rows_beyond_the_limit_are_placed_with_their_like(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("veca.analysis.projection.FIT_UMAP", 60)
    rows, labels = clusters(3, 50)
    points = project([rows], "umap")[0]
    near = NearestNeighbors(n_neighbors=4).fit(points).kneighbors(points, return_distance=False)[:, 1:]
    assert (labels[near] == labels[:, None]).mean() > 0.95


def test_align_undoes_a_rotation() -> None:
    generator = np.random.default_rng(0)
    points = generator.normal(size=(50, 3)).astype(np.float32)
    turn = np.linalg.qr(generator.normal(size=(3, 3)))[0].astype(np.float32)
    np.testing.assert_allclose((points @ turn) @ align(points @ turn, points), points, atol=1e-4)


def test_colours_lie_in_range_and_keep_order() -> None:
    points = np.random.default_rng(0).normal(size=(500, 3)).astype(np.float32)
    first, second = colours([points, points[:7]])
    assert first.min() >= 0
    assert first.max() <= 1
    np.testing.assert_array_equal(first[:7], second)  # one scale for all groups
    grey = oklab_to_rgb(np.array([[-1, 0, 0], [0, 0, 0], [1, 0, 0]], np.float32))
    assert np.ptp(grey, axis=1).max() < 0.01
    assert (np.diff(grey[:, 0]) > 0.15).all()


def test_the_same_feature_has_the_same_colour_at_every_size() -> None:
    """One fit for all sizes: a map and its enlargement agree, which two fits of different content would not."""
    rows, _ = clusters(3, 16)
    small, large = torch.from_numpy(rows), torch.from_numpy(resample(rows, (6, 8), (12, 16)))
    maps = [Features(small[0], small, (6, 8)), Features(large[0], large, (12, 16))]
    first, second = joint_colours(maps, [0, 0], "pca")
    np.testing.assert_allclose(resample(first, (6, 8), (12, 16)), second, atol=1e-5)


def test_a_model_of_another_width_gets_matching_colours() -> None:
    """The second model is the first in a wider space: fitted on its own, then turned, it looks the same."""
    rows, _ = clusters(4, 12)
    wide = rows @ np.linalg.qr(np.random.default_rng(1).normal(size=(40, 40)))[0][:24].astype(np.float32)
    maps = [Features(torch.zeros(1), torch.from_numpy(x), (6, 8)) for x in (rows, wide)]
    first, second = joint_colours(maps, [0, 1], "pca")
    np.testing.assert_allclose(first, second, atol=0.02)


def test_unit_rows() -> None:
    np.testing.assert_allclose(np.linalg.norm(unit(torch.randn(5, 3)), axis=1), 1, rtol=1e-5)
    assert (unit(np.zeros((2, 3))) == 0).all()
