"""torch.hub from a clone, in an environment that has only the runtime dependencies."""

from __future__ import annotations

import runpy
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import veca

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `git clone` would give, as far as torch.hub looks at it."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copy(ROOT / "hubconf.py", folder)
    shutil.copytree(ROOT / "veca", folder / "veca", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_entries_are_the_sizes_and_the_bundled_weights() -> None:
    entry = torch.hub.load(str(ROOT), "veca_tiny", source="local", depth=2)
    assert entry.config == veca.create_model("veca_tiny", depth=2).config
    known = runpy.run_path(str(ROOT / "hubconf.py"))
    for name in (*veca.list_models(), *veca.bundled_models()):
        assert callable(known[name.replace("-", "_")])
    with pytest.raises(RuntimeError, match="veca_giant"):
        torch.hub.load(str(ROOT), "veca_giant", source="local")


def test_bundled_weights_and_model_folders(tmp_path: Path) -> None:
    model = veca.create_model("veca_tiny", depth=2).eval()
    model.save(tmp_path / "mine")
    images = torch.randn(1, 3, 32, 48)
    again = torch.hub.load(str(ROOT), "load", str(tmp_path / "mine"), source="local", cores=8)
    torch.testing.assert_close(again(images).patches, model(images, cores=8).patches)
    for name in veca.bundled_models():
        entry = torch.hub.load(str(ROOT), name.replace("-", "_"), source="local")
        assert entry.config == veca.load(name).config


def test_a_clean_environment(clone: Path, empty_environment: Path, run: Callable[..., str], tmp_path: Path) -> None:
    script = (
        "import torch\n"
        f"model = torch.hub.load({str(clone)!r}, 'veca_tiny', source='local').eval()\n"
        "import veca; print(veca.__file__)\n"
        "print(tuple(model(torch.zeros(1, 3, 64, 32), cores=8).patches.shape))\n"
    )
    where, shape = run(empty_environment / "bin/python", "-c", script, cwd=tmp_path).splitlines()
    assert Path(where).is_relative_to(clone)  # not the installed wheel
    assert shape == "(1, 8, 192)"
