"""Steps at mixed scale: what is compared with what, and that everything takes part."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from test_streaming import VARIANTS, small

from distill.runs import tiny_settings, weights
from veca.distill.engine import train
from veca.distill.losses import Standard, dense_loss, hint_loss
from veca.distill.settings import differences
from veca.distill.student import Student
from veca.errors import InputError
from veca.mixed import choose_cells
from veca.teachers import TeacherOutput


def test_shares_are_drawn_by_step(root: Path, tmp_path: Path) -> None:
    assert {tiny_settings(root, tmp_path).mixed_at(step) for step in range(50)} == {1.0}
    settings = tiny_settings(root, tmp_path, mixed=0.3)
    shares = [settings.mixed_at(step) for step in range(300)]
    assert shares == [settings.mixed_at(step) for step in range(300)]
    assert all(0.3 <= share <= 1 for share in shares)
    assert 70 < sum(share < 1 for share in shares) < 130
    with pytest.raises(InputError, match="--mixed is a share above 0, not 0"):
        dataclasses.replace(settings, mixed=0.0).validate()


def test_a_run_of_before_goes_on(root: Path, tmp_path: Path) -> None:
    now = tiny_settings(root, tmp_path).to_dict()
    before = {name: value for name, value in now.items() if name != "mixed"}
    assert differences(before, now) == []
    assert differences(before, now | {"mixed": 0.3}) == ["mixed: 1.0 → 0.3"]


@pytest.mark.parametrize("variant", ["paper", "converted"])
@pytest.mark.parametrize("bfloat16", [False, True])
def test_every_parameter_takes_part(variant: str, bfloat16: bool) -> None:
    model = small(**VARIANTS[variant]).train()
    grid, width = (6, 7), model.config.width
    images = torch.randn(2, 3, grid[0] * model.patch_size, grid[1] * model.patch_size)
    target = TeacherOutput(torch.randn(2, width), torch.randn(2, 42, width), torch.randn(3, 2, 42, width))
    standard = Standard(torch.zeros(3, width), torch.ones(3, width))
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        loss = Student(model)(images, 5, target, None, 1.0, standard, 0.0, read=0.5, gram_weight=1.0, mixed=0.5)
        loss.total.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name


def test_what_is_compared_with_what() -> None:
    model = small(**VARIANTS["converted"])
    p, width = model.patch_size, model.config.width
    images = torch.randn(2, 3, 8 * p, 5 * p)
    target = TeacherOutput(torch.randn(2, width), torch.randn(2, 40, width), torch.randn(3, 2, 40, width))
    standard = Standard(torch.randn(3, width), torch.rand(3, width) + 0.5)
    with torch.no_grad():
        loss = Student(model)(images, 5, target, None, 2.0, standard, 0.0, mixed=0.4)
        cosine, mse = dense_loss(model(images, cores=5, patches=0.4).patches, target.patches)
        cells = choose_cells(images, p, 0.4)
        layers = model.forward_layers(images, 5, cells=cells)
    assert target.layers is not None
    means = torch.empty(3, 2, cells.numbers.shape[1], width)
    for image, cell, (x, y, side) in ((b, c, place) for b in range(2) for c, place in enumerate(cells.places[b])):
        whole = target.layers[:, image].unflatten(1, (8, 5))
        means[:, image, cell] = whole[:, y : y + side, x : x + side].mean((1, 2))
    torch.testing.assert_close(loss.dense_cosine, cosine, atol=1e-4, rtol=0)
    torch.testing.assert_close(loss.mse, mse, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(loss.hints, 2 * hint_loss(layers.patches, means, standard), atol=1e-3, rtol=1e-4)


def test_a_run_is_the_same_again(root: Path, tmp_path: Path) -> None:
    changes = {"steps": 4, "forcing": 0.0, "fading": 0.0, "mixed": 0.3, "read_share": 0.5, "seed": 2}
    settings = tiny_settings(root, tmp_path / "one", **changes)
    assert {settings.mixed_at(step) < 1 for step in range(4)} == {False, True}
    train(settings)
    train(tiny_settings(root, tmp_path / "two", stop_at=2, **changes))
    train(tiny_settings(root, tmp_path / "two", **changes))
    assert weights(tmp_path / "one") == weights(tmp_path / "two")
    train(tiny_settings(root, tmp_path / "without", **{**changes, "mixed": 1.0}))
    assert weights(tmp_path / "one") != weights(tmp_path / "without")
