"""One walker: what is found, in which order, and what is never opened."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from veca.analysis.metrics import find_examples
from veca.caches import cache_folder
from veca.distill import sources
from veca.errors import InputError
from veca.extract.sources import find_entries
from veca.folders import refuse_special, walk
from veca.tasks.base.classes import images_in


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Photos at several depths, hidden ones, links that go round and nowhere."""
    top = tmp_path / "photos"
    for name in ("b/deep/1.png", "a/2.jpg", "3.PNG", ".thumbs/4.png", "a/.5.png", "a/notes.txt"):
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), 7, np.uint8)).save(top / name, "PNG")
    (top / "b" / "up").symlink_to(top)  # round and round
    (top / "a" / "twice").symlink_to(top / "b" / "deep")  # known by its own name already
    (top / "self.png").symlink_to("self.png")
    (top / "other.png").symlink_to(top / "a" / "2.jpg")
    return top


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VECA_CACHE", str(tmp_path / "cache"))


def test_every_room_finds_the_same_images(tree: Path, own_cache: None) -> None:
    expected = ["3.PNG", "a/2.jpg", "b/deep/1.png", "other.png"]
    found = walk(tree)
    assert (found.images, found.special) == (expected, ["self.png"])
    assert set(found.stamps) == {"", "a", "b", "b/deep"}
    features = [path.relative_to(tree).as_posix() for path in (Path(entry.name) for entry in find_entries((tree,)))]
    assert features == sorted([*expected, "self.png"])  # what cannot be opened is listed as unreadable, not forgotten
    training = sources.index_images([str(tree)])
    assert [training.name(number).removeprefix(f"{tree}/") for number in range(len(training))] == features
    assert {path.relative_to(tree).as_posix() for path, _ in find_examples(tree, 9)} == set(expected)
    with pytest.raises(InputError, match=r"self.png: not a regular file"):
        images_in(tree)
    (tree / "self.png").unlink()
    assert {path.relative_to(tree).as_posix() for path in images_in(tree)} == set(expected)


def test_a_pipe_is_never_waited_for(tree: Path, tmp_path: Path, own_cache: None) -> None:
    os.mkfifo(tree / "pipe.jpg")
    with pytest.raises(InputError, match=r"pipe.jpg: not a regular file"):
        refuse_special(tree / "pipe.jpg")
    images = sources.index_images([str(tree)])
    (number,) = (number for number in range(len(images)) if images.name(number).endswith("pipe.jpg"))
    with pytest.raises(InputError, match="not a regular file"):
        images.read(number)
    words = ["features", str(tree), "--model", "veca-s14", "--size", "28", "--workers", "1", "--out", f"{tmp_path}/out"]
    done = subprocess.run([sys.executable, "-m", "veca.cli", *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "4 images done, 2 could not be read" in done.stdout
    assert "not a regular file" in (tmp_path / "out" / "index.jsonl").read_text()


def test_one_cache_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VECA_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder("index") == tmp_path / ".cache/veca/index"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder("index") == tmp_path / "xdg/veca/index"
    monkeypatch.setenv("VECA_CACHE", "~/mine")
    assert cache_folder("probes") == tmp_path / "mine/probes"
