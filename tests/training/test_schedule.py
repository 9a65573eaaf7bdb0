from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from veca.training.schedule import choose, epoch_order, learning_rate, random_at


def test_the_papers_rates(shared: Path) -> None:
    r = json.loads((shared / "reference" / "lr.json").read_text())
    rates = [
        learning_rate(s, r["total_steps"], r["warmup_steps"], r["base"], r["minimum"]) for s in range(len(r["lr"]))
    ]
    np.testing.assert_allclose(rates, r["lr"], rtol=1e-12)


def test_no_warmup_starts_at_the_highest_rate() -> None:
    assert learning_rate(0, 10, 0, 1.0, 0.1) == 1.0
    assert learning_rate(10, 10, 0, 1.0, 0.1) == pytest.approx(0.1)


def test_draws_depend_on_seed_and_step_only_and_follow_the_weights() -> None:
    budgets, weights = (8, 16, 24, 32, 40, 48, 56, 64), (1, 1, 2, 2, 3, 3, 4, 4)
    drawn = [choose(budgets, weights, 0, "budget", step) for step in range(4000)]
    assert drawn[1234] == choose(budgets, weights, 0, "budget", 1234)
    assert drawn != [choose(budgets, weights, 1, "budget", step) for step in range(4000)]
    counts = Counter(drawn)
    for budget, weight in zip(budgets, weights, strict=True):
        assert counts[budget] / 4000 == pytest.approx(weight / 20, abs=0.025)


def test_a_stream_is_the_same_on_every_machine() -> None:
    assert random_at(3, "view", 1, 77).getrandbits(32) == 3098723124  # a changed value breaks every resumed run


def test_every_image_once_an_epoch_in_another_order() -> None:
    groups = [5, 1, 9, 4]
    orders = [epoch_order(groups, 0, epoch) for epoch in range(3)]
    for order in orders:
        assert sorted(order) == list(range(19))
    assert not np.array_equal(orders[0], orders[1])
    assert np.array_equal(orders[1], epoch_order(groups, 0, 1))


def test_only_a_few_shards_are_read_at_a_time() -> None:
    order = epoch_order([10] * 40, 0, 0, window=4)
    for begin in range(0, 400, 40):
        assert len({image // 10 for image in order[begin : begin + 40]}) == 4
