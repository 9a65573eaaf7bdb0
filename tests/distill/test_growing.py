"""A larger bank, reading a share of the patches, an average of the weights: each against a computation by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_streaming import VARIANTS, small
from torch import nn

import veca
from distill.runs import tiny_settings
from veca.cores import farther_points
from veca.distill.engine import train
from veca.distill.growing import balanced, grow_bank, wake_rotation
from veca.distill.student import even_share
from veca.errors import InputError
from veca.scan import choose, scanned


def test_a_grown_bank_leaves_the_old_budgets_as_they_were() -> None:
    model = small(**VARIANTS["converted"])
    size = model.config.bank
    grown = grow_bank(model, 3 * size).eval()
    images = torch.randn(2, 3, 4 * model.patch_size, 5 * model.patch_size)
    with torch.inference_mode():
        for cores in (1, size):
            torch.testing.assert_close(grown(images, cores=cores).patches, model(images, cores=cores).patches)
        assert not torch.allclose(grown(images).patches, model(images).patches)
    with pytest.raises(InputError, match="cores are there already"):
        grow_bank(grown, size)


def test_a_new_core_is_a_grey_patch_with_what_the_nearest_old_one_learned() -> None:
    model = small(**VARIANTS["converted"])
    size = model.config.bank
    grown = grow_bank(model, size + 5)
    table = model.table.detach().permute(2, 0, 1)[None]

    def grey(place: torch.Tensor) -> torch.Tensor:
        sampled = nn.functional.grid_sample(
            table, place.reshape(1, 1, 1, 2), mode="bicubic", padding_mode="border", align_corners=False
        )
        return model.patch_embed.proj.bias + sampled[0, :, 0, 0]

    places = grown.bank.states.detach().tanh()
    for number in range(size, size + 5):
        nearest = min(range(size), key=lambda old: float((places[old] - places[number]).norm()))
        expected = grey(places[number]) + model.bank.tokens[nearest] - grey(places[nearest])
        torch.testing.assert_close(grown.bank.tokens[number], expected, atol=1e-5, rtol=1e-5)


def test_farther_points_are_each_the_farthest() -> None:
    start = torch.tensor([[0.1, 0.0], [-0.5, 0.3]])
    points = farther_points(start, 9)
    assert torch.equal(points[:2], start)
    assert points.abs().max() <= 0.95 + 1e-6
    gaps = [float((points[:n] - points[n]).norm(dim=-1).min()) for n in range(2, 9)]
    assert gaps == sorted(gaps, reverse=True)  # the farthest is never farther than the one before it was


@pytest.mark.parametrize("share", [0.125, 0.5])
def test_reading_a_share_is_what_a_scan_does(share: float) -> None:
    model = small(**VARIANTS["converted"])
    images = torch.randn(2, 3, 6 * model.patch_size, 7 * model.patch_size)
    chosen = choose((6, 7), share, None)
    with torch.inference_mode():
        layers = model.forward_layers(images, 3, reading=torch.as_tensor(chosen), last_only=True)
        expected = scanned(model, images, 3, share)
        torch.testing.assert_close(model.output(layers.patches[-1]), expected.patches, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(model.output(layers.cores[-1]), expected.cores, atol=1e-4, rtol=1e-4)


def test_an_even_share_is_drawn_anew_and_evenly() -> None:
    assert even_share((64, 64), 4, 1.0, torch.device("cpu")) is None
    torch.manual_seed(0)
    drawn = [even_share((64, 64), 4, 0.25, torch.device("cpu")) for _ in range(3)]
    assert all(one is not None and len(one) == 64 for one in drawn)
    assert not torch.equal(drawn[0], drawn[1])
    for one in drawn:
        quarters = torch.bincount(one // 16 // 8 * 2 + one % 16 // 8, minlength=4)
        assert 12 <= quarters.min() <= quarters.max() <= 20


def test_budgets_fit_the_view(root: Path, tmp_path: Path) -> None:
    settings = tiny_settings(root, tmp_path, budgets=(2, 4, 8, 32), budget_weights=(1, 1, 1, 0))
    assert {settings.budget_at(step, 16) for step in range(60)} == {2, 4, 8}
    assert {settings.budget_at(step, 15) for step in range(60)} == {2, 4}
    assert {settings.budget_at(step, 3) for step in range(60)} == {2}
    shares = [settings.read_at(step) for step in range(8)]
    assert shares == [1.0] * 8
    settings = tiny_settings(root, tmp_path, read_share=0.125)
    shares = [settings.read_at(step) for step in range(200)]
    assert all(0.125 <= share <= 1 for share in shares)
    assert 70 < sum(share == 1 for share in shares) < 130


def test_apart_every_part_of_a_step_draws_its_own_evenly(root: Path, tmp_path: Path) -> None:
    plain = {"budgets": (2, 4, 8), "budget_weights": (2, 1, 1), "read_share": 0.125, "mixed": 0.3, "accumulate": 4}
    together, apart = (tiny_settings(root, tmp_path, **plain, apart=apart) for apart in (False, True))
    for step in range(20):
        assert len({together.budget_at(step, 64, part, 8) for part in range(8)}) == 1
        drawn = [apart.budget_at(step, 64, part, 8) for part in range(8)]
        assert sorted(drawn) == [2, 2, 2, 2, 4, 4, 8, 8]  # as the weights say, in every step
        for at in (apart.read_at, apart.mixed_at):
            shares = [at(step, part) for part in range(4)]
            assert 1 <= sum(share < 1 for share in shares) <= 2
            assert len(set(shares)) >= 2
    orders = {tuple(apart.budget_at(step, 64, part, 8) for part in range(8)) for step in range(20)}
    assert len(orders) > 10


def test_what_is_kept_is_the_average(root: Path, tmp_path: Path) -> None:
    changes = {"lr": 1e-2, "steps": 4, "forcing": 0.0, "fading": 0.0, "read_share": 0.5, "bank": 80, "gram": 1.0}
    averaged = tiny_settings(root, tmp_path / "averaged", average=0.5, **changes)
    train(tiny_settings(root, tmp_path / "averaged", average=0.5, stop_at=2, **changes))  # the average continues too
    train(averaged)
    plain: dict[str, torch.Tensor] = {}
    for step in range(1, 5):
        out = tmp_path / f"to{step}"
        train(tiny_settings(root, out, stop_at=step if step < 4 else 0, **changes))
        newest = max((out / "checkpoints").glob("step-*.pt"))
        now = torch.load(newest, weights_only=True)["model"]
        plain = {name: (plain[name] + now[name]) / 2 if plain else now[name] for name in now}
    kept = veca.load(averaged.out / "last")
    assert kept.config.bank == 80
    for name, tensor in kept.state_dict().items():
        torch.testing.assert_close(tensor, plain[name], atol=1e-6, rtol=1e-5)


def learned(still: veca.Veca) -> veca.Veca:
    """With queries and keys as training leaves them: a few directions carry nearly all."""
    for block in still.blocks:
        for name in ("q_proj", "k_proj"):
            weight = getattr(block.attn, name).weight
            weight.data = (torch.linalg.svd(weight.data)[0] * torch.logspace(0.5, -3, len(weight))) @ torch.randn_like(
                weight
            )
            getattr(block.attn, name).bias.data.normal_()
    return still


def test_balanced_coordinates_keep_every_product() -> None:
    """And both sides have the same diagonal covariance in them, the largest first."""
    torch.manual_seed(0)
    mixed = torch.randn(2, 8, 8).double()
    queries, keys = torch.randn(300, 8).double() @ mixed[0], torch.randn(200, 8).double() @ mixed[1] + 3
    (for_queries, for_keys), centre = balanced([queries], [keys])
    torch.testing.assert_close(centre, keys.mean(0))
    q, k = queries @ for_queries.T, (keys - centre) @ for_keys.T
    torch.testing.assert_close(q @ k.T, queries @ (keys - centre).T)
    moments = [part.T @ part / len(part) for part in (q, k)]
    torch.testing.assert_close(moments[0], moments[1], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(moments[0], moments[0].diag().diag(), atol=1e-3, rtol=1e-3)
    assert list(moments[0].diag()) == sorted(moments[0].diag(), reverse=True)


def test_rotation_is_woken_gently() -> None:
    """Without turning, the changed weights are the same network; turned, they stay far nearer to it than the old."""
    torch.manual_seed(0)
    still = learned(small(**VARIANTS["converted"], rope_zero_fraction=1.0))
    images = torch.randn(2, 3, 5 * still.patch_size, 4 * still.patch_size)
    turning = wake_rotation(still, 0.125, images).eval()
    assert torch.equal(turning.bank.alpha, torch.full_like(turning.bank.alpha, 0.01))
    assert turning.bank.states.requires_grad
    assert not still.bank.states.requires_grad
    unturned = veca.Veca(still.config).eval()
    unturned.load_state_dict(turning.state_dict())
    naive = veca.Veca(turning.config).eval()
    naive.load_state_dict(still.state_dict())
    with torch.inference_mode():
        was = still(images).patches
        torch.testing.assert_close(unturned(images).patches, was, atol=2e-4, rtol=1e-4)
        near, far = (float((model(images).patches - was).norm() / was.norm()) for model in (turning, naive))
    assert near < far / 2


def test_a_still_model_learns_to_turn(root: Path, tmp_path: Path) -> None:
    train(tiny_settings(root, tmp_path / "still", steps=2))
    changes = {"steps": 4, "forcing": 0.0, "fading": 0.0, "init": str(tmp_path / "still" / "last"), "lr": 1e-2}
    train(tiny_settings(root, tmp_path / "run", rotate=True, **changes))
    model = veca.load(tmp_path / "run" / "last")
    assert model.config.turns
    with torch.inference_mode():
        coords = model(torch.randn(2, 3, 28, 28), cores=4).coords
    assert not torch.allclose(coords[0], model.bank.states[:4].tanh())  # they move
    with pytest.raises(InputError, match="--rotate lets a model without rotation turn"):
        train(tiny_settings(root, tmp_path / "other", rope_zero_fraction=0.125, **changes))
