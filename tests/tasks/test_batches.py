"""Batches without end: every example once a round, in an order of its own."""

from __future__ import annotations

import random

import pytest

from veca.tasks.base.batches import endless_batches


def test_every_example_once_a_round_in_a_new_order() -> None:
    batches = endless_batches(6, 4, random.Random(0), lambda number: 10 * number)
    items = [item for _ in range(9) for item in next(batches)]
    batches.close()
    rounds = [items[start : start + 6] for start in range(0, 36, 6)]
    assert all(sorted(one) == [0, 10, 20, 30, 40, 50] for one in rounds)
    assert len(set(map(tuple, rounds))) > 1
    assert items[:4] == next(endless_batches(6, 4, random.Random(0), lambda number: 10 * number))


def test_what_an_example_raises_is_raised() -> None:
    def load(number: int) -> int:
        raise ValueError(f"example {number}")

    with pytest.raises(ValueError, match="example"):
        next(endless_batches(3, 2, random.Random(0), load))
