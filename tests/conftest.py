"""What the tests share: where ../shared lies, few threads, and fixed seeds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

SHARED = Path(__file__).resolve().parents[2] / "shared"

torch.set_num_threads(2)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference vectors, teacher and data; where it is absent the test skips, but never in CI."""
    if not (SHARED / "DESIGN.md").is_file():
        if os.environ.get("CI"):
            pytest.fail(f"CI has no {SHARED}")
        pytest.skip(f"needs {SHARED}, which is not in the repository")
    return SHARED


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
