"""The controller by itself: a made-up clock and made-up queues."""

from __future__ import annotations

import pytest

from veca import VecaConfig
from veca.bench.flops import closed_form_flops
from veca.serve.elastic import HIGH, LOW, Controller, Rung, image_cost, ladder

RUNGS = [Rung(512, 64), Rung(512, 32), Rung(512, 8), Rung(256, 8)]
COSTS = [8.0, 6.0, 4.0, 1.0]


def controller(objective: float | None = 1.0) -> Controller:
    return Controller(RUNGS, COSTS, objective, patience=2.0)


def test_ladder_lowers_cores_first_then_the_size() -> None:
    rungs = ladder(size=512, cores=64, least_size=256, least_cores=8, patch_size=16)
    assert rungs[0] == Rung(512, 64)
    assert rungs[-1] == Rung(256, 8)
    assert [rung.cores for rung in rungs[:8]] == [64, 56, 48, 40, 32, 24, 16, 8]
    assert all(rung.cores == 8 and rung.size < 512 for rung in rungs[8:])
    assert all(rung.size % 16 == 0 for rung in rungs)


def test_ladder_keeps_to_its_bounds() -> None:
    assert ladder(512, 64, 512, 64, 16) == [Rung(512, 64)]
    assert {rung.size for rung in ladder(512, 64, 512, 8, 16)} == {512}  # the size is not ours to change
    assert min(rung.cores for rung in ladder(512, 64, 128, 20, 14)) == 20
    assert ladder(500, 10, 333, 3, 14)[-1] == Rung(333, 3)


@pytest.mark.parametrize("attention", ["core", "dense"])
@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
def test_costs_are_the_models_flops(attention: str, mlp: str) -> None:
    config = VecaConfig(attention=attention, mlp=mlp)  # type: ignore[arg-type]
    for size, cores in ((256, 8), (512, 64)):
        patches = (size // config.patch_size) ** 2
        assert image_cost(config, patches, cores) == pytest.approx(closed_form_flops(config, size, cores), rel=1e-3)


def test_without_an_objective_nothing_changes() -> None:
    fixed = controller(objective=None)
    assert all(fixed.update(now, 1000.0) == RUNGS[0] for now in range(10))


def test_goes_down_as_far_as_the_costs_say() -> None:
    down = controller()
    assert down.update(0.0, HIGH) == RUNGS[0]  # on the line: stays
    assert down.update(0.1, 1.0) == RUNGS[1]  # 1.0 × 6/8 fits under 0.8
    far = controller()
    assert far.update(0.0, 1.5) == RUNGS[2]  # 1.5 × 4/8 fits
    farther = controller()
    assert farther.update(0.0, 100.0) == RUNGS[3]  # nothing fits: the least
    assert farther.update(0.1, 100.0) == RUNGS[3]


def test_a_step_down_is_given_time_to_show() -> None:
    """What waits was decoded at the old size: it stays slow for a while, and is no reason to go down twice."""
    patient = controller()
    assert patient.update(0.0, 0.9) == RUNGS[1]
    assert patient.update(0.5, 0.9) == RUNGS[1]
    assert patient.update(0.95, 0.9) == RUNGS[2]  # it did not help
    assert patient.update(1.0, 50.0) == RUNGS[2]
    assert patient.update(1.9, 50.0) == RUNGS[3]


def test_goes_up_a_rung_at_a_time_after_its_patience() -> None:
    up = controller()
    up.update(0.0, 100.0)
    seen = [up.update(1.0 + 0.5 * step, 0.01) for step in range(16)]
    assert seen[:4] == [RUNGS[3]] * 4  # calm since 1.0, patience 2
    assert seen[4] == RUNGS[2]
    assert seen[8] == RUNGS[1]
    assert seen[12] == RUNGS[0]


def test_does_not_go_up_when_the_rung_above_would_be_too_slow() -> None:
    steady = controller()
    steady.update(0.0, 100.0)
    expected = LOW * 0.3  # × 4/1 on the rung above is over LOW
    assert all(steady.update(float(now), expected) == RUNGS[3] for now in range(1, 50))


def test_a_burst_ends_the_calm() -> None:
    nervous = controller()
    nervous.update(0.0, 100.0)
    nervous.update(1.0, 0.01)
    nervous.update(2.9, 0.5)  # neither too slow nor calm
    assert nervous.update(3.1, 0.01) == RUNGS[3]
    assert nervous.update(4.9, 0.01) == RUNGS[3]
    assert nervous.update(5.2, 0.01) == RUNGS[2]


def test_a_long_silence_is_many_patiences() -> None:
    idle = controller()
    idle.update(0.0, 100.0)
    idle.update(1.0, 0.01)  # the queue is empty; then nobody asks for an hour
    assert idle.update(3600.0, 0.01) == RUNGS[0]


def test_a_steady_load_settles() -> None:
    """A closed loop of clients whose wait is proportional to the cost of the rung: no swinging between rungs."""
    loop = controller()
    visited = [loop.index for now in range(200) if loop.update(now * 0.1, 0.12 * COSTS[loop.index])]
    assert len(set(visited[20:])) == 1
    assert 0.12 * COSTS[visited[-1]] <= HIGH
