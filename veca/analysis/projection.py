"""High-dimensional features as colours: PCA (instant) or UMAP (slower, keeps neighbours), fitted jointly.

Colours can be compared only where one projection was fitted to all that is compared. Feature maps of one width share a
space and one fit; maps of another width are fitted on their own and then turned (Procrustes) to agree with the first.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from veca.errors import require

Array = NDArray[np.float32]
Method = Literal["pca", "umap"]

# At most so many rows are fitted, the others are placed afterwards. Above 4096 UMAP would search its neighbours by
# approximation, whose compilation alone takes half a minute.
FIT_PCA, FIT_UMAP = 20_000, 4_000


class Pca:
    """The directions of largest variance. The sign of each is fixed, so that equal input gives equal colours."""

    def __init__(self, rows: Array, dimensions: int = 3) -> None:
        self.mean = rows.mean(0, keepdims=True)
        centred = (rows - self.mean).astype(np.float64)
        variance, axes = np.linalg.eigh(centred.T @ centred / max(1, len(rows) - 1))
        axes = axes[:, ::-1][:, :dimensions]
        axes = axes * np.where(np.abs(axes).max(0) == axes.max(0), 1, -1)
        if axes.shape[1] < dimensions:  # fewer channels than colours
            axes = np.pad(axes, ((0, 0), (0, dimensions - axes.shape[1])))
        self.variance = variance[::-1][:dimensions]
        self.axes = axes.astype(np.float32)

    def __call__(self, rows: Array) -> Array:  # R×D → R×dimensions
        placed: Array = (rows - self.mean) @ self.axes
        return placed


def fit_umap(rows: Array, seed: int = 0) -> Callable[[Array], Array]:
    """A 3-D UMAP of `rows`, as a function that places any rows of the same space."""
    umap = require("umap", "explore")
    neighbours = min(30, max(2, len(rows) - 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that a seed means one thread, which is what we ask for
        fitted = umap.UMAP(
            n_components=3, n_neighbors=neighbours, n_epochs=200, random_state=seed, n_jobs=1, init="pca"
        ).fit(rows)
    known = nearest(rows)

    def place(more: Array) -> Array:
        """Each row goes to the mean of its nearest fitted rows, the nearer the heavier (umap's own is far slower)."""
        distance, index = known(more, min(5, len(rows)))
        weight = 1 / (distance + 1e-6)
        weight /= weight.sum(1, keepdims=True)
        placed: Array = (fitted.embedding_[index] * weight[..., None]).sum(1).astype(np.float32)
        return placed

    return place


def nearest(rows: Array) -> Callable[[Array, int], tuple[Array, NDArray[np.int64]]]:
    neighbors = require("sklearn.neighbors", "explore").NearestNeighbors(algorithm="brute").fit(rows)

    def find(more: Array, count: int) -> tuple[Array, NDArray[np.int64]]:
        found: tuple[Array, NDArray[np.int64]] = neighbors.kneighbors(more, n_neighbors=count)
        return found

    return find


def project(groups: Sequence[Array], method: Method = "pca", seed: int = 0) -> list[Array]:
    """Three coordinates for every row of every group, from one fit in which each group counts alike."""
    limit = (FIT_PCA if method == "pca" else FIT_UMAP) // max(1, len(groups))
    generator = np.random.default_rng(seed)
    sample = np.concatenate([thin(rows, max(limit, 3), generator) for rows in groups])
    place: Callable[[Array], Array] = Pca(sample) if method == "pca" else fit_umap(sample, seed)
    return [place(rows) for rows in groups]


def thin(rows: Array, limit: int, generator: np.random.Generator) -> Array:
    if len(rows) <= limit:
        return rows
    return rows[np.sort(generator.choice(len(rows), limit, replace=False))]


def align(points: Array, like: Array) -> Array:
    """Rotation or reflection Q (3×3) for which (points − mean) Q best matches (like − mean), row by row."""
    left, _, right = np.linalg.svd((points - points.mean(0)).T.astype(np.float64) @ (like - like.mean(0)))
    turned: Array = (left @ right).astype(np.float32)
    return turned


def unit(rows: Any) -> Array:
    """Rows of length 1: colours then follow cosine similarity, as all maps here do."""
    values = np.asarray(rows, dtype=np.float32)
    scaled: Array = values / np.maximum(np.linalg.norm(values, axis=-1, keepdims=True), 1e-6)
    return scaled


def colours(groups: Sequence[Array]) -> list[Array]:
    """R×3 coordinates → R×3 colours in 0…1, one scale for all groups.

    The first coordinate becomes lightness, the other two the hue plane of Oklab, in which equal distances look equally
    large; the outer 1 % is clipped.
    """
    rows = np.concatenate(groups)
    low, high = np.percentile(rows, (1, 99), axis=0)
    scale = np.maximum(high - low, 1e-6)
    return [oklab_to_rgb((np.clip((group - low) / scale, 0, 1) - 0.5) * 2) for group in groups]


def oklab_to_rgb(cube: Array) -> Array:
    """A cube [−1, 1]³ laid into Oklab, as sRGB in 0…1."""
    lightness, a, b = 0.67 + 0.23 * cube[:, 0], 0.14 * cube[:, 1], 0.14 * cube[:, 2]
    root = np.stack(
        (
            lightness + 0.3963377774 * a + 0.2158037573 * b,
            lightness - 0.1055613458 * a - 0.0638541728 * b,
            lightness - 0.0894841775 * a - 1.2914855480 * b,
        )
    )
    cone = root**3
    matrix = np.array(
        (
            (4.0767416621, -3.3077115913, 0.2309699292),
            (-1.2684380046, 2.6097574011, -0.3413193965),
            (-0.0041960863, -0.7034186147, 1.7076147010),
        )
    )
    linear = np.clip(matrix @ cone, 0, 1)
    srgb = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    result: Array = np.clip(srgb.T, 0, 1).astype(np.float32)
    return result
