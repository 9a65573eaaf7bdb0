"""`veca finetune` by its command: it learns, it resumes to the same weights, and what it leaves can be used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import veca
from veca.auto import Calibration, Line
from veca.cli import main
from veca.finetune.engine import batches, build_optimiser, is_better, layer_of, score_budgets, training_budgets
from veca.integrations.transformers import from_probe
from veca.tasks.base.classes import read_classes
from veca.tasks.base.heads import Head
from veca.tasks.classify import Classify as Classes
from veca.tasks.classify import ClassifyFineTune as Classify


def finetune(task: str, data: Path, model: object, out: Path, *more: object) -> dict[str, object]:
    """The results of a run with settings fit for tiny models."""
    common = ("--data", data, "--model", model, "--out", out, "--size", 32, "--device", "cpu")
    assert main(["finetune", task, *map(str, common), *map(str, more)]) == 0
    results: dict[str, object] = (
        json.loads((out / "results.json").read_text()) if (out / "results.json").exists() else {}
    )
    return results


def calibrated(start: Path, folder: Path) -> Path:
    model = veca.load(start)
    model.calibration = Calibration((Line(32, 8, 1.0, 1.0, 0.0),), 10)
    model.save(folder / "calibrated")
    return folder / "calibrated"


def value(results: dict[str, object], metric: str, cores: int = 8) -> float:
    row = next(row for row in results["rows"] if row["cores"] == cores)  # type: ignore[attr-defined]
    return float(row["metrics"][metric]["mean"])


def test_classify_learns_and_leaves_a_model_and_a_head(
    classes: Path, start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    start = calibrated(start, tmp_path)
    rates = ("--lr", 1e-3, "--head-lr", 1e-2)
    results = finetune("classify", classes, start, out, "--epochs", 8, "--batch", 8, *rates, "--score-cores", "2,8")
    assert value(results, "top1") >= 0.9  # a third by chance
    assert {row["cores"] for row in results["rows"]} == {2, 8}  # type: ignore[attr-defined]
    said = capsys.readouterr().out
    assert "best on val/" in said
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    scores = [record["top1"] for record in records if record["kind"] == "validation"]
    assert len(scores) == 8
    assert max(scores) > scores[0]
    assert results["command"].startswith("veca finetune classify --data")  # type: ignore[attr-defined]

    model = veca.load(out / "model")
    assert model.calibration is None  # it was of other weights
    assert model.card["finetuned"]["task"] == "classify"
    before = veca.load(start)
    assert not torch.equal(model.blocks[0].fc1.weight, before.blocks[0].fc1.weight)

    photo = next((classes / "test" / "blue").iterdir())
    assert main(["probe", "predict", str(out / "head"), str(photo), "--out", str(tmp_path / "seen")]) == 0
    answer = json.loads((tmp_path / "seen/results.json").read_text())[0]
    assert answer["classes"][0]["class"] == "blue"
    wrapped, processor = from_probe(out / "head")
    logits = wrapped(**processor(str(photo), return_tensors="pt")).logits
    assert wrapped.config.id2label[int(logits.argmax())] == "blue"
    assert float(logits.detach().softmax(-1).max()) == pytest.approx(answer["classes"][0]["score"], abs=1e-3)


def test_head_only_leaves_the_backbone_alone(classes: Path, start: Path, tmp_path: Path) -> None:
    options = ("--head-only", "--cores", 4, "--epochs", 6, "--batch", 8, "--head-lr", 1e-2)
    start = calibrated(start, tmp_path)
    results = finetune("classify", classes, start, tmp_path / "run", *options)
    assert veca.load(tmp_path / "run/model").calibration is not None
    assert value(results, "top1", cores=4) > 0.5
    ours, theirs = (veca.load(path).state_dict() for path in (start, tmp_path / "run/model"))
    torch.testing.assert_close(ours, theirs, atol=0, rtol=0)


@pytest.mark.parametrize("task", ["classify", "segment"])
def test_a_stopped_run_ends_as_an_uninterrupted_one(
    task: str, classes: Path, pairs: Path, start: Path, tmp_path: Path
) -> None:
    data = classes if task == "classify" else pairs
    options = ("--epochs", 2, "--batch", 8, "--lr", 1e-3)
    finetune(task, data, start, tmp_path / "whole", *options)
    assert finetune(task, data, start, tmp_path / "parts", *options, "--stop-at", 3) == {}
    finetune(task, data, start, tmp_path / "parts", *options, "--stop-at", 6)
    finetune(task, data, start, tmp_path / "parts", *options)
    whole, parts = (veca.load(tmp_path / name / "model").state_dict() for name in ("whole", "parts"))
    torch.testing.assert_close(parts, whole, atol=0, rtol=0)
    heads = [Head.load(tmp_path / name / "head") for name in ("whole", "parts")]
    torch.testing.assert_close(heads[0].weight, heads[1].weight, atol=0, rtol=0)
    steps = [
        [json.loads(line)["step"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "parts")
    ]
    assert steps[0] == steps[1]


def test_segment_learns(pairs: Path, start: Path, tmp_path: Path) -> None:
    options = ("--epochs", 12, "--lr", 1e-3, "--head-lr", 1e-2)
    results = finetune("segment", pairs, start, tmp_path / "run", *options)
    assert value(results, "mIoU") > 0.6
    assert results["classes"] == ["0", "1", "2"]
    photo = pairs / "test" / "images" / "0.png"
    assert main(["probe", "predict", str(tmp_path / "run/head"), str(photo), "--out", str(tmp_path / "seen")]) == 0
    assert (tmp_path / "seen/0.mask.png").is_file()


def test_depth_learns(pairs: Path, start: Path, tmp_path: Path) -> None:
    options = ("--epochs", 20, "--lr", 1e-3, "--head-lr", 1e-2, "--cores", 8)
    results = finetune("depth", pairs, start, tmp_path / "run", *options)
    assert value(results, "RMSE") < 1.1  # the best constant is 1.44 m off
    model, processor = from_probe(tmp_path / "run/head")
    photo = pairs / "test" / "images" / "0.png"
    guess = model(**processor(str(photo), return_tensors="pt")).predicted_depth
    assert 0.5 < float(guess.detach().min()) < float(guess.detach().max()) < 6


def test_starting_from_the_head_of_a_probe(classes: Path, start: Path, tmp_path: Path) -> None:
    options = ("--head-only", "--cores", 8, "--epochs", 4, "--batch", 8, "--head-lr", 1e-2)
    first = finetune("classify", classes, start, tmp_path / "first", *options)
    shutil.copytree(tmp_path / "first/head", tmp_path / "head")
    again = ("--start-head", tmp_path / "head", "--cores", 8, "--epochs", 1, "--lr", 1e-5, "--head-lr", 1e-5)
    second = finetune("classify", classes, start, tmp_path / "second", *again)
    assert value(second, "top1") == pytest.approx(value(first, "top1"), abs=0.1)
    start_at, end_at = (Head.load(tmp_path / name) for name in ("head", "second/head"))
    assert 0 < (start_at.weight - end_at.weight).abs().max() < 1e-3


def test_mistakes_are_one_line(classes: Path, pairs: Path, start: Path, tmp_path: Path) -> None:
    def fails(*words: object) -> int:
        return main(["finetune", *map(str, words)])

    common = ("--data", classes, "--model", start, "--size", 32)
    assert fails() == 2
    assert fails("detect") == 2
    assert fails("classify", *common, "--cores", 9, "--out", tmp_path / "a") == 2
    assert fails("classify", *common, "--epochs", 0, "--out", tmp_path / "a") == 2
    assert fails("classify", *common, "--layer-decay", 2, "--out", tmp_path / "a") == 2
    assert fails("segment", *common, "--out", tmp_path / "a") == 2
    assert fails("classify", *common, "--lr", 1e30, "--head-lr", 1e30, "--clip", 0, "--out", tmp_path / "b") == 2
    quick = ("--epochs", 1, "--batch", 16, "--out", tmp_path / "run")
    assert fails("classify", *common, *quick, "--stop-at", 1) == 0
    assert fails("classify", *common, *quick, "--lr", 2e-4) == 2  # another rate is another run
    finetune("depth", pairs, start, tmp_path / "depth", "--epochs", 1)
    assert fails("classify", *common, "--start-head", tmp_path / "depth/head", "--out", tmp_path / "c") == 2


def settings(**more: object) -> Classify:
    return Classify(data=Path("x"), model="y", **more)  # type: ignore[arg-type]


def test_rates_fall_from_layer_to_layer() -> None:
    model = veca.create_model("veca_tiny", depth=3, positions="table", out_width=8)
    head = torch.nn.Linear(8, 2)
    chosen = settings(lr=1e-4, head_lr=1e-3, layer_decay=0.5, weight_decay=0.1)
    groups = build_optimiser(model, head, chosen).param_groups
    rate = {id(one): (group["rate"], group["weight_decay"]) for group in groups for one in group["params"]}
    found = {name: rate[id(one)] for name, one in (*model.named_parameters(), *head.named_parameters("head"))}
    assert found["head.weight"] == (1e-3, 0.1)
    assert found["project.weight"] == (1e-4, 0.1)
    assert found["norm.weight"] == (1e-4, 0.0)
    assert found["blocks.2.fc1.weight"] == (0.5e-4, 0.1)
    assert found["blocks.0.attn.q_proj.weight"] == (0.125e-4, 0.1)
    assert found["blocks.0.fc2.bias"] == (0.125e-4, 0.0)
    assert found["patch_embed.proj.weight"] == (0.0625e-4, 0.1)
    assert found["bank.tokens"] == found["table"] == (0.0625e-4, 0.0)
    assert [layer_of(f"blocks.{index}.fc1.weight", 3) for index in range(3)] == [1, 2, 3]


def test_budgets() -> None:
    assert training_budgets(settings(), 64) == ([8, 16, 24, 32, 40, 48, 56, 64], [1, 1, 2, 2, 3, 3, 4, 4])
    assert training_budgets(settings(), 20) == ([8, 16], [1, 1])
    assert training_budgets(settings(), 4) == ([4], [1])
    assert training_budgets(settings(cores=(3, 5)), 8) == ([3, 5], [1, 1])
    assert score_budgets(settings(), [8, 16, 64], 64) == [64, 8]
    assert score_budgets(settings(score_cores=(1, 2)), [8], 8) == [2, 1]
    with pytest.raises(ValueError, match="--score-cores 9"):
        score_budgets(settings(score_cores=(9,)), [8], 8)


def test_every_image_once_an_epoch_whatever_the_start(classes: Path) -> None:
    task = Classes(read_classes(classes))
    seen: list[int] = []

    class Spy(Classes):
        def load(self, number: int, side: int, draw: object) -> tuple[torch.Tensor, torch.Tensor]:
            seen.append(number)
            return torch.zeros(3, 8, 8), torch.tensor(number)

    spy = Spy(task.data)
    chosen = settings(batch=12, workers=1)
    numbers = [label for _, labels in batches(spy, chosen, 32, 0, 8) for label in labels]
    assert sorted(map(int, numbers[:48])) == list(range(48))
    assert list(map(int, numbers[:48])) != list(map(int, numbers[48:]))
    later = [label for _, labels in batches(spy, chosen, 32, 3, 8) for label in labels]
    assert list(map(int, later)) == list(map(int, numbers[36:]))


def test_is_better() -> None:
    assert is_better(0.5, None, "higher")
    assert is_better(0.5, 0.4, "higher")
    assert not is_better(0.5, 0.4, "lower")
    assert is_better(0.3, float("nan"), "lower")
    assert not is_better(float("nan"), None, "lower")
