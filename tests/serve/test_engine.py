"""The engine by itself: the order of jobs, what is not run, and what it expects."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from veca.errors import InputError
from veca.serve.elastic import Controller, Level
from veca.serve.engine import Engine
from veca.serve.metrics import Metrics


def engine_of(objective: float | None = None) -> Engine:
    return Engine(Controller([Level(64), Level(64, 0.5)], objective, 1.0), Metrics(), patch_size=16, threads=1)


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = engine_of()
    made.start()
    yield made
    made.stop()


def test_jobs_run_one_after_the_other_in_their_order(engine: Engine) -> None:
    seen: list[int] = []
    running = threading.Lock()

    def work(number: int) -> int:
        assert running.acquire(blocking=False)
        assert torch.is_inference_mode_enabled()
        seen.append(number)
        time.sleep(0.002)
        running.release()
        return -number

    jobs = [engine.submit(lambda number=number: work(number), 16) for number in range(10)]  # type: ignore[misc]
    assert [job.result(timeout=30) for job in jobs] == [-number for number in range(10)]
    assert seen == list(range(10))
    assert engine.busy() == 0


def test_what_a_job_refuses_is_passed_on(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> None:
        raise InputError("not this")

    with pytest.raises(InputError, match="not this"):
        engine.submit(refuse, 16).result(timeout=30)
    assert not caplog.records  # a client's mistake is nothing for the operator


def test_a_job_that_fails_is_logged_and_the_next_one_runs(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("not enough memory")

    with pytest.raises(RuntimeError, match="not enough memory"):
        engine.submit(fail, 16).result(timeout=30)
    assert engine.submit(lambda: 1, 16).result(timeout=30) == 1
    assert engine.alive
    assert "the model failed on 16 tokens" in caplog.text


def test_a_cancelled_job_costs_no_work(engine: Engine) -> None:
    seen: list[int] = []
    let_go = threading.Event()
    engine.submit(let_go.wait, 16)
    jobs = [engine.submit(lambda number=number: seen.append(number), 16) for number in range(3)]  # type: ignore[misc]
    engine.rate = 1.0
    assert engine.expected() == pytest.approx(16 + 3 * 16 + 16, abs=1)  # running, waiting, and the one that asks
    jobs[0].cancel()
    jobs[2].cancel()
    assert engine.expected() == pytest.approx(16 + 16 + 16, abs=1)
    let_go.set()
    jobs[1].result(timeout=30)
    assert seen == [1]


def test_the_level_falls_with_the_queue_and_rises_again() -> None:
    engine = engine_of(objective=0.05)
    engine.start()
    let_go = threading.Event()
    engine.submit(let_go.wait, 16)
    assert engine.level() == (64, 1.0)  # nothing is known of the cost yet
    engine.rate = 0.03 / 16
    assert engine.level() == (64, 0.5)
    let_go.set()
    engine.submit(lambda: None, 16).result(timeout=30)
    engine.controller.patience = 1e-6
    engine.rate = 1e-9
    levels = [engine.level() for _ in range(3)]
    assert levels[-1] == (64, 1.0)
    engine.stop()


def test_a_stopped_engine_finishes_what_waits_and_takes_nothing_more() -> None:
    engine = engine_of()
    jobs = [engine.submit(lambda: "done", 1) for _ in range(3)]
    engine.start()
    engine.stop()
    assert [job.result(timeout=0) for job in jobs] == ["done"] * 3
    assert not engine.alive
    with pytest.raises(RuntimeError):
        engine.submit(lambda: None, 1)
