"""The teacher on disk: the same features, the same views, and no confusion between caches."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from distill.runs import make_photos, make_teacher, tiny_settings
from veca.distill.cache import TeacherCache, open_shard, shard_path
from veca.distill.data import Key, read_view
from veca.distill.engine import train
from veca.distill.sources import index_images
from veca.errors import InputError
from veca.teachers import load_teacher


def losses(out: Path) -> list[float]:
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["kind"] == "train"]


@pytest.fixture(scope="module")
def cached_run(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two fixed views, of which the late resolution 35 is not cached."""
    folder = tmp_path_factory.mktemp("cached")
    train(tiny_settings(root, folder / "run", views=2, cache_teacher=folder / "cache", workers=2, lr=1e-6, min_lr=0))
    return folder


def test_the_cache_holds_the_teachers_features_of_the_same_views(root: Path, cached_run: Path) -> None:
    images, teacher = index_images([str(root / "photos")]), load_teacher(root / "teacher")
    cache = TeacherCache(cached_run / "cache", (28,), layers=True)
    for key in (Key(0, 0, 28), Key(17, 1, 28)):
        expected = teacher(read_view(images, key, 0)[None], (4, 4), layers=True)
        assert expected.layers is not None
        features = cache.read(key)
        assert features is not None
        for stored, fresh in zip(features, (expected.cls[0], expected.patches[0], expected.layers[:, 0]), strict=True):
            assert stored.dtype == (torch.float16 if fresh.ndim > 1 else torch.float32)
            torch.testing.assert_close(stored.float(), fresh, atol=2e-3, rtol=2e-3)


def test_losses_are_those_of_the_teacher_online(root: Path, cached_run: Path, tmp_path: Path) -> None:
    """At a rate that hardly moves the weights: Adam's first steps turn rounding errors into whole steps."""
    train(tiny_settings(root, tmp_path / "run", views=2, lr=1e-6, min_lr=0))
    torch.testing.assert_close(
        torch.tensor(losses(cached_run / "run")), torch.tensor(losses(tmp_path / "run")), atol=2e-3, rtol=2e-3
    )


def test_another_student_and_seed_use_it_without_the_teacher_running(
    root: Path, cached_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = shard_path(cached_run / "cache", 28, 0, 0).stat().st_mtime_ns
    train(tiny_settings(root, tmp_path / "run", views=2, cache_teacher=cached_run / "cache", seed=3, hints=0, forcing=0,
                        fading=0, steps=3))  # fmt: skip
    assert "caching the teacher" not in capsys.readouterr().out
    assert shard_path(cached_run / "cache", 28, 0, 0).stat().st_mtime_ns == before


def test_a_run_without_hints_adds_layers_where_the_cache_has_them(root: Path, cached_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    shutil.copytree(cached_run / "cache", folder)
    plain = {"hints": 0, "forcing": 0, "fading": 0, "steps": 1}
    train(tiny_settings(root, tmp_path / "plain", views=3, cache_teacher=folder, **plain))
    assert "layers" in load_file(shard_path(folder, 28, 2, 0))
    train(tiny_settings(root, tmp_path / "hints", views=3, cache_teacher=folder, steps=1))


def test_a_missing_shard_is_made_again_and_a_damaged_one_is_named(root: Path, cached_run: Path, tmp_path: Path) -> None:
    shard = shard_path(cached_run / "cache", 28, 1, 0)
    before = load_file(shard)
    content = shard.read_bytes()
    shard.unlink()
    train(tiny_settings(root, tmp_path / "run", views=2, cache_teacher=cached_run / "cache", steps=1))
    assert all(torch.equal(before[name], tensor) for name, tensor in load_file(shard).items())
    other = tmp_path / "cache"
    train(tiny_settings(root, tmp_path / "other", views=1, cache_teacher=other, steps=1))
    shard_path(other, 28, 0, 0).unlink()
    shard_path(other, 28, 0, 0).write_bytes(content[: len(content) // 3])
    open_shard.cache_clear()  # as a new process would begin
    with pytest.raises(InputError, match=r"shard-00000.safetensors is damaged: remove it"):
        train(tiny_settings(root, tmp_path / "again", views=1, cache_teacher=other, steps=1))
    with pytest.raises(InputError, match=r"shard-00000.safetensors is missing: every rank must see --cache-teacher"):
        TeacherCache(tmp_path / "elsewhere", (28,), layers=True).read(Key(0, 0, 28))


def test_a_replaced_photograph_is_not_served_from_the_cache(tmp_path: Path) -> None:
    make_teacher(tmp_path / "teacher")
    photos = make_photos(tmp_path / "photos", 6)
    cached = {"views": 1, "cache_teacher": tmp_path / "cache", "steps": 1}
    train(tiny_settings(tmp_path, tmp_path / "before", **cached))
    shard = shard_path(tmp_path / "cache", 28, 0, 0)
    before, written = load_file(shard), shard.stat().st_mtime_ns
    (photos / "001.png").touch()  # another time, the same photograph: nothing is computed again
    train(tiny_settings(tmp_path, tmp_path / "touched", **cached))
    assert shard.stat().st_mtime_ns == written
    shutil.copyfile(photos / "005.png", photos / "001.png")
    train(tiny_settings(tmp_path, tmp_path / "after", **cached))
    after = load_file(shard)
    assert [torch.equal(before["cls"][row], after["cls"][row]) for row in range(6)] == [row != 1 for row in range(6)]


def test_a_cache_of_something_else_is_refused(root: Path, cached_run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is of another run \(augment_seed: 0 there, 1 here\)"):
        train(tiny_settings(root, tmp_path / "run", views=2, cache_teacher=cached_run / "cache", augment_seed=1))
    with pytest.raises(InputError, match=r"is of another run \(trivial_augment: True there, False here\)"):
        train(tiny_settings(root, tmp_path / "run", views=2, cache_teacher=cached_run / "cache", trivial_augment=False))
    with pytest.raises(InputError, match="--cache-teacher needs --views"):
        tiny_settings(root, tmp_path / "run", cache_teacher=cached_run / "cache").validate()
