from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distill.runs import make_photos, make_teacher


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Indices of test folders must not land in the user's cache."""
    patch = pytest.MonkeyPatch()
    patch.setenv("VECA_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> object:
    """Runs in this process and in others are compared bit by bit, and sums depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny `teacher` and 22 `photos`."""
    root = tmp_path_factory.mktemp("distill")
    make_teacher(root / "teacher")
    make_photos(root / "photos", 22)
    return root
