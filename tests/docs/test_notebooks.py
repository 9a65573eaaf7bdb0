"""The notebooks run from top to bottom, each in a kernel of its own, with small settings from the environment."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from . import world
from .world import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.end_to_end
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world.photos(tmp_path / "photos", 12)
    world.teacher(tmp_path / "teacher")
    world.converted(12).save(tmp_path / "model")
    settings = {
        "VECA_MODEL": tmp_path / "model",
        "VECA_PHOTOS": tmp_path / "photos",
        "VECA_TEACHER": tmp_path / "teacher",
        "VECA_MINUTES": 0.05,
        "VECA_SIZE": 2 * world.SIDE,
        "VECA_CACHE": tmp_path / "cache",
        "HF_HUB_OFFLINE": 1,
        "OMP_NUM_THREADS": 1,
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    book = nbformat.read(path, as_version=4)
    client = NotebookClient(book, timeout=900, resources={"metadata": {"path": str(tmp_path)}})
    client.create_kernel_manager()
    client.km.kernel_spec.argv[0] = sys.executable  # the environment of the tests, whatever kernel is installed
    client.execute()
    codes = [cell for cell in book.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in codes)
    pictures = [output for cell in codes for output in cell.outputs if "image/png" in output.get("data", {})]
    assert len(pictures) >= 1


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_with_what_it_shows(path: Path) -> None:
    """`python tools/notebooks.py` runs and stores them: a web page shows the pictures, and they stay small."""
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    codes = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in codes] == [*range(1, len(codes) + 1)]
    outputs = [output for cell in codes for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output.output_type == "error" or output.get("name") == "stderr" for output in outputs)
    assert path.stat().st_size < 600_000


def test_there_are_three() -> None:
    assert [path.stem[0] for path in NOTEBOOKS] == ["1", "2", "3"]
