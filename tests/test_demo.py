"""`make demo`'s command: the figure, the arrays behind it, the table, and an honest word about the weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import veca


@pytest.mark.end_to_end
def test_demo(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "veca.cli", "demo", "--out", str(tmp_path), "--size", "112"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    expected = "Weights: veca-s14, trained" if "veca-s14" in veca.bundled_models() else "Weights: random"
    assert expected in done.stdout
    with Image.open(tmp_path / "features.png") as picture:
        assert min(picture.size) > 800
    about = json.loads((tmp_path / "demo.json").read_text())
    arrays = np.load(tmp_path / "features.npz")
    for row in about["photos"]:
        assert row["photo"] in done.stdout
        assert -1 <= row["cosine"] <= 1
        few, many = (arrays[f"{row['photo']}_{cores}"] for cores in (8, 64))
        assert few.shape == many.shape
        assert few.shape[0] * few.shape[1] == row["patches"]
        assert not np.array_equal(few, many)
