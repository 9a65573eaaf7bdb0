"""The command: recipes with every setting, the paper's numbers in them, and the picture afterwards."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from PIL import Image

from veca.cli import main
from veca.distill.data import Plan
from veca.distill.settings import Distillation
from veca.recipes import RECIPES
from veca.recipes.convert import Convert

GIVEN = {"train": ("x",), "teacher": "t", "out": Path("o")}


def test_the_list_of_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["distill", "--help"]) == 0
    said = capsys.readouterr().out
    for name in RECIPES:
        assert f"\n  {name}" in said
    assert main(["distill", "stage9"]) == 2
    assert "no recipe is called 'stage9'" in capsys.readouterr().err


@pytest.mark.parametrize("name", RECIPES)
def test_help_prints_every_setting_and_what_the_recipe_is(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["distill", name, "--help"])
    said = capsys.readouterr().out
    for field in dataclasses.fields(Distillation):
        assert f"--{field.name.replace('_', '-')} " in said or f"--{field.name.replace('_', '-')}," in said
    for part in ("trains ", "on ", "for ", "hardware ", "expects ", f"distill {name} "):
        assert part in said


def test_the_papers_recipes() -> None:
    one, two = RECIPES["stage1"](**GIVEN), RECIPES["stage2"](**GIVEN, init="runs/one")
    for recipe in (one, two):
        assert recipe.budgets == (8, 16, 24, 32, 40, 48, 56, 64)
        assert recipe.budget_weights == (1, 1, 2, 2, 3, 3, 4, 4)
        assert recipe.matrices == "normuon"
        assert (recipe.batch, recipe.clip, recipe.hints, recipe.forcing, recipe.standardise) == (128, 0, 0, 0, False)
    assert (one.epochs, one.warmup_epochs, one.lr, one.min_lr, one.weight_decay) == (135, 25, 4e-4, 5e-5, 0.015)
    assert one.resolutions == (256,)
    assert (two.steps, two.warmup_steps, two.lr, two.min_lr, two.weight_decay) == (50_000, 7_000, 8e-5, 3e-5, 0.01)
    assert dict(zip(two.resolutions, two.resolution_weights, strict=True)) == {256: 0.35, 384: 0.35, 512: 0.30}
    sizes = dataclasses.replace(two, resolutions=(1,), late_resolutions=(2,))
    plan = Plan(sizes, [1], total=two.steps, start=0, batch=1, rank=0, ranks=1)
    assert [plan.resolution(step) for step in (0, 6_999, 7_000, 49_999)] == [1, 1, 2, 2]
    late = dict(zip(two.late_resolutions, two.late_resolution_weights, strict=True))
    assert late == {256: 0.15, 384: 0.25, 512: 0.30, 768: 0.30}
    for name in ("laptop", "convert"):
        assert RECIPES[name](**GIVEN).standardise


def test_a_recipes_sizes_fit_any_patch() -> None:
    recipe = Convert(train=("x",), teacher="t", out=Path("o"), cache_resolutions=(196,))
    assert recipe.whole_patches(14) == recipe
    fitting = recipe.whole_patches(16)  # a DINOv3
    assert (fitting.val_resolutions, fitting.cache_resolutions) == ((192, 448), (192,))
    assert (fitting.resolutions, fitting.late_resolutions) == ((192,), (192, 256, 336, 448))
    assert isinstance(fitting, Convert)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--teacher", "nowhere/at-all", "--device", "cpu"], "no images at"),
        (["--budgets", "8", "16"], "--budgets has 2 entries, --budget-weights 8"),
        (["--epochs", "3"], "either as --epochs or as --steps"),
        (["--forcing", "1.5"], "--forcing is a share from 0 to 1"),
        (["--forcing", "0.7", "--fading", "0.6"], "leave no step at which the student runs freely"),
        (["--cache-resolutions", "200"], "--cache-resolutions 200: the run has no crops of that size"),
        (["--device", "cuda"], "--device cuda cannot be used here"),
        (["--student", "teacher", "--init", "fresh"], "--student teacher needs --init teacher"),
        (["--val", "x", "--val-budgets"], "--val-budgets: give at least one"),
    ],
)
def test_mistakes_are_one_line(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["distill", "convert", "--train", str(tmp_path / "no"), "--out", str(tmp_path / "run"),
                   *([] if "--teacher" in flags else ["--teacher", "t"]), *flags])  # fmt: skip
    assert status == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_whole_command_and_its_picture(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    arguments = ["distill", "convert", "--train", str(root / "photos"), "--val", str(root / "photos"), "--teacher",
                 str(root / "teacher"), "--out", str(out), "--steps", "4", "--batch", "4", "--resolutions", "28",
                 "--late-from", "1", "--val-resolutions", "28", "35", "--val-images", "6", "--val-batch", "4",
                 "--val-every", "2", "--log-every", "2", "--workers", "0", "--device", "cpu"]  # fmt: skip
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "copied: 37 tensors" in said
    assert "AdamW      copied" in said
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [(record["kind"], record["step"]) for record in records] == [
        ("train", 2), ("validation", 2), ("train", 4), ("validation", 4),
    ]  # fmt: skip
    assert set(records[-1]["grid"]) == {"28", "35"}
    assert set(records[-1]["grid"]["28"]) == {"8", "16", "32", "64"}
    assert list((out / "tensorboard").iterdir())
    for folder in ("best", "last"):
        assert main(["info", str(out / folder)]) == 0
    (out / "curves.png").unlink()
    assert main(["distill", "--plot", str(out)]) == 0
    assert Image.open(out / "curves.png").width > 1000
    assert main(arguments) == 0
    assert "this run is finished" in capsys.readouterr().out
    assert main(["distill", "--plot", str(tmp_path)]) == 2
