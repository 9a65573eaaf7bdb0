"""The weights that ship: they load, say where they come from, give the stored features, and match their teacher."""

from __future__ import annotations

import csv
import hashlib
import json
import re
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bundled_features import STORED, compute
from safetensors.torch import load_file

import veca
from veca.cli import main
from veca.weights import BUNDLED

ROOT = Path(__file__).parents[1]
FOLDER = BUNDLED / "veca-s14"


def test_the_weights_load_and_state_their_origin(capsys: pytest.CaptureFixture[str]) -> None:
    assert "veca-s14" in veca.bundled_models()
    model = veca.load("veca-s14")
    config = model.config
    assert (config.width, config.depth, config.patch_size, config.bank) == (384, 12, 14, 64)
    assert config.attention == "core"
    assert config.turns
    assert model.card["edition"] == 3
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {tensor.dtype for tensor in load_file(FOLDER / "model.safetensors").values()} == {torch.float16}
    assert (FOLDER / "model.safetensors").stat().st_size < 46e6
    assert "Depth-Anything-V2-Small" in model.card["teacher"]
    assert "COCO train2017" in model.card["data"]
    assert model.card["licence"] == "Apache-2.0"
    lines = (ROOT / "docs/runs/veca-s14/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    last = [record for record in map(json.loads, lines) if record["kind"] == "train"][-1]
    assert model.card["steps"] == last["step"]
    images = int(re.search(r"([\d,]+) images", model.card["data"])[1].replace(",", ""))
    assert model.card["views"] == pytest.approx(images * last["epoch"], rel=1e-4)  # records have five digits
    assert main(["info", "veca-s14"]) == 0
    shown = capsys.readouterr().out
    for words in ("Depth-Anything-V2-Small", "COCO train2017", "Apache-2.0"):
        assert words in shown
        assert words in (FOLDER / "README.md").read_text(encoding="utf-8")


def test_cores_move_and_not_alike_on_two_photographs() -> None:
    model = veca.load("veca-s14")
    torch.manual_seed(0)
    with torch.inference_mode():
        layers = model.forward_layers(torch.rand(2, 3, 224, 224) * torch.tensor([0.3, 3.0]).reshape(2, 1, 1, 1))
    steps = torch.stack(layers.coords).diff(dim=0).norm(dim=-1)  # L−1×B×C, of an image that is 2 wide
    assert float(steps.sum(0).mean()) / 2 > 0.05
    assert float((layers.coords[-1][0] - layers.coords[-1][1]).norm(dim=-1).mean()) > 0.01


def test_they_have_seen_100_000_views() -> None:
    card = veca.load("veca-s14").card
    told = [int(views.replace(",", "")) for views in re.findall(r"([\d,]+) views", card["before"])]
    assert sum(told) == card["views_before"]
    assert card["views"] + card["views_before"] >= 100_000


def test_features_of_two_photographs_are_the_stored_ones() -> None:
    stored, found = load_file(STORED), compute(veca.load("veca-s14"))
    assert stored.keys() == found.keys()
    assert len(stored) == 8
    for name, value in stored.items():
        assert value.std() > 0.1
        torch.testing.assert_close(found[name], value, atol=1e-3, rtol=0)


def claimed_cosines(rows: Path) -> dict[tuple[int, int], float]:
    """The standardised dense cosine by (pixels, cores), from the rows that `make results` writes."""
    with rows.open(encoding="utf-8", newline="") as file:
        return {(int(row["pixels"]), int(row["cores"])): float(row["dense_cosine"]) for row in csv.DictReader(file)}


@pytest.mark.end_to_end
def test_as_close_to_the_teacher_as_the_docs_say(shared: Path, tmp_path: Path) -> None:
    claims = claimed_cosines(ROOT / "docs/numbers/fidelity.csv")
    assert main(["probe", "teacher", "--data", str(shared / "data/photos/photos-006.tar"), "--model", "veca-s14",
                 "--teacher", str(shared / "teacher/dav2-small-encoder"), "--images", "64", "--cores", "8,64",
                 "--size", "196", "--out", str(tmp_path), "--device", "cpu"]) == 0  # fmt: skip
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["cores"] for row in rows] == [8, 64]
    few, many = (row["metrics"]["dense_cosine"]["mean"] for row in rows)
    assert few >= claims[196, 8] - 0.01
    assert many >= claims[196, 64] - 0.01
    assert many > few > rows[0]["metrics"]["constant"]["mean"]


def test_the_wheel_and_the_source_archive_hold_the_same_bytes(wheel: Path, sdist: Path) -> None:
    with zipfile.ZipFile(wheel) as built, tarfile.open(sdist) as source:
        for path in sorted(FOLDER.iterdir()):
            name, digest = path.relative_to(ROOT).as_posix(), hashlib.sha256(path.read_bytes()).digest()
            assert hashlib.sha256(built.read(name)).digest() == digest
            member = source.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/{name}")
            assert member is not None
            assert hashlib.sha256(member.read()).digest() == digest


def test_the_wheel_loads_them_offline(
    empty_environment: Path, run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    script = (
        "import torch, veca\n"
        "model = veca.load('veca-s14')\n"
        "print(veca.__file__)\n"
        "print(model.card['licence'], tuple(model(torch.zeros(1, 3, 28, 42), cores=8).patches.shape))\n"
    )
    where, said = run(empty_environment / "bin/python", "-c", script, cwd=tmp_path).splitlines()
    assert Path(where).is_relative_to(empty_environment)
    assert said == "Apache-2.0 (1, 6, 384)"
