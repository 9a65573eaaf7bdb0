"""Scans of uploaded photos, which their clients keep, and looks along them (docs/scan.md)."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from veca.model import Veca
from veca.scan_file import SAMPLES
from veca.serve.problems import Problem

HEADER = 1 << 16  # bytes
Box = tuple[int, int, int, int]


def largest_scan(model: Veca, patches: int) -> int:
    """Bytes of the largest scan file that this model writes of so many patches (veca.scan_file.DTYPES)."""
    config = model.config
    path = 2 * config.depth * config.bank * config.width * 2
    cores = config.bank * (config.feature_width + 2) * 4
    return path + cores + SAMPLES**2 * 3 * 2 + patches // 8 + HEADER


def read_box(text: str | None) -> Box | None:
    if text is None:
        return None
    if re.fullmatch("[0-9]{1,9}(,[0-9]{1,9}){3}", text) is None:
        raise Problem(422, "bad_parameter", f"box: write x,y,width,height in whole pixels, not {text[:80]!r}")
    x, y, width, height = map(int, text.split(","))
    return x, y, width, height


def read_points(text: str | None) -> list[tuple[float, float]] | None:
    if text is None:
        return None
    number = r"[0-9]{1,9}(\.[0-9]{1,9})?"
    if re.fullmatch(f"{number},{number}( {number},{number})*", text) is None:
        raise Problem(422, "bad_parameter", f"points: write x,y for each, a space (+) between two, not {text[:80]!r}")
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in text.split(" "))]


def looks(box: Box | None, points: list[Any] | None, stride: int, pixels: np.ndarray[Any, Any], patch: int) -> int:
    """How many features a look gives; where its box lies outside, at least 1."""
    if points is not None:
        return len(points)
    height, width = (int(side) // patch * patch for side in pixels.shape[:2])
    x, y, wide, high = box or (0, 0, width, height)
    columns = -(-min(x + wide, width) // stride) - x // stride
    rows = -(-min(y + high, height) // stride) - y // stride
    return max(1, columns) * max(1, rows)
