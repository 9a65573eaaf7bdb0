from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from veca.analysis.contributions import contributions, layer_contributions
from veca.block import Attention
from veca.model import Veca
from veca.rope import Rotation, patch_coords, rotation

from .conftest import SMALL, lively

GRID, CORES = (4, 5), 3


class Layer(NamedTuple):
    attention: Attention
    cores: torch.Tensor
    patches: torch.Tensor
    by_core: Rotation
    by_patch: Rotation


def one_layer(dense: bool) -> Layer:
    config = dataclasses.replace(SMALL, attention="dense" if dense else "core")
    model = lively(config)
    cores, patches = torch.randn(1, CORES, config.width), torch.randn(1, GRID[0] * GRID[1], config.width)
    by = [
        rotation(where[None], config.head_width, config.rope_zero_fraction)
        for where in (torch.rand(CORES, 2) * 2 - 1, patch_coords(*GRID))
    ]
    return Layer(model.blocks[0].attn, cores, patches, *by)


def slow(layer: Layer, reader: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Σ_h a_ij^h v_j^h W_O^h for every j that `reader` may read, one vector at a time: T×D, and their norms."""
    attention, x = layer.attention, torch.cat((layer.cores, layer.patches), dim=1)
    by = Rotation(*(torch.cat(pair, dim=-2) for pair in zip(*((b.cos, b.sin) for b in layer[3:]), strict=True)))
    q, k, v = attention.queries(x, by), attention.keys(x, by), attention.values(x)
    heads, width = attention.heads, q.shape[-1]
    readable = range(x.shape[1]) if attention.dense or reader < CORES else range(CORES)
    vectors = torch.zeros(x.shape[1], x.shape[2])
    for h in range(heads):
        logits = torch.stack([q[0, h, reader] @ k[0, h, j] / width**0.5 for j in readable])
        weights = logits.exp() / logits.exp().sum()
        out = attention.out_proj.weight[:, h * width : (h + 1) * width].T  # W_O^h: d×D
        for j, weight in zip(readable, weights, strict=True):
            vectors[j] += weight * (v[0, h, j] @ out)
    return vectors, vectors.norm(dim=-1)


@pytest.mark.parametrize("dense", [False, True])
@torch.no_grad()
def test_every_share_equals_the_slow_computation(dense: bool) -> None:
    layer = one_layer(dense)
    found = layer_contributions(*layer)
    for reader in range(CORES):
        _, norms = slow(layer, reader)
        torch.testing.assert_close(found.cores[0, reader], norms / norms.sum(), rtol=1e-4, atol=1e-6)
    for patch in range(GRID[0] * GRID[1]):
        _, norms = slow(layer, CORES + patch)
        own = norms[:CORES] / norms[:CORES].sum()
        torch.testing.assert_close(found.patches[0, patch], own, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_the_vectors_measured_are_what_the_layer_adds_up() -> None:
    layer = one_layer(dense=False)
    attention = layer.attention
    out = torch.cat(attention(*layer[1:]), dim=1)[0]
    for reader in (0, 2, 5, 19):
        vectors, _ = slow(layer, reader)
        torch.testing.assert_close(vectors.sum(0) + attention.out_proj.bias, out[reader], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("table", [False, True])
@torch.no_grad()
def test_layers_are_entered_as_in_the_forward_pass(table: bool) -> None:
    config = dataclasses.replace(SMALL, positions="table" if table else "rope", table_size=5)
    model, images = lively(config), torch.randn(1, 3, 64, 80)
    layers = model.forward_layers(images, 8)
    entered = []
    hooks = [
        block.attn.register_forward_pre_hook(lambda module, args: entered.append((module, args)))
        for block in model.blocks
    ]
    model.forward_layers(images, 8)
    for hook in hooks:
        hook.remove()
    found = list(contributions(model, images, layers))
    assert len(found) == len(entered) == 3
    for own, (module, args) in zip(found, entered, strict=True):
        expected = layer_contributions(module, *args[:4])
        torch.testing.assert_close(own.patches, expected.patches)
        torch.testing.assert_close(own.cores, expected.cores)
        assert own.patches.shape == (1, 20, 8)
        assert own.cores.shape == (1, 8, 28)
        for rows in (*own, own.reads):
            torch.testing.assert_close(rows.sum(-1), torch.ones(rows.shape[:-1]))


class Largest(TorchDispatchMode):
    """Remembers tensors with two long dimensions."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.found = length, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and sum(side >= self.length for side in tensor.shape) > 1:
                self.found.append((str(func), tuple(tensor.shape)))
        return out


@pytest.mark.parametrize("attention", ["core", "dense"])
@torch.no_grad()
def test_no_matrix_of_all_patches_by_all_patches(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("veca.analysis.contributions.ROWS", 64)
    model = Veca(dataclasses.replace(SMALL, depth=1, attention=attention)).eval()
    images = torch.randn(1, 3, 512, 512)  # 1024 patches, more than a patch has pixels and values
    layers = model.forward_layers(images, 8)
    with Largest(1024) as seen:
        list(contributions(model, images, layers))
    assert seen.found == []


@torch.no_grad()
def test_a_batch_is_its_images_one_by_one() -> None:
    model, images = lively(), torch.randn(2, 3, 48, 32)
    together = list(contributions(model, images, model.forward_layers(images, 5)))
    for index in range(2):
        alone = list(
            contributions(model, images[index : index + 1], model.forward_layers(images[index : index + 1], 5))
        )
        for a, b in zip(together, alone, strict=True):
            torch.testing.assert_close(a.patches[index], b.patches[0], rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(a.cores[index], b.cores[0], rtol=1e-4, atol=1e-6)
