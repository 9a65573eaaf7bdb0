"""J and F against a few independent lines, and where the answer is known."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from veca.tasks.video.scores import contour, region


def plain_f(found: NDArray[np.bool_], truth: NDArray[np.bool_]) -> float:
    """Pixel by pixel: contours, then whether the other one is within 0.008 of the diagonal, rounded up."""

    def outline(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
        height, width = mask.shape
        pixels = []
        for y in range(height):
            for x in range(width):
                below, right = min(y + 1, height - 1), min(x + 1, width - 1)
                if any(mask[y, x] != mask[other] for other in ((y, right), (below, x), (below, right))):
                    pixels.append((y, x))
        return pixels

    reach = int(np.ceil(0.008 * np.sqrt(truth.shape[0] ** 2 + truth.shape[1] ** 2)))
    ours, theirs = outline(found), outline(truth)

    def share(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> float:
        if not some:
            return 1.0
        hits = [any((y - v) ** 2 + (x - u) ** 2 <= reach**2 for v, u in others) for y, x in some]
        return sum(hits) / len(hits)

    precision, recall = share(ours, theirs), share(theirs, ours)
    return 0.0 if precision + recall == 0 else 2 * precision * recall / (precision + recall)


def blobs(seed: int, size: tuple[int, int] = (60, 90)) -> NDArray[np.bool_]:
    draw = np.random.default_rng(seed)
    y, x = np.mgrid[: size[0], : size[1]]
    mask = np.zeros(size, bool)
    for _ in range(3):
        top, left, radius = draw.uniform(0, size[0]), draw.uniform(0, size[1]), draw.uniform(4, 18)
        mask |= (y - top) ** 2 + (x - left) ** 2 < radius**2
    return mask


@pytest.mark.parametrize("seed", range(6))
def test_j_and_f_are_those_of_a_few_plain_lines(seed: int) -> None:
    truth = blobs(seed)
    found = np.roll(truth, (seed % 3, seed % 2), (0, 1)) if seed < 4 else blobs(seed + 100)
    inside = [(bool(a), bool(b)) for a, b in zip(found.ravel(), truth.ravel(), strict=True)]
    both, either = sum(a and b for a, b in inside), sum(a or b for a, b in inside)
    assert region(found, truth) == pytest.approx(both / either)
    assert contour(found, truth) == pytest.approx(plain_f(found, truth))


def test_the_same_mask_scores_one_and_another_place_none() -> None:
    mask = np.zeros((60, 90), bool)
    mask[5:20, 5:20] = True
    away = np.zeros_like(mask)
    away[35:50, 60:80] = True
    assert region(mask, mask) == contour(mask, mask) == 1
    assert region(mask, away) == contour(mask, away) == 0


def test_an_empty_mask_is_right_only_where_there_is_nothing() -> None:
    mask, nothing = blobs(0), np.zeros((60, 90), bool)
    assert region(nothing, nothing) == contour(nothing, nothing) == 1
    assert region(mask, nothing) == contour(mask, nothing) == region(nothing, mask) == contour(nothing, mask) == 0
