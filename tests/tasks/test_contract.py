"""A stranger's task: the file that docs/add_a_task.md shows, dropped into the folder of tasks, and nothing else."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import veca.tasks
from veca.cli import main
from veca.errors import InputError
from veca.model import create_model
from veca.tasks import find_task, task_names
from veca.tasks.base.contract import Task

PAGE = Path(__file__).parents[2] / "docs" / "add_a_task.md"


@pytest.fixture
def brightness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the file lay in veca/tasks."""
    block = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert block is not None
    folder = tmp_path / "dropped"
    folder.mkdir()
    (folder / "brightness.py").write_text(block[1], encoding="utf-8")
    monkeypatch.setattr(veca.tasks, "__path__", [*veca.tasks.__path__, str(folder)])
    yield
    sys.modules.pop("veca.tasks.brightness", None)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Grey photos from dark to bright."""
    for part, count in (("train", 24), ("test", 8)):
        (tmp_path / "data" / part).mkdir(parents=True)
        for number in range(count):
            draw = np.random.default_rng(number + 100 * count)
            pixels = draw.integers(0, 40, (40, 40, 3)) + round(215 * number / count)
            Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "data" / part / f"{number:02d}.png")
    return tmp_path / "data"


def error(out: Path) -> float:
    return float(json.loads((out / "results.json").read_text())["rows"][0]["metrics"]["error"]["mean"])


def test_a_dropped_file_is_a_task_of_every_command(
    brightness: None, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", "--help"]) == main(["finetune", "--help"]) == 0
    assert capsys.readouterr().out.count("brightness how bright a photo is") == 2
    create_model("veca_tiny", depth=2).save(tmp_path / "tiny")
    common = [
        "--data",
        str(photos),
        "--model",
        str(tmp_path / "tiny"),
        "--cores",
        "4",
        "--size",
        "32",
        "--device",
        "cpu",
    ]
    out = tmp_path / "probe"
    cache = ["--cache", str(tmp_path / "cache")]
    assert main(["probe", "brightness", *common, *cache, "--seeds", "1", "--out", str(out)]) == 0
    assert error(out) < 0.2  # 0.25 for whoever always says one half
    capsys.readouterr()
    head = out / "heads/tiny-32px-4cores"
    assert main(["probe", "predict", str(head), str(photos / "test/07.png"), "--out", str(tmp_path / "seen")]) == 0
    assert json.loads(capsys.readouterr().out)["brightness"] > 0.5

    tuned = tmp_path / "tuned"
    words = ["--epochs", "16", "--batch", "8", "--out", str(tuned)]
    assert main(["finetune", "brightness", *common, *words, "--stop-at", "9"]) == 0
    assert not (tuned / "results.json").exists()
    assert main(["finetune", "brightness", *common, *words]) == 0
    assert "continuing" in capsys.readouterr().out
    assert error(tuned) < 0.2
    assert json.loads((tuned / "head/head.json").read_text())["task"] == "brightness"


def test_the_tasks_that_come_with_the_package() -> None:
    assert {"classify", "depth", "detect", "masks", "segment"} <= {*task_names()}
    for name in task_names():
        task = find_task(name)
        assert issubclass(task, Task)
        assert task.name == name
        assert not task.__abstractmethods__
    with pytest.raises(InputError, match="no task is called 'smell'; there are classify, depth, detect"):
        find_task("smell")
