"""`veca explore` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from veca.analysis.photos import Photo
from veca.backbones import Backbone, load_backbone
from veca.cli import main
from veca.teachers import Teacher


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, backbone: Backbone) -> str:
    folder = tmp_path_factory.mktemp("models") / "small"
    backbone.veca.save(folder)
    return str(folder)


@pytest.fixture
def picture(tmp_path: Path, photo: Photo) -> str:
    photo.image.save(tmp_path / "shapes.png")
    return str(tmp_path / "shapes.png")


@pytest.mark.parametrize("figure", ["features", "similarity", "cores", "positions", "budgets", "layers"])
def test_each_figure_is_one_command(figure: str, picture: str, model: str, tmp_path: Path) -> None:
    options = ["--size", "64", "--sizes", "32", "64", "--budgets", "4", "16", "--at", "70,20", "--method", "pca"]
    assert main(["explore", picture, "--figure", figure, "--out", str(tmp_path), "--model", model, *options]) == 0
    assert (tmp_path / f"{figure}.png").stat().st_size > 5000
    with np.load(tmp_path / f"{figure}.npz") as arrays:
        assert arrays.files


def test_the_page_is_the_default(
    picture: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or True)
    monkeypatch.setenv("DISPLAY", ":0")
    arguments = ["explore", picture, "--model", model, "--out", str(tmp_path / "out"), "--size", "64"]
    assert main(arguments) == 0
    page = tmp_path / "out" / "shapes.html"
    assert opened == [page.resolve().as_uri()]
    assert str(page) in capsys.readouterr().out
    opened.clear()
    assert main([*arguments, "--no-open"]) == 0
    monkeypatch.delenv("DISPLAY")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    assert main(arguments) == 0  # no screen: no text browser takes over the terminal
    assert opened == []


def test_metrics_are_written_as_json(
    picture: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["explore", "--metrics", str(Path(picture).parent), "--model", model, "--out", str(tmp_path / "o")]
    assert main([*arguments, "--size", "64", "--limit", "2"]) == 0
    (result,) = json.loads((tmp_path / "o" / "metrics.json").read_text())
    assert result["model"] == "small"
    assert "effective rank" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give at least one photo"),
        (["PHOTO", "--metrics", "."], "takes its photos from DATA"),
        (["PHOTO", "--at", "12"], "--at takes x,y in pixels"),
        (["PHOTO", "--figure", "similarity", "--at", "900,1"], "outside the photo, which is 96×64"),
        (["PHOTO", "--figure", "similarity", "--size", "3"], "at least one patch"),
        (["PHOTO", "PHOTO", "PHOTO"], "the page shows one photo"),
        (["PHOTO", "--size", "2000"], "use a smaller size"),
        (["PHOTO", "--out", "PHOTO"], "is a file, not a folder"),
        (["missing.png"], "no such file"),
        (["PHOTO", "--limit", "0"], "--limit must be at least 1"),
        (["PHOTO", "--figure", "features", "--cores", "99"], "from 1 to 16"),
    ],
)
def test_mistakes_get_one_line(
    arguments: list[str], words: str, picture: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [picture if argument == "PHOTO" else argument for argument in arguments]
    assert main(["explore", *arguments, "--model", model, "--no-open"]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_a_transformers_folder_is_a_model_too(shared: Path, photo: Photo) -> None:
    from veca.analysis.figures import similarity_figure

    teacher = load_backbone(str(shared / "teacher" / "dav2-small-encoder"))
    assert isinstance(teacher.model, Teacher)
    picture = similarity_figure([photo], [teacher], [(70, 20)], size=56)
    assert picture.arrays["cosine_0_0"].shape == (1, 4, 6)
    assert picture.arrays["cosine_0_0"][0, 1, 4] == pytest.approx(1)
