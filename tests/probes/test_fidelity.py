"""`veca probe teacher` against plain arithmetic, and the untrained start that `veca import` makes of a teacher."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from distill.runs import make_photos, make_teacher, tiny_settings
from PIL import Image

import veca
from veca.augment import centre
from veca.backbones import load_backbone
from veca.cli import main
from veca.distill.student import build_student
from veca.images import open_image, to_tensor
from veca.teachers import load_teacher


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `teacher`, 10 `photos`, the converted `start` and an exact dense `twin` of the teacher."""
    root = tmp_path_factory.mktemp("fidelity")
    patch = pytest.MonkeyPatch()
    patch.setenv("VECA_CACHE", str(root / "cache"))  # indices of test folders must not land in the user's
    make_teacher(root / "teacher")
    make_photos(root / "photos", 10)
    assert main(["import", str(root / "teacher"), str(root / "start")]) == 0
    arguments = ["--attention", "dense", "--rope-zero-fraction", "1"]
    assert main(["import", str(root / "teacher"), str(root / "twin"), *arguments]) == 0
    yield root
    patch.undo()


def test_a_converted_model_is_the_start_of_a_run(root: Path) -> None:
    torch.manual_seed(0)
    expected, _ = build_student(tiny_settings(root, root / "run"), load_teacher(root / "teacher"))
    found = veca.load(root / "start")
    assert found.card["origin"] == "teacher, converted and not trained"
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor, atol=0, rtol=0)
    assert veca.load(root / "twin").config.attention == "dense"


def test_cosines_agree_with_plain_arithmetic(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    status = main(["probe", "teacher", "--data", str(root / "photos"), "--teacher", str(root / "teacher"),
                   "--model", str(root / "start"), "--model", str(root / "twin"), "--cores", "2,64", "--size", "28,40",
                   "--images", "5", "--out", str(out), "--device", "cpu"])  # fmt: skip
    assert status == 0
    text = capsys.readouterr().out
    assert "of first" not in text
    assert "±" not in text
    results = json.loads((out / "results.json").read_text())
    assert [(row["model"], row["cores"], row["pixels"]) for row in results["rows"]] == [
        *(("start", cores, side) for side in (28, 42) for cores in (2, 64)),
        *(("twin", None, side) for side in (28, 42)),
    ]
    assert len(list(csv.DictReader((out / "results.csv").open()))) == 6
    assert Image.open(out / "fidelity.png").width > 1000

    row = results["rows"][2]
    paths = sorted((root / "photos").iterdir())[::2]
    images = torch.stack([to_tensor(centre(open_image(path), 42)) for path in paths])
    with torch.inference_mode():
        teacher = load_backbone(str(root / "teacher"))
        theirs = teacher.model(images, grid=2 * (42 // teacher.patch_size,))
        ours = load_backbone(str(root / "start")).model(images, 2)
    for kind, own, other in zip(("global", "dense"), ours[:2], theirs[:2], strict=True):
        cosine = torch.nn.functional.cosine_similarity(own, other, dim=-1).mean()
        assert row["metrics"][f"raw_{kind}_cosine"]["mean"] == pytest.approx(float(cosine), abs=1e-5)
        mean = other.flatten(0, -2).mean(0)
        deviation = other.flatten(0, -2).std(0, correction=0)
        own, other = (own - mean) / deviation, (other - mean) / deviation
        cosine = torch.nn.functional.cosine_similarity(own, other, dim=-1).mean()
        assert row["metrics"][f"{kind}_cosine"]["mean"] == pytest.approx(float(cosine), abs=1e-4)
    for row in results["rows"]:
        assert row["metrics"]["dense_cosine"]["mean"] < 1
        assert 0 < row["metrics"]["constant"]["mean"] < 1


def test_bfloat16_is_near_float32(root: Path, tmp_path: Path) -> None:
    found = {}
    for dtype in ("float32", "bfloat16"):
        words = ["--data", str(root / "photos"), "--teacher", str(root / "teacher"), "--model", str(root / "start")]
        more = ["--cores", "8", "--size", "28", "--images", "3", "--out", str(tmp_path / dtype), "--dtype", dtype]
        assert main(["probe", "teacher", *words, *more, "--device", "cpu"]) == 0
        (row,) = json.loads((tmp_path / dtype / "results.json").read_text())["rows"]
        found[dtype] = row["metrics"]["dense_cosine"]["mean"]
    assert found["bfloat16"] != found["float32"]
    assert found["bfloat16"] == pytest.approx(found["float32"], abs=0.01)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "random:veca_tiny"], "not a VECA whose features are as wide as the teacher's (32)"),
        ([], "give at least one --model"),
        (["--model", "START", "--cores", "65"], "has budgets from 1 to 64"),
        (["--model", "START", "--images", "0"], "--images and --size must be at least 1"),
    ],
)
def test_mistakes_are_one_line(
    flags: list[str], message: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [str(root / "start") if flag == "START" else flag for flag in flags]
    assert main(["probe", "teacher", "--data", str(root / "photos"), "--teacher", str(root / "teacher"), *flags,
                 "--out", str(tmp_path / "out")]) == 2  # fmt: skip
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
