"""Both commands on planted squares: a head learns them, the frozen backbone stays as it was, a run continues."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import veca
from veca.backbones import load_backbone
from veca.cli import main
from veca.errors import InputError
from veca.images import stored_values
from veca.tasks.base.heads import load_head
from veca.tasks.masks.task import Masks
from veca.weights import weights_digest

SIDE = 64
COLOURS = ((220, 30, 30), (30, 30, 220))


@pytest.fixture(scope="session")
def squares(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A red square on the left and a blue one on the right, or one of them, on grey."""
    folder, draw = tmp_path_factory.mktemp("squares"), np.random.default_rng(0)
    (folder / "classes.txt").write_text("red\nblue\n")
    for part, count in (("train", 12), ("test", 4)):
        for kind in ("images", "instances"):
            (folder / part / kind).mkdir(parents=True)
        for number in range(count):
            pixels = draw.integers(110, 140, (SIDE, SIDE, 3)).astype(np.uint8)
            label = np.zeros((SIDE, SIDE), np.uint16)
            for kind in (0, 1) if number % 3 == 0 else (number % 3 - 1,):
                top, left = int(draw.integers(0, 32)), 32 * kind
                pixels[top : top + 32, left : left + 32] = COLOURS[kind]
                label[top : top + 32, left : left + 32] = 1000 * (kind + 1)
            Image.fromarray(pixels).save(folder / part / "images" / f"{number}.png")
            Image.fromarray(label).save(folder / part / "instances" / f"{number}.png")
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    veca.create_model("veca_tiny", depth=2, patch_size=8).save(folder)
    return folder


def metrics(out: Path) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = json.loads((out / "results.json").read_text())["rows"][0]["metrics"]
    return found


def test_a_probe_learns_squares_and_predict_draws_them(
    squares: Path, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["--size", str(SIDE), "--cores", "8", "--steps", "60", "--queries", "4", "--layers", "1", "--fine", "4"]
    words += ["--cache", str(tmp_path / "cache"), "--device", "cpu", "--out", str(out)]
    assert main(["probe", "masks", "--data", str(squares), "--model", str(tiny), *words]) == 0
    found = metrics(out)
    assert found["PQ"]["mean"] > 0.5
    assert found["mask_mAP50"]["mean"] > 0.5
    assert found["PQ_fine"]["mean"] > 0.5  # finer masks of the same things
    capsys.readouterr()
    head = out / "heads" / f"{tiny.name}-{SIDE}px-8cores"
    assert (
        main(["probe", "predict", str(head), str(squares / "test/images/0.png"), "--out", str(tmp_path / "seen")]) == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert {one["class"] for one in told["segments"]} == {"red", "blue"}
    drawn, truth = stored_values(tmp_path / "seen/0.instances.png"), stored_values(squares / "test/instances/0.png")
    assert (drawn == truth).mean() > 0.85
    assert Image.open(tmp_path / "seen/0.overlay.png").width == SIDE

    saved = load_head(head)
    saved.about["queries"] = 10**9
    with pytest.raises(InputError, match="not a whole head of masks"):
        Masks.module(saved)
    saved.about["queries"] = 5
    with pytest.raises(InputError, match="tensors are not those"):
        Masks.module(saved)


def test_the_same_head_on_a_plain_teacher(squares: Path, tmp_path: Path) -> None:
    from transformers import Dinov2Config, Dinov2Model

    shape = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 3, "image_size": 32, "patch_size": 8}
    Dinov2Model(Dinov2Config(**shape)).save_pretrained(tmp_path / "teacher")
    words = ["--size", "32", "--steps", "2", "--queries", "4", "--layers", "1", "--fine", "4", "--device", "cpu"]
    words += ["--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out")]
    assert main(["probe", "masks", "--data", str(squares), "--model", str(tmp_path / "teacher"), *words]) == 0
    assert "PQ_fine" not in metrics(tmp_path / "out")  # it has nothing to look along


def test_head_only_leaves_the_backbone_and_continues_to_the_same_weights(
    squares: Path, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--data", str(squares), "--model", str(tiny), "--size", "32", "--queries", "4", "--layers", "1"]
    common += ["--epochs", "2", "--batch", "4", "--device", "cpu", "--workers", "1", "--head-only"]
    start = weights_digest(veca.load(tiny))
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert main(["finetune", "masks", *common, "--out", str(whole)]) == 0
    assert main(["finetune", "masks", *common, "--out", str(parted), "--stop-at", "2"]) == 0
    assert not (parted / "results.json").exists()
    assert main(["finetune", "masks", *common, "--out", str(parted)]) == 0
    assert "continuing" in capsys.readouterr().out
    assert weights_digest(veca.load(whole / "model")) == start
    one, other = (load_head(out / "head").stored() for out in (whole, parted))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert metrics(whole)["PQ"]["mean"] == metrics(parted)["PQ"]["mean"]
    assert main(["finetune", "masks", *common, "--fine", "3", "--out", str(tmp_path / "all")]) == 2
    assert "--fine must divide the patch size 8" in capsys.readouterr().err
    common += ["--fine", "4"]
    all_of_it = [word for word in common if word != "--head-only"]
    assert main(["finetune", "masks", *all_of_it, "--out", str(tmp_path / "all")]) == 0
    assert weights_digest(veca.load(tmp_path / "all/model")) != start
    assert load_head(tmp_path / "all/head").about["fine"] == 4  # as `veca probe predict` draws them


def test_views_and_labels_stay_together(squares: Path) -> None:
    """Wherever a random view shows a square's colour, its label says so."""
    import random

    task = Masks.open(type("Options", (), {"data": squares, "queries": 4, "layers": 1, "fine": None})())
    draw = random.Random(0)
    for number in range(12):
        pixels, label = task.load(number, 48, draw)
        assert pixels.shape == (48, 48, 3)
        red = (pixels[..., 0].int() - pixels[..., 2].int()) > 100
        blue = (pixels[..., 2].int() - pixels[..., 0].int()) > 100
        assert ((label == 1000) == red).float().mean() > 0.95
        assert ((label == 2000) == blue).float().mean() > 0.95


def test_finer_masks_lie_where_the_grid_has_them(tiny: Path) -> None:
    """A smooth picture: each value of the grid is near the four finer ones that share its place."""
    from dataclasses import replace

    from veca.tasks.masks.head import MaskHead
    from veca.tasks.masks.task import last, seen_by

    torch.manual_seed(1)
    backbone = load_backbone(str(tiny))
    slope = torch.linspace(20, 235, SIDE)
    image = torch.stack(
        (slope.expand(SIDE, SIDE), slope[:, None].expand(SIDE, SIDE), slope.flip(0).expand(SIDE, SIDE)), -1
    )
    pixels = image.to(torch.uint8)[None]
    head = MaskHead(backbone.width, 2, queries=6, depth=2).eval()
    grid = seen_by(backbone, 8, pixels)
    coarse = last(head, grid)
    fine = last(head, grid, seen_by(replace(backbone).reading(1.0, 4), 8, pixels))
    assert fine.masks.shape[-2:] == (16, 16)
    torch.testing.assert_close(fine.classes, coarse.classes)
    pooled = torch.nn.functional.avg_pool2d(fine.masks, 2)
    for one, other in zip(pooled[0], coarse.masks[0], strict=True):
        pair = torch.stack((one.flatten(), other.flatten()))
        assert torch.corrcoef(pair)[0, 1] > 0.95


def test_the_head_costs_in_proportion_to_the_area() -> None:
    """Of operations: each further patch costs the same, on small grids and on large ones."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from veca.tasks.masks.head import MaskHead

    head = MaskHead(48, 3, queries=6, depth=2, width=64)

    def cost(height: int, width: int) -> int:
        with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):  # whose products are counted
            head(torch.randn(1, 8, 48), torch.randn(1, height * width, 48), (height, width))
        return int(counted.get_total_flops())

    small, twice, large = cost(8, 8), cost(8, 16), cost(32, 32)
    assert twice > small > 0
    assert (large - twice) * (128 - 64) == (twice - small) * (1024 - 128)
    assert large / small < 1024 / 64
