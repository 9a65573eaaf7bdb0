"""NorMuon against the reference trajectory, and which parameter goes to which optimiser."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import veca
from veca.optim import NorMuon, build_optimisers, orthogonalise, set_rate, split_parameters, split_table


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_normuon_follows_the_reference_trajectory(shared: Path, dtype: torch.dtype) -> None:
    reference = load_file(shared / "reference" / "normuon.safetensors")
    matrices = {name: torch.nn.Parameter(reference[f"init/{name}"].clone()) for name in "abc"}
    optimiser = NorMuon(matrices.values(), lr=4e-3, weight_decay=0.15, polar_dtype=dtype)
    for step in range(6):
        for name, matrix in matrices.items():
            matrix.grad = reference[f"grad/{step}/{name}"]
        optimiser.step()
        for name, matrix in matrices.items():
            expected = reference[f"param/{step}/{name}"]
            travelled = (expected - reference[f"init/{name}"]).norm()
            assert (matrix - expected).norm() < 0.04 * travelled


@pytest.mark.parametrize("shape", [(48, 48), (24, 96), (96, 24)])
def test_orthogonalise_brings_singular_values_near_one(shape: tuple[int, int]) -> None:
    u, _, v = torch.linalg.svd(torch.randn(3, *shape), full_matrices=False)
    spread = torch.linspace(0.02, 1, min(shape))
    values = torch.linalg.svdvals(orthogonalise(u @ torch.diag(spread) @ v, torch.float32))
    assert values.min() > 0.8
    assert values.max() < 1.2


def test_decay_only_touches_weights_that_move_towards_zero() -> None:
    """Two steps that differ in the decay alone differ by lr·wd·θ where θ and the update agree in sign."""
    start, gradient = torch.randn(8, 6), torch.randn(8, 6)
    after = []
    for decay in (0.0, 0.5):
        parameter = torch.nn.Parameter(start.clone())
        parameter.grad = gradient
        NorMuon([parameter], lr=0.1, weight_decay=decay, polar_dtype=torch.float32).step()
        after.append(parameter.detach())
    agree = (start - after[0]) * start > 0
    torch.testing.assert_close(after[0] - after[1], torch.where(agree, 0.1 * 0.5 * start, 0.0), atol=1e-6, rtol=1e-5)
    assert agree.any()
    assert not agree.all()


def test_the_split_is_the_papers() -> None:
    model = veca.create_model("veca_tiny", depth=3, out_width=384)
    muon, adam = split_parameters(model)
    block = ["attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.out_proj", "fc1", "fc2"]
    expected = {f"blocks.{i}.{name}.weight" for i in range(3) for name in block} - {"blocks.2.fc2.weight"}
    assert muon.optimiser == "NorMuon"
    assert set(muon.names) == expected | {"project.weight"}
    assert set(adam.names) == {name for name, _ in model.named_parameters()} - set(muon.names)
    table = split_table([muon, adam]).splitlines()
    assert table[2].split()[:3] == ["NorMuon", "new", "18"]
    assert "blocks.*.attn.q_proj.weight" in table[2]


def test_copied_parameters_have_their_own_rate() -> None:
    model = veca.create_model("veca_tiny", depth=2)
    shares = split_parameters(model, copied=["norm.weight", "blocks.0.fc1.weight"])
    assert [(share.optimiser, share.copied) for share in shares] == [
        ("NorMuon", False), ("NorMuon", True), ("AdamW", False), ("AdamW", True),
    ]  # fmt: skip
    optimisers = build_optimisers(shares, 1e-3, 0.01, copied_rate=0.25, polar_dtype=torch.float32)
    set_rate(optimisers, 4e-4)
    assert [group["lr"] for optimiser in optimisers for group in optimiser.param_groups] == [4e-4, 1e-4, 4e-4, 1e-4]
    assert len(split_parameters(model, matrices="adamw")) == 1


def test_relative_rates_follow_the_size_of_copied_matrices() -> None:
    model = veca.create_model("veca_tiny", depth=2)
    block = model.blocks[0]
    with torch.no_grad():
        block.fc2.weight.fill_(0.005)  # a quarter of a fresh matrix
    copied = ["blocks.0.fc2.weight", "blocks.0.fc2.bias", "norm.weight", "bank.tokens", "bank.states"]
    shares = split_parameters(model, copied, matrices="adamw")
    (adam,) = build_optimisers(shares, 1e-3, 0.01, 0.5, torch.float32, relative_rates=True)
    rates = {id(p): group["rate"] for group in adam.param_groups for p in group["params"]}
    assert rates[id(block.fc2.weight)] == rates[id(block.fc2.bias)] == pytest.approx(0.5 * 0.25)
    for vector in (model.norm.weight, model.bank.tokens):  # what is no matrix of weights
        assert rates[id(vector)] == 0.5
    assert rates[id(model.bank.states)] == 0.5 * 25  # or cores would hardly move
    assert rates[id(block.fc1.weight)] == 1.0  # a fresh one
    assert len(rates) == sum(1 for _ in model.parameters())


def test_a_restored_optimiser_goes_on_bit_by_bit() -> None:
    gradients = torch.randn(4, 6, 8)
    whole = torch.nn.Parameter(torch.ones(6, 8))
    first = NorMuon([whole], polar_dtype=torch.float32)
    for step, gradient in enumerate(gradients):
        if step == 2:
            state, kept = first.state_dict(), whole.detach().clone()
            resumed = torch.nn.Parameter(kept)
            second = NorMuon([resumed], polar_dtype=torch.float32)
            second.load_state_dict({"state": {0: {k: v.clone() for k, v in state["state"][0].items()}},
                                    "param_groups": state["param_groups"]})  # fmt: skip
        whole.grad = gradient
        first.step()
        if step >= 2:
            resumed.grad = gradient
            second.step()
    assert torch.equal(whole, resumed)
