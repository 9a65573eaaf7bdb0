"""How good a mask is, as DAVIS measures it: region similarity J and contour accuracy F (CVPR 2016, section 4)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

TOLERANCE = 0.008  # of the picture's diagonal: how far a contour may be off

Mask = np.ndarray[Any, Any]  # H×W, true inside
Points = np.ndarray[Any, Any]  # n×2, (y, x)


def region(found: Mask, truth: Mask) -> float:
    """J: intersection over union; 1 where both are empty."""
    union = int((found | truth).sum())
    return int((found & truth).sum()) / union if union else 1.0


def contour(found: Mask, truth: Mask) -> float:
    """F: the harmonic mean of precision and recall of the contour's pixels, each met within the tolerance."""
    radius = math.ceil(TOLERANCE * math.hypot(*truth.shape))
    ours, theirs = edge(found), edge(truth)
    precision, recall = met(ours, theirs, radius), met(theirs, ours, radius)
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def edge(mask: Mask) -> Points:
    """n×2, (y, x) of the pixels that differ from the one at the right, below, or both."""
    padded = np.pad(mask, ((0, 1), (0, 1)), mode="edge")
    here = padded[:-1, :-1]
    return np.argwhere((here != padded[:-1, 1:]) | (here != padded[1:, :-1]) | (here != padded[1:, 1:]))


def met(pixels: Points, others: Points, radius: int) -> float:
    """The share of a contour's pixels with one of the other contour within the radius; 1 where there are none."""
    from scipy.spatial import KDTree

    if not len(pixels) or not len(others):
        return float(not len(pixels))
    distance, _ = KDTree(others).query(pixels)
    return float((distance <= radius).mean())
