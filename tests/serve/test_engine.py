"""The engine by itself, with a real small model: what is batched, what is not run, and what comes out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from veca import Veca, VecaConfig
from veca.errors import InputError
from veca.images import to_tensor
from veca.model import VecaOutput
from veca.serve.elastic import Controller, Rung, image_cost
from veca.serve.engine import Engine, Job, Ticket
from veca.serve.metrics import Metrics

CONFIG = VecaConfig(depth=2, width=32, heads=2, patch_size=16)
RUNGS = [Rung(64, 64), Rung(64, 8)]


class Watched(Veca):
    """Remembers the batches it was given; can be told to refuse batches, or one image."""

    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.seen: list[tuple[int, int, tuple[int, int]]] = []  # images, cores, grid
        self.most = 1000
        self.seconds = 0.0

    def forward(self, images: torch.Tensor, cores: int | None = None, return_attention: bool = False) -> VecaOutput:
        assert cores is not None
        time.sleep(self.seconds)
        if len(images) > self.most:
            raise RuntimeError("not enough memory")
        out = super().forward(images, cores)
        self.seen.append((len(images), cores, out.grid))
        return out


@pytest.fixture
def model() -> Watched:
    return Watched().eval()


def engine_of(model: Veca, batch: int = 4, delay: float = 0.2, objective: float | None = None, **more: Any) -> Engine:
    costs = [image_cost(CONFIG, 16, rung.cores) for rung in RUNGS]
    more = {"batch_patches": 10_000, "threads": 1, **more}
    return Engine(model, Controller(RUNGS, costs, objective, 1.0), Metrics(), batch, delay, **more)


@pytest.fixture
def engine(model: Watched) -> Iterator[Engine]:
    made = engine_of(model)
    made.thread.start()
    yield made
    made.stop()


def ticket(seed: int, cores: int | None = 16, grid: tuple[int, int] = (4, 4), dense: bool = True) -> Ticket:
    pixels = np.random.default_rng(seed).integers(0, 256, (grid[0] * 16, grid[1] * 16, 3), dtype=np.uint8)
    return Ticket(pixels, grid, cores, dense)


@torch.inference_mode()
def alone(model: Veca, of: Ticket, cores: int) -> VecaOutput:
    from PIL import Image

    return Veca.forward(model, to_tensor(Image.fromarray(of.pixels))[None], cores)


def test_batches_by_grid_and_budget_and_answers_as_if_alone(model: Watched, engine: Engine) -> None:
    tickets = [ticket(0), ticket(1, cores=8), ticket(2, grid=(2, 5)), ticket(3), ticket(4, cores=8), ticket(5)]
    with engine.changed:  # all at once
        engine.waiting.extend(tickets)
        engine.changed.notify()
    answers = [item.future.result(timeout=30) for item in tickets]
    assert sorted(model.seen) == sorted([(3, 16, (4, 4)), (2, 8, (4, 4)), (1, 16, (2, 5))])
    for item, answer in zip(tickets, answers, strict=True):
        expected = alone(model, item, item.cores or 0)
        assert answer.patches is not None
        np.testing.assert_allclose(answer.cls, expected.cls[0], atol=1e-5)
        np.testing.assert_allclose(answer.patches.reshape(-1, 32), expected.patches[0], atol=1e-5)
        assert (answer.grid, answer.cores) == (item.grid, item.cores)


def test_jobs_run_alone_and_pass_on_what_they_refuse(model: Watched, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(cores: int) -> None:
        raise InputError("not this")

    engine = engine_of(model, delay=1000.0)
    jobs = [Job(lambda cores: cores, 16, 7), Job(lambda cores: -cores, 16, 7), Job(lambda cores: cores, 16, None)]
    wrong = Job(refuse, 16, 7)
    engine.waiting.extend([*jobs, wrong])
    engine.thread.start()
    assert [job.future.result(timeout=30) for job in jobs] == [7, -7, 64]
    with pytest.raises(InputError, match="not this"):
        wrong.future.result(timeout=30)
    engine.stop()
    assert not caplog.records  # a client's mistake is nothing for the operator


def test_a_full_batch_does_not_wait(model: Watched) -> None:
    engine = engine_of(model, batch=2, delay=1000.0)
    engine.thread.start()
    tickets = [ticket(0, grid=(2, 2)), *(ticket(seed) for seed in (1, 2))]
    for item in tickets:
        engine.submit(item)
    for item in tickets[1:]:
        item.future.result(timeout=30)
    assert not tickets[0].future.done()  # still waits for company
    engine.stop()  # … which ends when the engine does
    assert tickets[0].future.result(timeout=0).batch == 1


def test_a_batch_holds_no_more_patches_than_allowed(model: Watched) -> None:
    engine = engine_of(model, batch=8, batch_patches=40)
    tickets = [ticket(seed) for seed in range(5)]  # 16 patches each
    engine.waiting.extend(tickets)
    engine.thread.start()
    engine.stop()
    assert [images for images, _, _ in model.seen] == [2, 2, 1]


def test_a_cancelled_ticket_costs_no_work(model: Watched) -> None:
    engine = engine_of(model)
    tickets = [ticket(seed) for seed in range(3)]
    engine.waiting.extend(tickets)
    tickets[0].future.cancel()
    tickets[2].future.cancel()
    engine.thread.start()
    assert tickets[1].future.result(timeout=30).batch == 1
    engine.stop()
    assert model.seen == [(1, 16, (4, 4))]


def test_tickets_cancelled_at_any_moment_leave_the_engine_alive(
    model: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, gone = engine_of(model), ticket(0)
    update = engine._update

    def leave_meanwhile() -> Rung:  # between the look at the queue and the choice of a batch
        gone.future.cancel()
        return update()

    monkeypatch.setattr(engine, "_update", leave_meanwhile)
    engine.waiting.append(gone)
    engine.thread.start()
    assert engine.submit(ticket(1)).result(timeout=30).batch == 1
    assert engine.alive
    engine.stop()


def test_a_batch_that_fails_is_tried_one_by_one(model: Watched) -> None:
    engine = engine_of(model)
    model.most = 1
    tickets = [ticket(seed) for seed in range(3)]
    engine.waiting.extend(tickets)
    engine.thread.start()
    assert [item.future.result(timeout=30).batch for item in tickets] == [1, 1, 1]
    model.most = 0
    last = engine.submit(ticket(9))
    with pytest.raises(RuntimeError, match="not enough memory"):
        last.result(timeout=30)
    assert engine.alive
    engine.stop()


def test_without_dense_no_patches_are_copied(engine: Engine) -> None:
    assert engine.submit(ticket(0, dense=False)).result(timeout=30).patches is None


def test_the_budget_falls_with_the_queue_and_own_budgets_stay(model: Watched) -> None:
    engine = engine_of(model, batch=1, objective=0.05)
    engine.start(warm=(4, 4))
    model.seen.clear()
    model.seconds = 0.03
    own = ticket(0, cores=40)
    tickets = [ticket(seed, cores=None) for seed in range(1, 8)]
    with engine.changed:
        engine.rate = 0.03 / engine.controller.costs[0]
        engine.waiting.extend([*tickets, own])
        engine.changed.notify()
    answers = [item.future.result(timeout=30) for item in tickets]
    assert answers[0].cores == 8
    assert own.future.result(timeout=30).cores == 40
    assert engine.expected() < 1.0
    model.seconds = 0.0
    engine.controller.patience = 1e-6
    engine.rate = 1e-15
    for _ in range(3):
        engine.rung()
    assert engine.submit(ticket(20, cores=None)).result(timeout=30).cores == 64
    engine.stop()


def test_a_stopped_engine_takes_nothing(model: Watched) -> None:
    engine = engine_of(model)
    engine.start(warm=(1, 1))
    engine.stop()
    assert not engine.alive
    with pytest.raises(RuntimeError):
        engine.submit(ticket(0))
