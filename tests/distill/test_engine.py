"""Runs of a few steps: options that must not change the result, starting points, and what a run leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import DINOv3ViTConfig, DINOv3ViTModel

import veca
from distill.runs import tiny_settings
from veca.auto import Calibration, Line
from veca.backbones import load_backbone
from veca.distill.engine import train
from veca.distill.settings import Distillation
from veca.errors import InputError
from veca.recipes import RECIPES


def tensors(out: Path, folder: str = "last") -> dict[str, torch.Tensor]:
    return load_file(out / folder / "model.safetensors")


def metrics(out: Path, kind: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == kind]


def test_activation_checkpointing_and_teacher_micro_batches_change_nothing(root: Path, tmp_path: Path) -> None:
    plain = tiny_settings(root, tmp_path / "plain", steps=6, forcing=0.5, lr=1e-4)
    other = tiny_settings(root, tmp_path / "other", steps=6, forcing=0.5, lr=1e-4, teacher_batch=1,
                          activation_checkpointing=True)  # fmt: skip
    train(plain)
    train(other)
    for name, tensor in tensors(plain.out).items():
        torch.testing.assert_close(tensor, tensors(other.out)[name], atol=1e-5, rtol=1e-5)


def test_bfloat16_autocast_trains(root: Path, tmp_path: Path) -> None:
    train(tiny_settings(root, tmp_path / "run", steps=3, autocast="on"))
    losses = [record["loss"] for record in metrics(tmp_path / "run", "train")]
    assert torch.tensor(losses).isfinite().all()
    assert all(tensor.dtype == torch.float32 for tensor in tensors(tmp_path / "run").values())


def test_a_run_knows_its_teacher_by_the_digest_of_every_table(root: Path, tmp_path: Path) -> None:
    settings = tiny_settings(root, tmp_path / "run", steps=1)
    train(settings)
    digest = load_backbone(settings.teacher).digest
    assert json.loads((settings.out / "settings.json").read_text())["teacher weights"] == digest
    assert veca.load(settings.out / "last").card["teacher_weights"] == digest


@pytest.fixture(scope="module")
def dinov3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights from DINOv3's config, with registers, 48 wide."""
    torch.manual_seed(2)
    folder = tmp_path_factory.mktemp("dinov3")
    config = DINOv3ViTConfig(hidden_size=48, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
                             num_register_tokens=4)  # fmt: skip
    DINOv3ViTModel(config).save_pretrained(folder)
    return folder


def paper_settings(root: Path, teacher: Path, out: Path, recipe: str, **changes: Any) -> Distillation:
    small = {"train": (str(root / "photos"),), "teacher": str(teacher), "out": out, "batch": 4, "workers": 0,
             "device": "cpu", "autocast": "off", "log_every": 1, "checkpoint_minutes": 0}  # fmt: skip
    return RECIPES[recipe](**{**small, **changes})


@pytest.mark.end_to_end
def test_both_stages_of_the_paper(root: Path, dinov3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another width and a fresh student; then several resolutions from its best model."""
    photos = (str(root / "photos"),)
    train(paper_settings(root, dinov3, tmp_path / "one", "stage1", student="veca_tiny", epochs=0.5, warmup_epochs=0.1,
                         resolutions=(32,), val=photos, val_images=4, val_budgets=(8,)))  # fmt: skip
    said = capsys.readouterr().out
    assert "the teacher has no patch embedding of shape 192×3×16×16" in said
    assert "NorMuon    new" in said
    model = veca.load(tmp_path / "one" / "best")
    assert model.config.out_width == 48
    model.calibration = Calibration((Line(32, 64, 1.0, 1.0, 0.0),), 10)
    model.save(tmp_path / "one" / "best")
    train(paper_settings(root, dinov3, tmp_path / "two", "stage2", init=str(tmp_path / "one"), steps=4, warmup_steps=1,
                         resolutions=(32,), resolution_weights=(1,), late_from=0.5, late_resolutions=(48,),
                         late_resolution_weights=(1,), val=photos, val_images=4, val_budgets=(8, 64), val_every=2,
                         ))  # fmt: skip
    assert [record["resolution"] for record in metrics(tmp_path / "two", "train")] == [32, 32, 48, 48]
    grid = metrics(tmp_path / "two", "validation")[-1]["grid"]
    assert {size: set(row) for size, row in grid.items()} == {"32": {"8", "64"}, "48": {"8", "64"}}
    moved = tensors(tmp_path / "two")["bank.tokens"] - tensors(tmp_path / "one", "best")["bank.tokens"]
    assert 0 < moved.abs().max() < 0.1
    assert veca.load(tmp_path / "two" / "last").calibration is None  # it was of other weights
    card, first = veca.load(tmp_path / "two" / "last").card, model.card
    assert card["before"] == f"{first['views']:,} views, {first['recipe']}"
    assert card["views_before"] == first["views"] > 0
    assert card["recipe"].startswith("stage2 from one")
    with pytest.raises(InputError, match="has core attention, and goes on with it"):
        train(paper_settings(root, dinov3, tmp_path / "three", "stage2", init=str(tmp_path / "one"), attention="dense"))


def test_best_is_the_model_with_the_lowest_validation_loss(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(tiny_settings(root, out, val=(str(root / "photos"),), val_every=2, val_images=4, lr=0.05, steps=8, clip=0.0))
    losses = {record["step"]: record["loss"] for record in metrics(out, "validation")}
    best = min(losses, key=lambda step: losses[step])
    assert [path.name[:13] for path in (out / "checkpoints").glob("best-*.pt")] == [f"best-{best:08d}"]
    state = torch.load(next((out / "checkpoints").glob("best-*.pt")), weights_only=True)
    for name, tensor in tensors(out, "best").items():
        assert torch.equal(tensor, state["model"][name])


def test_the_control_arm_and_rotation_off(root: Path, tmp_path: Path) -> None:
    train(tiny_settings(root, tmp_path / "run", steps=2, attention="dense", rope_zero_fraction=1.0))
    model = veca.load(tmp_path / "run" / "last")
    assert (model.config.attention, model.config.rope_zero_fraction) == ("dense", 1.0)


def test_geometry_that_does_not_fit_is_refused(root: Path, dinov3: Path, tmp_path: Path) -> None:
    for changes, message in (
        ({"student": "veca_tiny", "hints": 1.0, "resolutions": (32,)}, "hints and forcing need a student as deep"),
        ({"student": "veca_tiny", "resolutions": (32,), "val_budgets": (8, 99)}, "between 1 and 64, not 99"),
        ({"student": "veca_huge"}, "no model is called 'veca_huge'"),
        ({"seed": -1}, "--seed must not be negative"),
    ):
        with pytest.raises(InputError, match=message):
            train(paper_settings(root, dinov3, tmp_path / "run", "stage1", **changes))
