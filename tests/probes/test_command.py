"""`veca probe` from the command line, on tiny pictures: tables, heads, predictions and mistakes."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from veca.cli import main
from veca.devices import fast_bfloat16
from veca.errors import InputError
from veca.tasks.base.heads import Head

TINY = "random:veca_tiny"
COLOURS = {"red": (200, 20, 20), "green": (20, 200, 20), "blue": (20, 20, 200)}
Probe = Callable[..., tuple[int, str]]


def noise(path: Path, colour: tuple[int, int, int], seed: int, size: tuple[int, int] = (48, 32)) -> Path:
    """A picture of one colour with a little noise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    grain = np.random.default_rng(seed).integers(0, 40, (size[1], size[0], 3))
    Image.fromarray(np.clip(np.array(colour) + grain, 0, 255).astype(np.uint8)).save(path)
    return path


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformers model in its own format: a DINOv2 of two layers."""
    from transformers import Dinov2Config, Dinov2Model

    folder = tmp_path_factory.mktemp("teacher")
    torch.manual_seed(0)
    config = Dinov2Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, patch_size=14, image_size=28)
    Dinov2Model(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classes")
    for part in ("train", "test"):
        for index, (name, colour) in enumerate(COLOURS.items()):
            for number in range(4):
                noise(folder / part / name / f"{number}.png", colour, number + 10 * index + 100 * (part == "test"))
    return folder


@pytest.fixture(scope="module")
def pixels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Left half one colour and class (or depth), right half another."""
    folder = tmp_path_factory.mktemp("pixels")
    for part in ("train", "val"):
        for number in range(6):
            path = noise(folder / part / "images" / f"{number}.png", (220, 20, 20), number)
            image = Image.open(path).convert("RGB")
            image.paste(Image.new("RGB", (24, 32), (20, 20, 220)), (24, 0))
            image.save(path)
            for kind, values, dtype in (("masks", (0, 1), np.uint8), ("depth", (1000, 4000), np.uint16)):
                label = np.full((32, 48), values[0], dtype)
                label[:, 24:] = values[1]
                (folder / part / kind).mkdir(exist_ok=True)
                Image.fromarray(label).save(folder / part / kind / f"{number}.png")
    return folder


@pytest.fixture
def probe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Probe:
    """Run the command with its own cache; returns (status, printed)."""

    def run(*arguments: object) -> tuple[int, str]:
        words = [str(word) for word in arguments]
        if words[0] not in ("predict",) and "--help" not in words:
            words += ["--cache", str(tmp_path / "cache")]
        status = main(["probe", *words, "--device", "cpu"] if "--help" not in words else ["probe", *words])
        shown = capsys.readouterr()
        return status, shown.out + shown.err

    return run


def test_models_budgets_and_sizes_share_one_table(probe: Probe, classes: Path, teacher: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    status, text = probe(
        *("classify", "--data", classes, "--model", teacher, "--model", TINY, "--cores", "8,16"),
        *("--size", "28,48", "--seeds", 2, "--epochs", 20, "--out", out, "--also", classes / "test"),
    )
    assert status == 0
    assert len([line for line in text.splitlines() if TINY in line]) == 4  # two budgets × two sizes
    results = json.loads((out / "results.json").read_text())
    assert [(row["cores"], row["pixels"]) for row in results["rows"]] == [
        *((None, 28), (None, 42)),  # 48 is 3 patches of 14
        *((8, 32), (16, 32), (8, 48), (16, 48)),
    ]
    assert results["classes"] == ["blue", "green", "red"]
    for row in results["rows"]:
        score = row["metrics"]["top1"]
        assert len(score["values"]) == 2
        assert score["values"] == row["metrics"]["top1 test"]["values"]
        assert score["mean"] == 1.0  # three colours
        assert row["share_of_first"] == 1.0
        assert Head.load(out / row["head"]).weight.shape[0] == 3
    rows = list(csv.DictReader((out / "results.csv").open()))
    assert [row["cores"] for row in rows] == ["", "", "8", "16", "8", "16"]
    for name in ("budget.png", "resolution.png"):
        assert Image.open(out / name).size[0] > 500


def test_a_row_that_is_there_is_not_trained_again(probe: Probe, classes: Path, teacher: Path, tmp_path: Path) -> None:
    out, data = tmp_path / "out", tmp_path / "data"
    shutil.copytree(classes, data)

    def run(*words: object) -> tuple[str, list[float]]:
        common = ("--data", data, "--model", TINY, "--cores", 8, "--size", 32, "--seeds", 1, "--out", out)
        status, text = probe("classify", *common, *words)
        assert status == 0
        return text, [row["metrics"]["top1"]["mean"] for row in json.loads((out / "results.json").read_text())["rows"]]

    said = "trained before"
    text, first = run("--epochs", 2)
    assert said not in text
    head = next((out / "heads").glob("*/head.safetensors"))
    stamp = head.stat().st_mtime_ns
    text, both = run("--epochs", 2, "--model", teacher)  # another model joins it
    assert text.count(said) == 1
    assert both[:1] == first
    assert len(both) == 2
    assert head.stat().st_mtime_ns == stamp
    assert said not in run("--epochs", 3)[0]
    assert run("--epochs", 3)[0].count(said) == 1
    noise(data / "test/red/0.png", COLOURS["blue"], 7)
    assert said not in run("--epochs", 3)[0]
    (out / "results.json").write_text('{"rows": [{}]}')
    assert said not in run("--epochs", 3)[0]
    head.with_name("head.json").unlink()
    assert said not in run("--epochs", 3)[0]


def test_a_saved_head_names_classes_and_scores_other_labels(probe: Probe, classes: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert probe("classify", "--data", classes, "--model", TINY, "--size", 32, "--seeds", 1, "--out", out)[0] == 0
    (head,) = (out / "heads").iterdir()
    photo = noise(tmp_path / "photo.png", (20, 200, 20), 5)
    status, text = probe("predict", head, photo, "--out", tmp_path / "seen")
    assert status == 0
    best = json.loads(text.splitlines()[0])["classes"]
    assert best[0]["class"] == "green"
    assert sum(entry["score"] for entry in best) == pytest.approx(1, abs=1e-3)
    assert json.loads((tmp_path / "seen" / "results.json").read_text())[0]["classes"] == best
    (tmp_path / "other.csv").write_text("path,labels\nphoto.png,red;green\nphoto.png,blue\n")
    status, text = probe("score", head, "--data", tmp_path / "other.csv")
    assert (status, text) == (0, "top1  0.5000\n")


def test_knn(probe: Probe, classes: Path, tmp_path: Path) -> None:
    status, text = probe("knn", "--data", classes, "--model", TINY, "--size", 32, "--out", tmp_path / "out")
    assert status == 0
    row = json.loads((tmp_path / "out" / "results.json").read_text())["rows"][0]
    assert row["metrics"]["top1_k1"]["mean"] == 1.0
    assert "top1_k20" in text


def test_shares_of_the_patches_are_rows_of_one_table(probe: Probe, pixels: Path, teacher: Path, tmp_path: Path) -> None:
    """A model without mixed scale has one row; features of different shares are not taken for each other."""
    out = tmp_path / "out"
    status, text = probe(
        *(
            "segment",
            "--data",
            pixels,
            "--model",
            teacher,
            "--model",
            TINY,
            "--cores",
            "8",
            "--size",
            128,
            "--seeds",
            1,
        ),
        *("--patches", "1,0.5", "--steps", 5, "--out", out),
    )
    assert status == 0, text
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert [(row["cores"], row["patches"]) for row in rows] == [(None, 1.0), (8, 1.0), (8, 0.5)]
    assert text.splitlines()[0].split()[:5] == ["model", "cores", "size", "patches", "mIoU"]
    assert [row["patches"] for row in csv.DictReader((out / "results.csv").open())] == ["1.0", "1.0", "0.5"]
    heads = [Head.load(out / row["head"]) for row in rows]
    assert [head.backbone(None, torch.device("cpu")).patches for head in heads] == [1.0, 1.0, 0.5]
    assert heads[2].about["patches"] == 0.5
    assert not torch.equal(heads[1].weight, heads[2].weight)
    status, text = probe("predict", out / rows[2]["head"], pixels / "val/images/0.png", "--out", tmp_path / "seen")
    assert status == 0, text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--patches", "0"), "patches must lie above 0"),
        (("--patches", "1,2"), "patches must lie above 0"),
        (("--patches", "0.5", "--share", "0.5"), "--patches and --share do not go together"),
        (("--patches", ","), "--patches is a list of shares"),
    ],
)
def test_wrong_shares_are_one_line(
    more: tuple[str, ...], message: str, probe: Probe, classes: Path, tmp_path: Path
) -> None:
    status, text = probe("knn", "--data", classes, "--model", TINY, "--size", 32, "--out", tmp_path / "out", *more)
    assert status == 2
    assert message in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize("augment", [[], ["--augment"]])
def test_segment_and_its_prediction(probe: Probe, pixels: Path, tmp_path: Path, augment: list[str]) -> None:
    out = tmp_path / "out"
    status, text = probe(
        *("segment", "--data", pixels, "--model", TINY, "--cores", "8", "--size", 64, "--seeds", 1, "--out", out),
        *("--steps", 15, *augment),
    )
    assert status == 0, text
    row = json.loads((out / "results.json").read_text())["rows"][0]
    assert row["metrics"]["mIoU"]["mean"] > 0.9
    assert len(row["per_class"]) == 2
    photo = pixels / "val" / "images" / "0.png"
    status, text = probe("predict", out / row["head"], photo, photo, "--out", tmp_path / "seen")
    assert status == 0, text
    mask = Image.open(tmp_path / "seen" / "0.mask.png")
    truth = np.asarray(Image.open(pixels / "val" / "masks" / "0.png"))
    assert (np.asarray(mask) == truth).mean() > 0.9
    assert Image.open(tmp_path / "seen" / "0-2.overlay.png").width == 48
    assert {entry["class"] for entry in json.loads(text.splitlines()[0])["classes"]} == {"0", "1"}


@pytest.mark.parametrize("head", ["bins", "regression"])
def test_depth_and_its_prediction(probe: Probe, pixels: Path, tmp_path: Path, head: str) -> None:
    out = tmp_path / "out"
    status, text = probe(
        *("depth", "--data", pixels, "--model", TINY, "--size", 64, "--seeds", 1, "--steps", 60, "--out", out),
        *("--head", head, "--farthest", 5),
    )
    assert status == 0, text
    row = json.loads((out / "results.json").read_text())["rows"][0]
    assert row["metrics"]["RMSE"]["mean"] < 0.8  # the spread of the labels is 1.5
    photo = pixels / "val" / "images" / "1.png"
    assert probe("predict", out / row["head"], photo, "--out", tmp_path / "seen")[0] == 0
    found = np.asarray(Image.open(tmp_path / "seen" / "1.depth.png")).astype(float)
    assert found.shape == (32, 48)
    assert found[:, 36:].mean() - found[:, :12].mean() > 2000
    assert Image.open(tmp_path / "seen" / "1.depth.colour.png").width > 300


def test_mistakes_are_one_line(probe: Probe, classes: Path, pixels: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    cases = [
        (("classify", "--data", classes, "--model", TINY, "--out", tmp_path / "file"), "is a file, not a folder"),
        (("nothing",), "no probe is called 'nothing'"),
        (("classify", "--data", classes), "give at least one --model"),
        (("classify", "--data", classes, "--model", TINY, "--cores", "80"), "has budgets from 1 to 64"),
        (("classify", "--data", classes, "--model", "random:veca_huge"), "no model is called 'veca_huge'"),
        (("segment", "--data", pixels, "--model", TINY, "--against", "paper"), "--against paper:ade20k"),
        (("knn", "--data", classes, "--model", TINY, "--against", "paper"), "no numbers of knn"),
        (("knn", "--data", classes, "--model", TINY, "--against", "people"), "`paper`"),
        (("segment", "--data", pixels, "--model", TINY, "--classes", "1"), "at least 2"),
        (("predict", tmp_path, classes / "test/red/0.png"), "not a head"),
        (("predict", tmp_path, tmp_path / "none.png"), "none.png: no such file"),
    ]
    for words, message in cases:
        status, text = probe(*words)
        assert status == 2, text
        assert message in text
        assert len(text.strip().splitlines()) == 1


@pytest.mark.parametrize("task", ["classify", "segment"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "random:veca_huge"), "no model is called 'veca_huge'"),
        (("--model", TINY, "--cores", "8,65"), "has budgets from 1 to 64"),  # the first has no budgets to be wrong
    ],
)
def test_a_mistake_in_the_second_model_costs_no_work(
    probe: Probe, classes: Path, pixels: Path, teacher: Path, tmp_path: Path, task: str, words: tuple[str, ...],
    message: str,
) -> None:  # fmt: skip
    data, out = classes if task == "classify" else pixels, tmp_path / "out"
    status, text = probe(task, "--data", data, "--model", teacher, *words, "--size", "32", "--out", out)
    assert (status, message in text) == (2, True), text
    assert not out.exists()
    assert not list((tmp_path / "cache").glob("*"))  # no feature was computed


def test_a_head_refuses_other_weights(probe: Probe, classes: Path, teacher: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert probe("classify", "--data", classes, "--model", teacher, "--size", 28, "--seeds", 1, "--out", out)[0] == 0
    (head,) = (out / "heads").iterdir()
    status, text = probe("predict", head, classes / "test/red/0.png", "--model", TINY, "--out", tmp_path / "seen")
    assert status == 2
    assert "not the weights this head was trained on" in text


def test_bfloat16_has_its_own_features_and_its_head_remembers_it(
    probe: Probe, classes: Path, pixels: Path, teacher: Path, tmp_path: Path
) -> None:
    models = ("--model", TINY, "--model", teacher, "--size", 32, "--seeds", 1)
    counts, digests = [], []
    for dtype in ("auto", "float32", "bfloat16"):
        words = () if dtype == "float32" else ("--dtype", dtype)  # the default is float32, on every machine
        if dtype == "auto" and fast_bfloat16(torch.device("cpu")):
            continue
        assert probe("classify", "--data", classes, *models, *words, "--out", tmp_path / dtype)[0] == 0
        results = json.loads((tmp_path / dtype / "results.json").read_text())
        assert results["settings"]["dtype"] == ("bfloat16" if dtype == "bfloat16" else "float32")
        digests.append([row["weights"] for row in results["rows"]])
        counts.append(len(list((tmp_path / "cache").glob("*.safetensors"))))
    assert counts[-1] == 2 * counts[-2]
    assert counts[0] == counts[-2]
    assert set(digests[-1]).isdisjoint(digests[-2])
    heads = tmp_path / "bfloat16" / "heads"
    for head in heads.iterdir():
        assert json.loads((head / "head.json").read_text())["dtype"] == "bfloat16"
        status, text = probe("predict", head, classes / "test/red/0.png", "--out", tmp_path / "seen")
        assert (status, '"red"' in text) == (0, True), text
        assert probe("score", head, "--data", classes / "test")[0] == 0
    words = ("--data", pixels, *models, "--steps", 5, "--dtype", "bfloat16", "--out", tmp_path / "segment")
    assert probe("segment", *words)[0] == 0
    (head, _) = (tmp_path / "segment" / "heads").iterdir()
    assert probe("predict", head, pixels / "val/images/0.png", "--out", tmp_path / "seen")[0] == 0


@pytest.mark.parametrize("task", ["classify", "knn", "segment", "depth", "predict", "score"])
def test_help_has_an_example(probe: Probe, task: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        probe(task, "--help")
    assert stopped.value.code == 0


def test_heads_round_trip(tmp_path: Path) -> None:
    head = Head("depth", torch.randn(5, 8), torch.randn(5), {"kind": "bins", "trim": None, "size": 64})
    head.about |= {"model": "veca-s14", "weights": "abc", "cores": None}
    head.save(tmp_path / "head")
    again = Head.load(tmp_path / "head")
    assert (again.task, again.about) == (head.task, head.about)
    torch.testing.assert_close((again.weight, again.bias), (head.weight, head.bias), atol=0, rtol=0)
    whole = json.loads((tmp_path / "head/head.json").read_text())
    for damaged in ([], "x", {**whole, "format": 99}, {name: value for name, value in whole.items() if name != "size"}):
        (tmp_path / "head/head.json").write_text(json.dumps(damaged))
        with pytest.raises(InputError, match=r"head\.json: not a"):
            Head.load(tmp_path / "head")


def test_the_papers_numbers_join_the_table(probe: Probe, classes: Path, tmp_path: Path) -> None:
    """Named by the folder or by the flag, at the run's own sizes and budgets."""
    (tmp_path / "Pets").symlink_to(classes)
    words = ("--model", TINY, "--cores", "8", "--size", "64", "--epochs", 2, "--seeds", 1, "--out", tmp_path / "out")
    texts = []
    for data, against in ((tmp_path / "Pets", "paper"), (classes, "paper:pets")):
        status, text = probe("classify", "--data", data, *words, "--against", against)
        assert status == 0, text
        texts.append([line.split() for line in text.splitlines() if line.startswith("paper, ")])
    assert texts[0] == texts[1]
    assert texts[0][0] == ["paper,", "Table", "S13:", "DINOv3-B", "–", "256", "0.9654"]
    assert texts[0][-1] == ["paper,", "Table", "S13:", "VECA-B", "8", "256", "0.9512"]
    assert len(json.loads((tmp_path / "out/results.json").read_text())["paper"]) == 10
