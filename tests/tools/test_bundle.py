"""The card of a run, and the way from a run to weights that `veca.load` knows by name."""

from __future__ import annotations

import json
import shutil
from datetime import date
from pathlib import Path

import pytest
import torch
from bundle import first_cores, thin
from bundle import main as bundle
from distill.runs import make_photos, make_teacher, tiny_settings
from PIL import Image
from safetensors.torch import load_file

import veca
import veca.weights
from veca.cli import main
from veca.distill.engine import train


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of six steps of four images, validated, whose teacher states its licence as the hub does."""
    folder = tmp_path_factory.mktemp("bundle")
    make_teacher(folder / "teacher")
    make_photos(folder / "photos", 22)
    patch = pytest.MonkeyPatch()
    patch.setenv("VECA_CACHE", str(folder / "cache"))
    (folder / "teacher/README.md").write_text("---\ntags:\n- vision\nlicense: apache-2.0\n---\n# A teacher\n")
    settings = tiny_settings(folder, folder / "run", steps=6, teacher=str(folder / "teacher"),
                             val=(str(folder / "photos"),), val_every=3, val_images=4)  # fmt: skip
    out = train(settings)
    patch.undo()
    return out


def test_a_run_fills_the_card(run_folder: Path) -> None:
    card = veca.load(run_folder / "last").card
    identity = json.loads((run_folder / "settings.json").read_text())
    assert card["teacher"] == "teacher (dinov2, 2 layers of 32, patch 7)"
    assert card["teacher_weights"] == identity["teacher weights"]
    assert card["data"] == "22 images (photos)"
    assert card["recipe"].startswith("convert from teacher, 28²/35² crops, budgets 2 to 8, rate 0.0002 → 5e-06")
    assert (card["steps"], card["views"]) == (6, 24)
    assert card["date"] == date.today().isoformat()
    assert card["licence"] == card["teacher_licence"] == "apache-2.0"
    best = veca.load(run_folder / "best").card  # of the step that was best, not of the last
    assert best["views"] == 4 * best["steps"]


def test_from_a_run_to_bundled_weights(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--teacher", "A Famous Encoder (Apache-2.0)", "--data", "photographs of squares", "--licence", "MIT"]
    for _ in range(2):  # again takes the place of the first
        status = bundle([str(run_folder / "last"), "veca-mini", *words,
                       "--bundled", str(tmp_path / "bundled"), "--records", str(tmp_path / "runs")])  # fmt: skip
        assert status == 0
    assert "in float16" in capsys.readouterr().out

    folder = tmp_path / "bundled/veca-mini"
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.float16}
    assert "license: mit" in (folder / "README.md").read_text()
    assert "A Famous Encoder" in (folder / "README.md").read_text()

    monkeypatch.setattr(veca.weights, "BUNDLED", tmp_path / "bundled")
    assert veca.bundled_models() == ["veca-mini"]
    model, original = veca.load("veca-mini"), veca.load(run_folder / "last")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    images = torch.randn(2, 3, 28, 35)
    half = veca.load(run_folder / "last", dtype=torch.float16).float()
    torch.testing.assert_close(model(images, cores=4).patches, half(images, cores=4).patches, atol=0, rtol=0)
    torch.testing.assert_close(model(images).patches, original(images).patches, atol=0.05, rtol=0.05)
    assert main(["info", "veca-mini"]) == 0
    shown = capsys.readouterr().out
    for part in ("A Famous Encoder (Apache-2.0); teacher (dinov2", "photographs of squares; 22 images", "MIT", "24"):
        assert part in shown

    records = tmp_path / "runs/veca-mini"
    assert json.loads((records / "settings.json").read_text())["steps"] == 6
    kinds = [json.loads(line)["kind"] for line in (records / "metrics.jsonl").read_text().splitlines()]
    assert kinds.count("validation") == 2
    assert Image.open(records / "curves.png").width > 800


def test_a_smaller_bank_gives_the_same_budgets(run_folder: Path) -> None:
    model = veca.load(run_folder / "last").eval()
    kept = first_cores(model, 3).eval()
    images = torch.randn(1, 3, 28, 28)
    with torch.inference_mode():
        torch.testing.assert_close(kept(images).patches, model(images, cores=3).patches)
    assert kept.config.bank == 3


def test_records_are_thinned_evenly_and_keep_every_validation() -> None:
    records = [{"kind": "train", "step": step, "loss": step / 7} for step in range(1, 1001)]
    records[500:500] = [{"kind": "validation", "step": 500, "grid": {"196": {"8": {"loss": 1 / 3}}}}]
    kept = thin(records, keep=100)
    train_steps = [record["step"] for record in kept if record["kind"] == "train"]
    assert train_steps == list(range(10, 1001, 10))
    assert kept[50] == {"kind": "validation", "step": 500, "grid": {"196": {"8": {"loss": 0.33333}}}}


def test_mistakes(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--bundled", str(tmp_path / "b"), "--records", str(tmp_path / "r")]
    assert bundle([str(tmp_path), "veca-x", *where]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err
    assert bundle([str(run_folder), "Veca/X", *where]) == 2
    assert "is no name for bundled weights" in capsys.readouterr().err
    nameless = tmp_path / "run/best"
    shutil.copytree(run_folder, tmp_path / "run")
    model = veca.load(nameless)
    del model.card["licence"]
    model.save(nameless)
    assert bundle([str(nameless), "veca-x", *where]) == 2
    assert "would not say licence: give --licence" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
