"""Windows, stitching, and dense heads on planted features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from veca.errors import InputError
from veca.images import short_side_size
from veca.tasks.base import dense
from veca.tasks.base.features import Cache, Features
from veca.tasks.base.heads import Head, NormedLinear
from veca.tasks.base.pairs import IGNORE, Pair
from veca.tasks.base.presets import DepthPreset, Layout, SegmentPreset
from veca.tasks.base.views import View, label_box, windows
from veca.tasks.depth import Depth, metres, scale_invariant
from veca.tasks.segment import Segmentation, palette

SIDE, GRID, WIDTH, CLASSES = 64, 4, 12, 3
NOWHERE = Layout("", "")
Planted = tuple[list[dense.Window], Features]


def planted(folder: Path, labels: torch.Tensor, shuffle: bool) -> Planted:
    """Images whose labels (V×4×4, one a patch) are a linear function of their cached features."""
    draw = torch.Generator().manual_seed(len(labels))
    pairs = []
    folder.mkdir()
    for number, label in enumerate(labels):
        pair = Pair(folder / f"{number}.png", folder / f"{number}.label.png")
        Image.new("RGB", (GRID, GRID)).save(pair.image)
        stored = label.numpy().astype(np.uint16 if label.is_floating_point() else np.uint8)
        Image.fromarray(stored).save(pair.label)
        pairs.append(pair)
    shown = labels[torch.randperm(len(labels), generator=draw)] if shuffle else labels
    patches = torch.randn(len(labels), GRID**2, WIDTH, generator=draw) * 0.1
    if labels.dtype == torch.float32:
        patches[..., 0] += shown.flatten(1) / 1000
    else:
        patches[..., :CLASSES] += torch.nn.functional.one_hot(shown.flatten(1).long() % CLASSES, CLASSES)
    cache = Cache(folder / "cache", 1e9)
    shard = cache.put("planted", {"global": torch.randn(len(labels), WIDTH).half(), "patches": patches.half()}, set())
    task = Segmentation(SegmentPreset(NOWHERE, CLASSES))
    return [window for pair in pairs for window in dense.sliding(pair, SIDE, task)], Features([shard], len(labels), 99)


def fit_and_score(task: Segmentation | Depth, train: Planted, test: Planted, steps: int = 100) -> dict[str, Any]:
    how = dense.Training(steps=steps, rate=1e-2)
    batches = dense.CachedBatches(*train, task)
    weight, bias = dense.train(batches, task, WIDTH, torch.device("cpu"), how, seed=0)
    head = Head("segment", weight, bias)
    return task.score(dense.predictions(head, task, [[window] for window in test[0]], test[1]))


def test_segmentation_finds_linear_labels_and_ignores_what_does_not_count(tmp_path: Path) -> None:
    labels = torch.randint(CLASSES, (60, GRID, GRID))
    labels[:40, 0, 0] = 255  # trained with ignored pixels
    task = Segmentation(SegmentPreset(NOWHERE, CLASSES))
    train, test = planted(tmp_path / "a", labels[:40], False), planted(tmp_path / "b", labels[40:], False)
    score = fit_and_score(task, train, test)
    assert score["mIoU"] == 1.0
    assert score["pixel_accuracy"] == 1.0


def test_segmentation_of_shuffled_labels_is_chance(tmp_path: Path) -> None:
    labels = torch.randint(CLASSES, (80, GRID, GRID))
    task = Segmentation(SegmentPreset(NOWHERE, CLASSES))
    train, test = planted(tmp_path / "a", labels[:40], True), planted(tmp_path / "b", labels[40:], True)
    score = fit_and_score(task, train, test, 30)
    assert score["pixel_accuracy"] == pytest.approx(1 / CLASSES, abs=0.08)


@pytest.mark.parametrize("kind", ["bins", "regression"])
def test_depth_is_found_where_it_is_linear(tmp_path: Path, kind: str) -> None:
    labels = torch.rand(60, GRID, GRID) * 6000 + 1000  # millimetres
    task = Depth(DepthPreset(NOWHERE, 1e-3, 1e-3, 10.0), kind)
    train, test = planted(tmp_path / "a", labels[:40], False), planted(tmp_path / "b", labels[40:], False)
    shuffled = planted(tmp_path / "c", labels[:40], True)
    assert fit_and_score(task, train, test, 300)["RMSE"] < 0.5
    assert fit_and_score(task, shuffled, test)["RMSE"] > 1.5  # the spread of the labels is 1.73


def test_loss_is_the_mean_over_counted_pixels_at_the_labels_resolution() -> None:
    task = Segmentation(SegmentPreset(NOWHERE, CLASSES))
    maps = [torch.randn(CLASSES, 2, 2), torch.randn(CLASSES, 2, 2)]
    labels = [torch.randint(CLASSES, (6, 5)), torch.full((4, 4), IGNORE)]
    labels[0][:3] = IGNORE
    whole = torch.nn.functional.interpolate(maps[0][None], size=(6, 5), mode="bilinear")[0]
    chosen = whole.log_softmax(0).flatten(1)[:, (labels[0] != IGNORE).flatten()]
    expected = -chosen.gather(0, labels[0][labels[0] != IGNORE][None]).mean()
    torch.testing.assert_close(task.loss(maps, labels), expected)
    assert task.loss(maps[1:], labels[1:]) == 0


def test_scale_invariant_loss_by_hand() -> None:
    error = torch.tensor([0.1, 0.5, -0.2])
    truth = torch.tensor([1.0, 2.0, 3.0])
    expected = ((error**2).mean() - 0.85 * error.mean() ** 2).sqrt()
    torch.testing.assert_close(scale_invariant(truth * error.exp(), truth), expected)


def test_depth_bins_stay_in_range() -> None:
    spread = metres(torch.randn(256, 3, 5) * 100, "bins", 0.5, 10.0)
    assert spread.shape == (1, 3, 5)
    assert spread.min() >= 0.5
    assert spread.max() <= 10.0
    one = torch.full((256, 1, 1), -1.0)
    one[100] = 1e6
    assert metres(one, "bins", 0.0, 255.0).item() == pytest.approx(100, abs=0.01)


@pytest.mark.parametrize(("width", "height"), [(64, 64), (65, 64), (107, 64), (64, 300), (128, 128), (500, 129)])
def test_windows_cover_every_pixel_and_overlap_by_a_third(width: int, height: int) -> None:
    seen = np.zeros((height, width), int)
    starts = windows(width, height, SIDE)
    for left, top in starts:
        assert left >= 0
        assert left + SIDE <= width
        assert top + SIDE <= height
        seen[top : top + SIDE, left : left + SIDE] += 1
    assert seen.min() >= 1
    for axis in (0, 1):
        steps = np.diff(sorted({start[axis] for start in starts}))
        assert (steps <= SIDE * 2 / 3 + 1).all()


def test_where_one_pass_fits_the_sliding_window_is_that_pass() -> None:
    maps = torch.randn(CLASSES, GRID, GRID)
    assert windows(SIDE, SIDE, SIDE) == [(0, 0)]
    box = label_box((0, 0), SIDE, (SIDE, SIDE), (37, 37))
    assert box == (0, 0, 37, 37)
    torch.testing.assert_close(dense.stitch([(box, maps)], (37, 37)), dense.upsample(maps, (37, 37)))


@pytest.mark.parametrize("size", [(4, 4), (37, 50), (5, 3), (1, 9)])
def test_upsampling_is_bilinear_interpolation(size: tuple[int, int]) -> None:
    maps = torch.randn(CLASSES, GRID, 6)
    expected = torch.nn.functional.interpolate(maps[None], size=size, mode="bilinear", align_corners=False)[0]
    torch.testing.assert_close(dense.upsample(maps, size), expected)


def test_sizes_first_met_while_scoring_can_be_trained_on() -> None:
    dense.axis_weights.cache_clear()
    maps = torch.randn(CLASSES, GRID, 6)
    with torch.inference_mode():
        scored = dense.upsample(maps, (11, 13))
    trained = maps.clone().requires_grad_()
    dense.upsample(trained, (11, 13)).sum().backward()
    assert trained.grad is not None
    torch.testing.assert_close(trained.grad.sum(), torch.tensor(float(CLASSES * 11 * 13)))
    with torch.autocast("cpu", dtype=torch.bfloat16):  # as in fine-tuning: the loss sees all digits
        torch.testing.assert_close(dense.upsample(maps, (11, 13)), scored.clone(), atol=0, rtol=0)


def test_overlapping_windows_are_averaged() -> None:
    first, second = torch.full((1, 2, 2), 1.0), torch.full((1, 2, 2), 3.0)
    whole = dense.stitch([((0, 0, 4, 4), first), ((2, 0, 6, 4), second)], (4, 6))
    assert whole[0, 0].tolist() == [1, 1, 2, 2, 3, 3]


def test_a_view_is_the_pixels_it_names(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (64, 96, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    straight, mirrored = (View(tmp_path / "a.png", 64, 64, (20, 0), flip).pixels() for flip in (False, True))
    torch.testing.assert_close(straight, mirrored.flip(1))
    np.testing.assert_array_equal(straight, pixels[:, 20:84])
    trimmed = View(tmp_path / "a.png", 32, 32, (0, 0), trim=(32, 32)).pixels()
    np.testing.assert_array_equal(trimmed, pixels[32:, 32:64])
    assert short_side_size(96, 64, 128) == (192, 128)
    with pytest.raises(InputError, match=r"strip.png: 1×20000 resized to"):
        short_side_size(1, 20_000, 504, "strip.png")


def test_folding_gives_the_same_answers_as_the_trained_layer() -> None:
    layer = NormedLinear(2 * WIDTH, CLASSES)
    for _ in range(5):
        layer(torch.randn(50, 2 * WIDTH) * 3 + 1)
    torch.nn.init.normal_(layer.norm.weight)
    torch.nn.init.normal_(layer.norm.bias)
    layer.eval()
    head = Head("segment", *layer.folded())
    whole, patches = torch.randn(WIDTH), torch.randn(GRID**2, WIDTH)
    expected = layer(dense.joined(whole, patches)).T.reshape(CLASSES, GRID, GRID)
    torch.testing.assert_close(head.on_grid(whole, patches), expected, atol=1e-5, rtol=1e-5)


def test_palette_is_pascal_vocs() -> None:
    expected = [[0, 0, 0], [128, 0, 0], [0, 128, 0], [192, 128, 128], [0, 64, 128]]
    assert palette(21)[[0, 1, 2, 15, 20]].tolist() == expected
