"""Scores against a few lines of numpy, ignored pixels and absent classes included."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from veca.tasks.base import metrics
from veca.tasks.base.pairs import IGNORE


def one_hot(prediction: np.ndarray, classes: int) -> torch.Tensor:  # H×W → K×H×W
    return torch.nn.functional.one_hot(torch.from_numpy(prediction), classes).permute(2, 0, 1).float()


def test_iou_by_hand_with_an_ignored_pixel_and_an_absent_class() -> None:
    label = np.array([[0, 0, 1], [1, 1, IGNORE]])
    guess = np.array([[0, 1, 1], [1, 0, 3]])  # class 2 is nowhere; class 3 is guessed only where it does not count
    score = metrics.segmentation([(one_hot(guess, 4), torch.from_numpy(label))], 4)
    assert score["per_class"] == [pytest.approx(1 / 3), pytest.approx(2 / 4), None, None]
    assert score["mIoU"] == pytest.approx((1 / 3 + 2 / 4) / 2)
    assert score["pixel_accuracy"] == pytest.approx(3 / 5)


def test_a_class_that_is_guessed_but_never_there_counts_as_zero() -> None:
    score = metrics.segmentation([(one_hot(np.array([[0, 2]]), 3), torch.tensor([[0, 0]]))], 3)
    assert score["per_class"] == [0.5, None, 0.0]
    assert score["mIoU"] == 0.25


def test_iou_against_numpy_over_several_images() -> None:
    draw = np.random.default_rng(0)
    images = []
    for size in ((7, 9), (16, 5), (1, 3)):
        label = draw.integers(IGNORE, 5, size)
        images.append((draw.integers(0, 5, size), label))
    guess, label = (np.concatenate([pair[part].ravel() for pair in images]) for part in (0, 1))
    guess, label = guess[label != IGNORE], label[label != IGNORE]
    expected = [((guess == k) & (label == k)).sum() / ((guess == k) | (label == k)).sum() for k in range(5)]
    score = metrics.segmentation([(one_hot(g, 5), torch.from_numpy(y)) for g, y in images], 5)
    assert score["per_class"] == pytest.approx(expected)
    assert score["mIoU"] == pytest.approx(np.mean(expected))
    assert score["pixel_accuracy"] == pytest.approx((guess == label).mean())


def test_depth_against_numpy_over_known_pixels_of_all_images_together() -> None:
    draw = np.random.default_rng(1)
    images = []
    for size in ((4, 6), (3, 3), (2, 2)):
        truth = draw.uniform(0.5, 9, size).astype(np.float32) * (draw.random(size) > 0.3)
        images.append((draw.uniform(0.5, 9, size).astype(np.float32), truth.astype(np.float32)))
    images.append((np.ones((2, 2), np.float32), np.zeros((2, 2), np.float32)))  # knows nothing: left out
    guess, truth = (np.concatenate([pair[part].ravel() for pair in images]) for part in (0, 1))
    guess, truth = guess[truth > 0], truth[truth > 0]
    score = metrics.depth((torch.from_numpy(g)[None], torch.from_numpy(t)) for g, t in images)
    assert score["RMSE"] == pytest.approx(np.sqrt(((guess - truth) ** 2).mean()), rel=1e-5)
    assert score["AbsRel"] == pytest.approx((np.abs(guess - truth) / truth).mean(), rel=1e-5)
    assert score["delta1"] == pytest.approx((np.maximum(guess / truth, truth / guess) < 1.25).mean(), rel=1e-5)


def test_accuracy_against_numpy_with_a_class_without_images() -> None:
    draw = np.random.default_rng(2)
    logits, labels = draw.normal(size=(40, 7)).astype(np.float32), draw.integers(0, 6, 40)
    order = np.argsort(-logits, axis=1)
    score = metrics.accuracy(torch.from_numpy(logits), torch.from_numpy(labels))
    assert score["top1"] == pytest.approx((order[:, 0] == labels).mean())
    assert score["top5"] == pytest.approx((order[:, :5] == labels[:, None]).any(1).mean())
    expected = [(order[labels == k, 0] == k).mean() for k in range(6)]
    assert score["per_class"][:6] == pytest.approx(expected)
    assert score["per_class"][6] is None


def test_two_classes_have_no_top5() -> None:
    assert set(metrics.accuracy(torch.eye(2), torch.tensor([0, 1]))) == {"top1", "per_class"}


def test_any_of_several_right_answers_counts_and_images_without_one_do_not() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    assert metrics.accuracy_of_any(logits, [(1, 2), (1, 2), ()])["top1"] == 0.5


def test_average_precision_against_numpy() -> None:
    draw = np.random.default_rng(3)
    logits, labels = draw.normal(size=(30, 4)).astype(np.float32), draw.integers(0, 2, (30, 4))
    labels[:, 3] = 0  # no image has this class

    def precision(scores: np.ndarray, truth: np.ndarray) -> float:
        hits = truth[np.argsort(-scores)]
        return float((np.cumsum(hits) / np.arange(1, len(hits) + 1))[hits == 1].mean())

    expected = [precision(logits[:, k], labels[:, k]) for k in range(3)]
    score = metrics.average_precision(torch.from_numpy(logits), torch.from_numpy(labels))
    assert score["per_class"][:3] == pytest.approx(expected, abs=1e-6)
    assert score["per_class"][3] is None
    assert score["mAP"] == pytest.approx(np.mean(expected), abs=1e-6)
