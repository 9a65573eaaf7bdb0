"""Planted answers: what is linear must be found, what is random must score at chance."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from veca.probes import knn
from veca.tasks import classify
from veca.tasks.base.classes import ClassData, Example, held_out

CLASSES, WIDTH = 4, 24


def data(labels: torch.Tensor, test: torch.Tensor, several: bool = False) -> ClassData:
    def examples(rows: torch.Tensor) -> tuple[Example, ...]:
        if several:
            return tuple(Example(Path(), tuple(row.nonzero()[:, 0].tolist())) for row in rows)
        return tuple(Example(Path(), (int(row),)) for row in rows)

    return ClassData(tuple("abcd"), examples(labels), (), examples(test), several)


def planted(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of which the label is a linear function with a margin."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=draw)
    features = torch.randn(count, WIDTH, generator=draw)
    features[:, :CLASSES] += 12 * torch.nn.functional.one_hot(labels, CLASSES)
    return features, labels


def top1(weight: torch.Tensor, bias: torch.Tensor, features: torch.Tensor, labels: torch.Tensor) -> float:
    return float(classify.score(torch.nn.functional.linear(features, weight, bias), labels)["top1"])


def test_linear_labels_score_one() -> None:
    (train, labels), (test, truth) = planted(300, 0), planted(200, 1)
    weight, bias, choice = classify.train(data(labels, truth), train, None, classify.Training(epochs=20), seed=0)
    assert top1(weight, bias, test, truth) == 1.0
    assert choice["rate"] in classify.RATES
    assert choice["validation"] == 1.0


def test_shuffled_labels_score_at_chance() -> None:
    (train, labels), (test, truth) = planted(400, 0), planted(1000, 1)
    labels, truth = labels[torch.randperm(len(labels))], truth[torch.randperm(len(truth))]
    weight, bias, _ = classify.train(data(labels, truth), train, None, classify.Training(epochs=5), seed=0)
    assert top1(weight, bias, test, truth) == pytest.approx(1 / CLASSES, abs=0.06)  # over four standard deviations


def test_several_labels_are_scored_by_average_precision() -> None:
    draw = torch.Generator().manual_seed(0)
    truth = torch.randint(2, (400, CLASSES), generator=draw)
    features = torch.randn(400, WIDTH, generator=draw)
    features[:, :CLASSES] += 8 * truth
    train, test = data(truth[:300], truth[300:], several=True), features[300:]
    weight, bias, _ = classify.train(train, features[:300], None, classify.Training(epochs=40), seed=0)
    score = classify.score(torch.nn.functional.linear(test, weight, bias), truth[300:])
    assert score["mAP"] == pytest.approx(1.0, abs=1e-3)


def test_rates_trained_together_equal_each_trained_alone() -> None:
    features, labels = planted(100, 0)
    how = classify.Training(epochs=3)
    together = classify.fit(features, labels, CLASSES, (0.01, 0.1), how, seed=3)
    for rate, (weight, bias) in zip((0.01, 0.1), together, strict=True):
        alone = classify.fit(features, labels, CLASSES, (rate,), how, seed=3)[0]
        torch.testing.assert_close((weight, bias), alone)


def test_a_rate_that_explodes_does_not_spoil_the_others() -> None:
    features, labels = planted(200, 0)
    features = features * 1e4
    weight, bias, _ = classify.train(data(labels, labels), features, None, classify.Training(epochs=5), seed=0)
    assert top1(weight, bias, features, labels) > 0.95


def test_own_validation_images_choose_the_rate() -> None:
    (train, labels), (valid, valid_labels) = planted(200, 0), planted(50, 2)
    parts = data(labels, labels)
    parts = ClassData(parts.classes, parts.train, data(valid_labels, labels).train, parts.test, False)
    _, _, choice = classify.train(parts, train, valid, classify.Training(epochs=5), seed=0)
    assert choice["validation"] == 1.0


def test_held_out_takes_a_share_of_every_class() -> None:
    examples = [Example(Path(), (number % 3,)) for number in range(30)] + [Example(Path(), (3,))]
    kept, out = held_out(examples, 0.2, seed=0)
    assert sorted(kept + out) == list(range(31))
    assert [sum(examples[number].labels == (label,) for number in out) for label in range(4)] == [2, 2, 2, 0]
    assert held_out(examples, 0.2, seed=1)[1] != out


def test_nearest_neighbours_by_cosine() -> None:
    (train, labels), (test, truth) = planted(300, 0), planted(100, 1)
    assert knn.scores(train, labels, test * 50, truth, CLASSES) == {"top1_k1": 1.0, "top1_k20": 1.0}
    few = knn.scores(torch.eye(2), torch.tensor([0, 1]), torch.tensor([[3.0, 1.0]]), torch.tensor([0]), 2)
    assert few == {"top1_k1": 1.0, "top1_k20": 1.0}


def test_shuffled_neighbours_score_at_chance() -> None:
    (train, labels), (test, truth) = planted(400, 0), planted(1000, 1)
    found = knn.scores(train, labels[torch.randperm(400)], test, truth[torch.randperm(1000)], CLASSES)
    assert found["top1_k20"] == pytest.approx(1 / CLASSES, abs=0.06)
