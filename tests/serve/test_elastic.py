"""The controller by itself: a made-up clock and made-up queues."""

from __future__ import annotations

from itertools import pairwise

import pytest

from veca.serve.elastic import HIGH, LOW, Controller, Level, ladder

LEVELS = [Level(800), Level(800, 0.75), Level(800, 0.5), Level(400, 0.5)]  # an image costs 8, 6, 4 and 1


def controller(objective: float | None = 1.0) -> Controller:
    return Controller(LEVELS, objective, patience=2.0)


def test_the_ladder_goes_down_in_patches_and_then_in_sizes() -> None:
    assert ladder(512, 512, 16) == [(512, 1.0), (512, 0.7), (512, 0.5)]  # the size is not ours to change
    assert ladder(512, 256, 16)[2:] == [(512, 0.5), (400, 0.5), (320, 0.5), (256, 0.5)]
    assert ladder(500, 333, 14)[-1].size == 333
    assert all(level.size % 14 == 0 for level in ladder(448, 140, 14))


@pytest.mark.parametrize(("size", "least", "patch"), [(448, 140, 14), (1024, 16, 16), (30, 14, 14), (16, 16, 16)])
def test_every_level_costs_less_than_the_one_before(size: int, least: int, patch: int) -> None:
    levels = ladder(size, least, patch)
    assert all(after.cost < before.cost for before, after in pairwise(levels))
    for aspect in (1, 1.5, 3):
        grids = [(max(1, level.size // patch), max(1, int(level.size * aspect) // patch)) for level in levels]
        tokens = [level.tokens(grid) for level, grid in zip(levels, grids, strict=True)]
        assert tokens == sorted(tokens, reverse=True)
        assert tokens[0] == grids[0][0] * grids[0][1]


def test_without_an_objective_nothing_changes() -> None:
    fixed = controller(objective=None)
    assert all(fixed.update(now, 1000.0) == LEVELS[0] for now in range(10))


def test_goes_down_as_far_as_the_costs_say() -> None:
    down = controller()
    assert down.update(0.0, HIGH) == LEVELS[0]  # on the line: stays
    assert down.update(0.1, 1.0) == LEVELS[1]  # 1.0 × 6/8 fits under 0.8
    far = controller()
    assert far.update(0.0, 1.5) == LEVELS[2]  # 1.5 × 4/8 fits
    farther = controller()
    assert farther.update(0.0, 100.0) == LEVELS[3]  # nothing fits: the least
    assert farther.update(0.1, 100.0) == LEVELS[3]


def test_a_step_down_is_given_time_to_show() -> None:
    """What waits was decoded at the old level: it stays slow for a while, and is no reason to go down twice."""
    patient = controller()
    assert patient.update(0.0, 0.9) == LEVELS[1]
    assert patient.update(0.5, 0.9) == LEVELS[1]
    assert patient.update(0.95, 0.9) == LEVELS[2]  # it did not help
    assert patient.update(1.0, 50.0) == LEVELS[2]
    assert patient.update(1.9, 50.0) == LEVELS[3]


def test_goes_up_a_level_at_a_time_after_its_patience() -> None:
    up = controller()
    up.update(0.0, 100.0)
    seen = [up.update(1.0 + 0.5 * step, 0.01) for step in range(16)]
    assert seen[:4] == [LEVELS[3]] * 4  # calm since 1.0, patience 2
    assert seen[4] == LEVELS[2]
    assert seen[8] == LEVELS[1]
    assert seen[12] == LEVELS[0]


def test_does_not_go_up_when_the_level_above_would_be_too_slow() -> None:
    steady = controller()
    steady.update(0.0, 100.0)
    expected = LOW * 0.3  # × 4/1 at the level above is over LOW
    assert all(steady.update(float(now), expected) == LEVELS[3] for now in range(1, 50))


def test_a_burst_ends_the_calm() -> None:
    nervous = controller()
    nervous.update(0.0, 100.0)
    nervous.update(1.0, 0.01)
    nervous.update(2.9, 0.5)  # neither too slow nor calm
    assert nervous.update(3.1, 0.01) == LEVELS[3]
    assert nervous.update(4.9, 0.01) == LEVELS[3]
    assert nervous.update(5.2, 0.01) == LEVELS[2]


def test_a_long_silence_is_many_patiences() -> None:
    idle = controller()
    idle.update(0.0, 100.0)
    idle.update(1.0, 0.01)  # the queue is empty; then nobody asks for an hour
    assert idle.update(3600.0, 0.01) == LEVELS[0]


def test_a_steady_load_settles() -> None:
    """A closed loop of clients whose wait is proportional to the cost of the level: no swinging between levels."""
    loop = controller()
    visited = [loop.update(now * 0.1, 0.96 * (loop.level.cost / 800**2)) for now in range(200)]
    assert len(set(visited[20:])) == 1
    assert 0.96 * (visited[-1].cost / 800**2) <= HIGH
