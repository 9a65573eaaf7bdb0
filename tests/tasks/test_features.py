"""The cache: keyed by weights, budget and file content, bounded, and right after damage."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Dinov2Config, Dinov2Model

from veca.backbones import Backbone, load_backbone, short_names, weights_digest
from veca.errors import InputError
from veca.extract.extractor import Features
from veca.images import normalise
from veca.model import create_model
from veca.tasks.base import features
from veca.tasks.base.features import Cache, CachedExtractor, LiveFeatures
from veca.tasks.base.views import View, centre_view


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return load_backbone("random:veca_tiny")


@pytest.fixture
def views(tmp_path: Path) -> list[View]:
    draw = np.random.default_rng(0)
    found = []
    for number in range(5):
        Image.fromarray(draw.integers(0, 255, (40, 40, 3), np.uint8)).save(tmp_path / f"{number}.png")
        found.append(View(tmp_path / f"{number}.png", 32, 32, (0, 0)))
    return found


def never(*_: object) -> None:
    raise AssertionError("the backbone was asked again")


def test_cached_features_are_the_models_own(backbone: Backbone, views: list[View], tmp_path: Path) -> None:
    extractor = CachedExtractor(backbone, 8, Cache(tmp_path / "cache", 1e9))
    cached = extractor.dense(views, "test")
    assert len(cached) == 5
    images = torch.stack([normalise(view.pixels()) for view in views])
    with torch.inference_mode():
        whole, patches, *_ = backbone.veca(images, 8)
    for number in range(5):
        found = cached.dense(number)
        torch.testing.assert_close(found, (whole[number], patches[number]), atol=5e-3, rtol=5e-3)
    torch.testing.assert_close(cached.global_features(), whole, atol=5e-3, rtol=5e-3)
    live = LiveFeatures(extractor, views)
    torch.testing.assert_close(live.dense(3), (whole[3], patches[3]), atol=1e-4, rtol=1e-4)


def test_what_is_known_is_not_computed_again(
    backbone: Backbone, views: list[View], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path / "cache", 1e9)
    first = CachedExtractor(backbone, 8, cache).whole(views, "test")
    again = CachedExtractor(backbone, 8, cache)
    monkeypatch.setattr(again, "compute", never)
    torch.testing.assert_close(again.whole(views, "test"), first, atol=0, rtol=0)
    with pytest.raises(AssertionError, match="asked again"):
        again.whole(views[::-1], "test")


def test_another_budget_file_or_weight_is_another_key(backbone: Backbone, views: list[View], tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", 1e9)
    keys = {CachedExtractor(backbone, cores, cache)._key(views, dense) for cores in (8, 16) for dense in (False, True)}
    keys.add(CachedExtractor(backbone, 8, cache)._key([centre_view(view.path, 32) for view in views], False))
    Image.new("RGB", (40, 40)).save(views[0].path)
    features._content.cache_clear()
    keys.add(CachedExtractor(backbone, 8, cache)._key(views, False))
    assert len(keys) == 6
    model = create_model("veca_tiny")
    before = weights_digest(model)
    with torch.no_grad():
        model.blocks[3].fc1.bias[7] += 1e-6
    assert weights_digest(model) != before


def test_a_newer_transformers_is_not_another_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    teacher = Dinov2Model(Dinov2Config(**shape))
    before = weights_digest(teacher)
    monkeypatch.setattr("transformers.configuration_utils.__version__", "99.0")
    assert teacher.config.to_dict()["transformers_version"] == "99.0"
    assert weights_digest(teacher) == before
    teacher.config.layer_norm_eps = 1e-3  # the same tensors, another network
    assert weights_digest(teacher) != before


def test_random_weights_are_always_the_same_ones(backbone: Backbone) -> None:
    assert load_backbone("random:veca_tiny").digest == backbone.digest


def test_the_cache_never_outgrows_its_limit(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 100_000)
    for number in range(6):
        cache.put(f"{number}", {"global": torch.zeros(10_000, dtype=torch.half)}, keep=set())
        os.utime(cache.path(f"{number}"), (number, number))
        if number == 2:
            cache.use("0")  # just used: it must outlive 1 and 2
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 100_000
    assert {file.stem for file in tmp_path.iterdir()} == {"0", "3", "4", "5"}


def test_what_a_killed_run_left_is_removed_but_not_what_is_being_written(tmp_path: Path) -> None:
    old, new = tmp_path / ".a.partial.safetensors", tmp_path / ".b.partial.safetensors"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    Cache(tmp_path, 10_000).put("c", {"global": torch.zeros(1)}, keep=set())
    assert not old.exists()
    assert new.exists()


def test_what_is_in_use_is_kept(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 50_000)
    for number in range(4):
        cache.put(f"{number}", {"global": torch.zeros(10_000, dtype=torch.half)}, keep={"0", "3"})
    assert {file.stem for file in tmp_path.iterdir()} == {"0", "3"}


def test_a_damaged_shard_is_computed_again(backbone: Backbone, views: list[View], tmp_path: Path) -> None:
    extractor = CachedExtractor(backbone, 8, Cache(tmp_path / "cache", 1e9))
    first = extractor.whole(views, "test")
    (shard,) = (tmp_path / "cache").iterdir()
    shard.write_bytes(shard.read_bytes()[:50])
    torch.testing.assert_close(extractor.whole(views, "test"), first, atol=0, rtol=0)


def test_a_shard_that_another_run_evicts_stays_readable(
    backbone: Backbone, views: list[View], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(features.SHARD, True, 2)
    cache = Cache(tmp_path / "cache", 1e9)
    first = CachedExtractor(backbone, 8, cache).dense(views[:2], "test").dense(1)
    extractor = CachedExtractor(backbone, 8, cache)
    compute = extractor.compute

    def meanwhile(images: torch.Tensor) -> Features:
        for shard in cache.folder.glob("*.safetensors"):
            shard.unlink()
        return compute(images)

    monkeypatch.setattr(extractor, "compute", meanwhile)
    found = extractor.dense(views, "test")
    torch.testing.assert_close(found.dense(1), first, atol=0, rtol=0)
    assert found.dense(4)[1].shape == (4, 192)


def test_global_features_beyond_the_limit_are_not_stored(
    backbone: Backbone, views: list[View], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(features.SHARD, False, 2)
    wide = CachedExtractor(backbone, 8, Cache(tmp_path / "wide", 1e9)).whole(views, "test")
    cache = Cache(tmp_path / "narrow", 2000)
    torch.testing.assert_close(CachedExtractor(backbone, 8, cache).whole(views, "test"), wide, atol=0, rtol=0)
    assert sum(file.stat().st_size for file in cache.folder.iterdir()) <= cache.limit


def test_features_that_cannot_fit_are_refused(backbone: Backbone, views: list[View], tmp_path: Path) -> None:
    extractor = CachedExtractor(backbone, 8, Cache(tmp_path / "cache", 1000))
    with pytest.raises(InputError, match=r"5 views \(train\) take .* GB.*--cache-gb.*--augment"):
        extractor.dense(views, "train")


def test_names_tell_models_apart() -> None:
    assert short_names(["runs/a/best", "runs/b/best", "org/model", "random:veca_tiny"]) == [
        *("a/best", "b/best", "model", "random:veca_tiny")
    ]


def test_budgets_and_sizes_follow_the_model(backbone: Backbone) -> None:
    assert backbone.budgets(()) == (64,)
    assert backbone.budgets((8, 64)) == (8, 64)
    with pytest.raises(InputError, match="--cores 65: random:veca_tiny has budgets from 1 to 64"):
        backbone.budgets((65,))
    assert [backbone.pixels(size) for size in (1, 250, 256)] == [16, 256, 256]
    dense = Backbone("control", create_model("veca_tiny", attention="dense"))
    assert dense.budgets((8, 64)) == (None,)
