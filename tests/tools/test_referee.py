"""The whole experiment at its quick size, on generated photos: equal starts, complete results, and nothing twice."""

from __future__ import annotations

import csv
import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import referee
import torch
from distill.runs import make_photos, make_teacher
from PIL import Image
from referee_recipe import Referee
from referee_report import MEASURES, markdown

import veca
from veca.distill.student import build_student
from veca.teachers import load_teacher


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command expects below --data, in a few kilobytes, and a teacher."""
    root = tmp_path_factory.mktemp("referee")
    patch = pytest.MonkeyPatch()
    patch.setenv("VECA_CACHE", str(root / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    make_teacher(root / "teacher")
    made = sorted(make_photos(root / "made", 35).iterdir())
    (root / "data/photos").mkdir(parents=True)
    for shard in range(7):
        with tarfile.open(root / f"data/photos/photos-{shard:03d}.tar", "w") as tar:
            for path in made[shard * 5 : shard * 5 + 5]:
                tar.add(path, path.name)
    for part, kinds in (("train", "ab"), ("test", "ab")):
        for number, path in enumerate(made[:8]):
            folder = root / "data/pets" / part / kinds[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder)
    for name, parts, kind in (("voc-seg", ("train", "val"), "masks"), ("nyu-depth", ("train", "test"), "depth")):
        for part in parts:
            for sub in ("images", kind):
                (root / "data" / name / part / sub).mkdir(parents=True)
            for path in made[:3]:
                shutil.copy(path, root / "data" / name / part / "images")
                label = np.zeros((40, 48), np.uint8 if kind == "masks" else np.uint16)
                label[:, 24:] = 1
                values = label if kind == "masks" else label * 2000 + 1000
                Image.fromarray(values).save(root / "data" / name / part / kind / path.name)
    yield root
    torch.set_num_threads(threads)
    patch.undo()


def test_both_arms_of_a_seed_start_from_the_same_weights(root: Path) -> None:
    found = []
    for arm in referee.ARMS:
        torch.manual_seed(1)
        settings = Referee(train=("x",), teacher=str(root / "teacher"), out=root / "never", attention=arm)
        found.append(build_student(settings, load_teacher(root / "teacher"))[0])
    core, dense = found
    assert (core.config.attention, dense.config.attention) == ("core", "dense")
    assert core.state_dict().keys() == dense.state_dict().keys()
    for name, tensor in core.state_dict().items():
        torch.testing.assert_close(tensor, dense.state_dict()[name], atol=0, rtol=0)
    assert Referee(train=("x",), teacher="t", out=root).steps * 32 >= 20_000


@pytest.mark.end_to_end
def test_the_quick_experiment(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "out", tmp_path / "docs/referee.md"
    page.parent.mkdir()
    page.write_text("# Before\n<!-- referee:begin -->\nold\n<!-- referee:end -->\nafter\n")
    words = ["--data", root / "data", "--teacher", root / "teacher", "--out", out, "--page", page, "--quick"]
    words = [str(word) for word in (*words, "--device", "cpu", "--cache", tmp_path / "features")]
    assert referee.main(words) == 0
    assert "run 4 of 4: dense, seed 1, about" in capsys.readouterr().out

    results = json.loads((out / "results.json").read_text())
    for measure in MEASURES:
        if measure != "half_distance":  # features of four steps need not fall with distance
            assert len(results["values"][measure]["core 64"]) == len(results["values"][measure]["dense"]) == 2
    for name in ("core-0", "dense-1"):
        found = [json.loads(line) for line in (out / name / "metrics.jsonl").read_text().splitlines()]
        last = [record for record in found if record["kind"] == "validation"][-1]
        column = "core 64" if name.startswith("core") else "dense"
        assert last["grid"]["32"]["64"]["dense_cosine"] == results["values"]["dense_cosine"][column][int(name[-1])]
    identities = [json.loads((out / name / "settings.json").read_text()) for name in ("core-1", "dense-1")]
    different = {key for key in identities[0] if identities[0][key] != identities[1][key]}
    assert different == {"attention", "out"}
    assert len(list(csv.reader((out / "results.csv").open()))) > 30
    assert Image.open(out / "referee.png").width > 1000
    text = page.read_text()
    assert text.startswith("# Before\n")
    assert "| pets, top-1 (higher is better) |" in text
    assert "these numbers say nothing" in text
    assert "old" not in text
    assert (page.parent / "referee.png").is_file()

    models = sorted(out.glob("*/last/model.safetensors"))
    before = {path: path.stat().st_mtime_ns for path in (*models, *out.glob("probes/*/results.json"))}
    assert len(before) == 4 + 18
    (out / "probes/pets-dense-0/results.json").unlink()  # what is missing is made again, and nothing else
    assert referee.main(words) == 0
    said = capsys.readouterr().out
    assert "== run" not in said
    assert "probe 1 of 1: pets, dense-0" in said
    assert [path for path, stamp in before.items() if path.stat().st_mtime_ns != stamp] == [
        out / "probes/pets-dense-0/results.json"
    ]
    assert referee.main([word for word in words if word != "--quick"]) == 2  # or its numbers would pass for the answer
    assert "holds another experiment" in capsys.readouterr().err
    assert veca.load(out / "dense-0/last").card["recipe"].startswith("referee from fresh")


def test_differences_are_taken_seed_by_seed() -> None:
    values = {measure: {"core 64": [0.5, 0.7], "core 8": [0.4, 0.4], "dense": [0.4, 0.7]} for measure in MEASURES}
    text = markdown({"values": values, "seeds": 2, "command": "x", "quick": False})
    (line,) = (line for line in text.splitlines() if line.startswith("| pets"))
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[2:6] == ["0.6000 ± 0.1414", "0.4000 ± 0.0000", "0.5500 ± 0.2121", "+0.0500 ± 0.0707"]


def test_a_missing_value_does_not_pair_two_seeds() -> None:
    values = {measure: {"core 64": [None, 0.7], "dense": [0.4, None]} for measure in MEASURES}
    text = markdown({"values": values, "seeds": 2, "command": "x", "quick": False})
    (line,) = (line for line in text.splitlines() if line.startswith("| pets"))
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[2:6] == ["0.7000", "–", "0.4000", "–"]


def test_a_folder_without_the_data_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert referee.main(["--data", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "holds no photos/" in capsys.readouterr().err
