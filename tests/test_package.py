"""The wheel: built here, installed into an empty environment with only the runtime dependencies, and used."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"veca", next(top for top in tops if top.endswith(".dist-info"))}
    for source in (ROOT / "veca").rglob("*.py"):
        assert source.relative_to(ROOT).as_posix() in names
    assert "veca/py.typed" in names
    assert {f"veca/paper_tables/{path.name}" for path in (ROOT / "veca/paper_tables").iterdir()} < {*names}


def test_wheel_works_in_an_empty_environment(empty_environment: Path, run: Callable[..., str], tmp_path: Path) -> None:
    python = empty_environment / "bin/python"
    installed = run(sys.executable, "-m", "pip", "--python", python, "list", "--format=freeze").lower()
    assert "torch==" in installed
    assert "transformers" not in installed
    assert "matplotlib" not in installed
    assert "torchvision" not in installed
    script = (
        "import numpy, veca\n"
        "model = veca.create_model('veca_tiny').eval(); model.save('model')\n"
        "photo = numpy.arange(96 * 80 * 3, dtype=numpy.uint8).reshape(96, 80, 3)\n"
        "print(veca.load('model')(veca.preprocess(photo, size=64, patch_size=16), cores=8).grid)\n"
        "from PIL import Image; Image.fromarray(photo).save('photo.png')\n"
    )
    assert run(python, "-c", script, cwd=tmp_path) == "(5, 4)\n"
    command = empty_environment / "bin/veca"
    run(command, "features", "photo.png", "--out", "f", "--model", "model", "--size", 64, cwd=tmp_path)
    assert len(list((tmp_path / "f").rglob("*.npz"))) == 1
    assert "5,506,145" in run(command, "info", "model", cwd=tmp_path)
    paper = "import veca.paper; print(veca.paper.paper_rows('classify', 'food101')[-1].values)"
    assert run(python, "-c", paper, cwd=tmp_path) == "{'top1': 0.9004}\n"
    for arguments in (("probe", "knn"), ("finetune", "classify")):
        done = subprocess.run([command, *arguments, "--data", "photos", "--model", "model", "--out", "o"],
                              cwd=tmp_path, capture_output=True, text=True)  # fmt: skip
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert "torchmetrics is needed for this: pip install 'veca[probe]'" in done.stderr
