"""The model in a thread of its own, fed by a queue that is batched by grid and budget.

A ticket is one decoded image. The thread takes the oldest ticket, joins to it whatever waits with the same grid and
budget, waits for more at most `delay` after the oldest arrived, and runs them as one batch. A ticket whose future was
cancelled (its client left, or its time ran out) is dropped unrun. A ticket without a budget of its own gets the one
that the elastic controller can afford at the moment it is run. A job is a ticket for anything else that the model does
for a client; it runs alone.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from veca.errors import InputError
from veca.images import to_tensor
from veca.model import Veca
from veca.serve.elastic import Controller, Rung, image_cost
from veca.serve.metrics import Metrics

log = logging.getLogger("veca.serve")
STOP = 5.0  # seconds for the batch that runs at the end, whose clients have gone


class Answer(NamedTuple):
    cls: np.ndarray[Any, Any]  # D′ float32
    patches: np.ndarray[Any, Any] | None  # h×w×D′ float32, where they were asked for
    grid: tuple[int, int]
    cores: int
    batch: int  # how many images it was run with, itself included


class Ticket:
    def __init__(self, pixels: np.ndarray[Any, Any], grid: tuple[int, int], cores: int | None, dense: bool) -> None:
        self.pixels = pixels  # H×W×3 uint8, whole patches
        self.grid = grid
        self.cores = cores  # None: what the controller says
        self.dense = dense
        self.arrived = time.monotonic()
        self.future: Future[Any] = Future()  # of an Answer, or of what a job gives

    @property
    def patches(self) -> int:
        return self.grid[0] * self.grid[1]


class Job(Ticket):
    """`work`, given the budget, costs about as much as an image of so many patches."""

    def __init__(self, work: Callable[[int], Any], patches: int, cores: int | None) -> None:
        super().__init__(np.empty(0), (1, patches), cores, dense=False)
        self.work = work


class Engine:
    def __init__(
        self,
        model: Veca,
        controller: Controller,
        metrics: Metrics,
        batch: int,
        delay: float,
        batch_patches: int,  # a batch never holds more patches than this (one image may): memory, and others' time
        threads: int,
    ) -> None:
        self.model, self.controller, self.metrics = model, controller, metrics
        self.batch, self.delay, self.batch_patches, self.threads = batch, delay, batch_patches, threads
        self.weight = model.patch_embed.proj.weight  # says where images go, and in which precision
        self.waiting: deque[Ticket] = deque()
        self.changed = threading.Condition()
        self.stopping = False
        self.rate = 0.0  # seconds per unit of cost, a moving average over batches
        self.running_cost, self.running_since = 0.0, 0.0
        self.ahead = 0  # requests that are still being decoded; they will be in front of one that arrives now
        self.thread = threading.Thread(target=self._run, name="veca-model", daemon=True)

    def start(self, warm: tuple[int, int]) -> None:
        """Run one image of this grid, so that the first request is not the slow one, then serve the queue."""
        self.thread.start()
        patch = self.model.patch_size
        for _ in range(2):
            self.rate = 0.0  # the first run is slower than any later one, and says nothing about them
            pixels = np.zeros((warm[0] * patch, warm[1] * patch, 3), np.uint8)
            ticket = Ticket(pixels, warm, self.controller.rung.cores, dense=False)
            ticket.arrived = -math.inf  # waits for no company
            self.submit(ticket).result()

    def submit(self, ticket: Ticket) -> Future[Any]:
        with self.changed:
            if self.stopping:
                raise RuntimeError("the engine is stopped")
            self.waiting.append(ticket)
            self.changed.notify()
        return ticket.future

    def stop(self) -> None:
        """Finish what waits, then end the thread."""
        with self.changed:
            self.stopping = True
            self.changed.notify()
        self.thread.join(STOP)  # a daemon: where the model hangs, the process ends all the same

    @property
    def alive(self) -> bool:
        return self.thread.is_alive()

    def busy(self) -> float:
        """For how many seconds the batch that runs now has been running; 0 where none does."""
        since = self.running_since
        return time.monotonic() - since if self.running_cost else 0.0

    def rung(self) -> Rung:
        """What a request without wishes of its own gets now."""
        with self.changed:
            return self._update()

    def expected(self) -> float:
        """Seconds that a request arriving now would take, at the present rung."""
        with self.changed:
            return self._expected(time.monotonic())

    def _update(self) -> Rung:
        now = time.monotonic()
        expected = self._expected(now)
        rung = self.controller.update(now, expected)
        self.metrics.expected.set(expected)
        self.metrics.rung_cores.set(rung.cores)
        self.metrics.rung_size.set(rung.size)
        return rung

    def _expected(self, now: float) -> float:
        own = self.controller.costs[self.controller.index]
        queued = sum(self._cost(ticket) for ticket in self.waiting if not ticket.future.cancelled())
        running = max(0.0, self.running_cost * self.rate - (now - self.running_since)) if self.running_cost else 0.0
        return running + (queued + own * (self.ahead + 1)) * self.rate

    def _cost(self, ticket: Ticket) -> float:
        return image_cost(self.model.config, ticket.patches, ticket.cores or self.controller.rung.cores)

    def _run(self) -> None:
        torch.set_num_threads(self.threads)
        while (chosen := self._next()) is not None:
            batch, cores = chosen
            batch = [ticket for ticket in batch if ticket.future.set_running_or_notify_cancel()]
            if batch:
                self._answer(batch, cores)
            else:
                self.running_cost = 0.0

    def _next(self) -> tuple[list[Ticket], int] | None:
        """The next batch and its budget, taken from the queue; None when the engine was stopped and nothing waits."""
        with self.changed:
            while True:
                while self.waiting and self.waiting[0].future.cancelled():
                    self.waiting.popleft()
                if not self.waiting:
                    if self.stopping:
                        return None
                    self.changed.wait()
                    continue
                chosen, cores, full = self._group()
                if not chosen:  # all were cancelled meanwhile
                    continue
                rest = chosen[0].arrived + self.delay - time.monotonic()
                if not full and rest > 0 and not self.stopping:
                    self.changed.wait(rest)
                    continue
                taken = set(map(id, chosen))
                self.waiting = deque(ticket for ticket in self.waiting if id(ticket) not in taken)
                self.running_cost = sum(self._cost(ticket) for ticket in chosen)
                self.running_since = time.monotonic()
                return chosen, cores

    def _group(self) -> tuple[list[Ticket], int, bool]:
        """The oldest ticket with those that can join it, and whether no more could; a full group goes before it."""
        elastic = self._update().cores
        groups: dict[tuple[tuple[int, int], int, int], list[Ticket]] = {}
        for ticket in self.waiting:
            if ticket.future.cancelled():
                continue
            key = (ticket.grid, ticket.cores or elastic, id(ticket) if isinstance(ticket, Job) else 0)
            group = groups.setdefault(key, [])
            group.append(ticket)
            if len(group) == self._limit(ticket):
                first = next(iter(groups.values()))[0]
                if group[0] is first or time.monotonic() < first.arrived + self.delay:
                    return group, key[1], True
        if not groups:  # cancelling needs no lock: the last ticket may go at any moment
            return [], elastic, False
        (_, cores, _), group = next(iter(groups.items()))
        return group[: self._limit(group[0])], cores, len(group) >= self._limit(group[0])

    def _limit(self, ticket: Ticket) -> int:
        return 1 if isinstance(ticket, Job) else max(1, min(self.batch, self.batch_patches // ticket.patches))

    def _answer(self, batch: list[Ticket], cores: int) -> None:
        started = time.monotonic()
        try:
            answers = self._compute(batch, cores)
        except Exception as error:  # out of memory, most likely; an image alone may still fit
            if len(batch) > 1:
                log.warning("a batch of %d failed (%s): trying each image alone", len(batch), error)
                for ticket in batch:
                    self._answer([ticket], cores)
                return
            if not isinstance(error, InputError):  # the client's mistake
                log.exception("the model failed on an image of grid %s", batch[0].grid)
            self.running_cost = 0.0
            batch[0].future.set_exception(error)
            return
        seconds = time.monotonic() - started
        self._learn(seconds, sum(image_cost(self.model.config, ticket.patches, cores) for ticket in batch))
        self.metrics.model_seconds.observe(seconds)
        self.metrics.batch_size.observe(len(batch))
        for ticket, answer in zip(batch, answers, strict=True):
            if math.isfinite(ticket.arrived):
                self.metrics.wait_seconds.observe(started - ticket.arrived)
            self.metrics.cores.observe(cores)
            ticket.future.set_result(answer)

    def _learn(self, seconds: float, cost: float) -> None:
        with self.changed:
            self.rate = seconds / cost if not self.rate else 0.7 * self.rate + 0.3 * seconds / cost
            self.running_cost = 0.0
            self._update()

    @torch.inference_mode()
    def _compute(self, batch: list[Ticket], cores: int) -> list[Any]:
        if isinstance(batch[0], Job):
            return [batch[0].work(cores)]
        images = torch.stack([to_tensor(Image.fromarray(ticket.pixels)) for ticket in batch])  # B×3×H×W
        out = self.model(images.to(self.weight.device, self.weight.dtype), cores=cores)
        cls = out.cls.float().cpu().numpy()
        answers = []
        for index, ticket in enumerate(batch):
            # Copies: a view would keep the features of the whole batch in memory for as long as one is being sent.
            patches = out.patches[index].float().cpu().numpy().reshape(*out.grid, -1).copy() if ticket.dense else None
            answers.append(Answer(cls[index].copy(), patches, out.grid, cores, len(batch)))
        return answers
