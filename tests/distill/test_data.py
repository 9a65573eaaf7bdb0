"""The plan of a run: the same images whatever the number of ranks, workers and interruptions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distill.runs import tiny_settings
from veca.augment import augment
from veca.distill.data import Batch, Key, Plan, Views, loaded
from veca.distill.sources import TrainingImages, index_images
from veca.images import open_image, resize_short_side, to_tensor
from veca.training.schedule import random_at


@pytest.fixture(scope="module")
def images(root: Path) -> TrainingImages:
    return index_images([str(root / "photos")])


def keys(root: Path, *, start: int = 0, rank: int = 0, ranks: int = 1, **changes: object) -> list[list[Key]]:
    settings = tiny_settings(root, root / "out", batch=8 // ranks, steps=6, **changes)
    plan = Plan(
        settings, [22], total=6, start=start, batch=settings.batch // settings.accumulate, rank=rank, ranks=ranks
    )
    return list(plan)


def test_each_image_once_an_epoch(root: Path) -> None:
    line = [key for batch in keys(root) for key in batch]
    assert sorted(key.number for key in line[:22]) == list(range(22))
    assert sorted(key.number for key in line[22:44]) == list(range(22))
    assert [key.view for key in line[:44]] == [0] * 22 + [1] * 22


def test_ranks_accumulation_and_resuming_divide_the_same_line(root: Path) -> None:
    whole = keys(root)
    two = [
        first + second for first, second in zip(keys(root, rank=0, ranks=2), keys(root, rank=1, ranks=2), strict=True)
    ]
    assert two == whole
    halves = keys(root, accumulate=2)
    assert [a + b for a, b in zip(halves[::2], halves[1::2], strict=True)] == whole
    assert keys(root, start=4) == whole[4:]


def test_fixed_views_repeat(root: Path) -> None:
    assert {key.view for batch in keys(root, views=1) for key in batch} == {0}


def test_late_resolutions_begin_at_their_share(root: Path) -> None:
    batches = keys(root, late_from=0.5, late_resolutions=(35,), late_resolution_weights=(1,))
    assert [batch[0].size for batch in batches] == [28, 28, 28, 35, 35, 35]


def test_a_view_is_the_augmentation_of_its_own_random_at(images: TrainingImages) -> None:
    item = Views(images, augment_seed=5)[Key(3, 2, 28)]
    expected = to_tensor(augment(open_image(images.read(3)), 28, random_at(5, "view", 2, 3)))
    assert torch.equal(item.image, expected)


def test_without_trivial_augment_a_view_is_crop_and_flip_only(images: TrainingImages) -> None:
    """Every pixel row of such a view stands in the resized photograph, as it is or mirrored."""
    views = Views(images, augment_seed=5, trivial=False)
    for number in range(len(images)):
        view = views[Key(number, 0, 28)].image
        whole = to_tensor(resize_short_side(open_image(images.read(number)), 32))
        rows, columns = whole.shape[1] - 27, whole.shape[2] - 27
        crops = [whole[:, top : top + 28, left : left + 28] for top in range(rows) for left in range(columns)]
        assert any(torch.equal(view, crop) or torch.equal(view, crop.flip(2)) for crop in crops)


def test_workers_change_nothing(root: Path, images: TrainingImages) -> None:
    plan = keys(root)
    views = Views(images, augment_seed=0)
    batches: list[list[Batch]] = [list(loaded(views, plan, workers, pin=False)) for workers in (0, 2)]
    for alone, shared in zip(*batches, strict=True):
        assert torch.equal(alone.images, shared.images)
        assert alone.numbers == shared.numbers
