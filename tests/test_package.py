"""The wheel: built here, installed into an empty environment with only the runtime dependencies, and used."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command: object, cwd: Path | None = None) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=280, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
    (built,) = folder.glob("veca-*.whl")
    return built


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"veca", next(top for top in tops if top.endswith(".dist-info"))}
    for source in (ROOT / "veca").rglob("*.py"):
        assert source.relative_to(ROOT).as_posix() in names
    assert "veca/py.typed" in names


def test_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env/bin/python"
    run(python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel)
    installed = run(python, "-m", "pip", "list", "--format=freeze").lower()
    assert "transformers" not in installed
    assert "matplotlib" not in installed
    assert "torchvision" not in installed
    script = (
        "import numpy, veca\n"
        "model = veca.create_model('veca_tiny').eval(); model.save('model')\n"
        "photo = numpy.arange(96 * 80 * 3, dtype=numpy.uint8).reshape(96, 80, 3)\n"
        "print(veca.load('model')(veca.preprocess(photo, size=64), cores=8).grid)\n"
        "from PIL import Image; Image.fromarray(photo).save('photo.png')\n"
    )
    assert run(python, "-c", script, cwd=tmp_path) == "(5, 4)\n"
    run(tmp_path / "env/bin/veca", "features", "photo.png", "--out", "f", "--model", "model", "--size", 64, cwd=tmp_path)
    assert len(list((tmp_path / "f").rglob("*.npz"))) == 1
    assert "5,506,145" in run(tmp_path / "env/bin/veca", "info", "model", cwd=tmp_path)
