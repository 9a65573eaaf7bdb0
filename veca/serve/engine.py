"""The model in a thread of its own: one job after the other, and how long a new one would wait.

One image keeps every core of a CPU busy, so images are not batched: it gained nothing (docs/results.md). A job
whose future was cancelled (its client left, or its time ran out) is dropped unrun.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch

from veca.errors import InputError
from veca.serve.elastic import Controller, Level
from veca.serve.metrics import Metrics

log = logging.getLogger("veca.serve")
STOP = 5.0  # seconds for the job that runs at the end, whose client has gone


class Job(NamedTuple):
    work: Callable[[], Any]
    tokens: int  # what it costs, for all that the layers do is linear in them
    future: Future[Any]
    arrived: float


class Engine:
    def __init__(self, controller: Controller, metrics: Metrics, patch_size: int, threads: int) -> None:
        self.controller, self.metrics = controller, metrics
        self.patch_size, self.threads = patch_size, threads
        self.waiting: deque[Job] = deque()
        self.changed = threading.Condition()
        self.stopping = False
        self.rate = 0.0  # seconds a token, a moving average over jobs
        self.running: tuple[int, float] | None = None  # tokens of the job that runs now, and since when
        self.ahead = 0  # requests that are still being decoded; they will be in front of one that arrives now
        self.thread = threading.Thread(target=self._run, name="veca-model", daemon=True)

    def submit(self, work: Callable[[], Any], tokens: int) -> Future[Any]:
        job = Job(work, tokens, Future(), time.monotonic())
        with self.changed:
            if self.stopping:
                raise RuntimeError("the engine is stopped")
            self.waiting.append(job)
            self.changed.notify()
        return job.future

    def start(self) -> None:
        self.thread.start()

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
        """For how many seconds the job that runs now has been running; 0 where none does."""
        running = self.running
        return time.monotonic() - running[1] if running else 0.0

    def level(self) -> Level:
        """The image size and share of the patches that a request without a wish of its own gets now."""
        with self.changed:
            expected = self._expected()
            level = self.controller.update(time.monotonic(), expected)
        self.metrics.expected.set(expected)
        self.metrics.size.set(level.size)
        self.metrics.patches.set(level.patches)
        return level

    def expected(self) -> float:
        """Seconds that a request arriving now would take, at the present level."""
        with self.changed:
            return self._expected()

    def _expected(self) -> float:
        side = max(1, self.controller.level.size // self.patch_size)
        own = self.controller.level.tokens((side, side))
        queued = sum(job.tokens for job in self.waiting if not job.future.cancelled())
        running = max(0.0, self.running[0] * self.rate - self.busy()) if self.running else 0.0
        return running + (queued + own * (self.ahead + 1)) * self.rate

    def _run(self) -> None:
        torch.set_num_threads(self.threads)
        while (job := self._next()) is not None:
            if job.future.set_running_or_notify_cancel():
                self._do(job)
            self.running = None

    def _next(self) -> Job | None:
        """The oldest job; None when the engine was stopped and nothing waits."""
        with self.changed:
            while not self.waiting:
                if self.stopping:
                    return None
                self.changed.wait()
            job = self.waiting.popleft()
            self.running = (job.tokens, time.monotonic())
            return job

    def _do(self, job: Job) -> None:
        started = time.monotonic()
        try:
            with torch.inference_mode():
                answer = job.work()
        except Exception as error:
            if not isinstance(error, InputError):  # which is the client's mistake
                log.exception("the model failed on %d tokens", job.tokens)
            job.future.set_exception(error)
            return
        seconds = time.monotonic() - started
        with self.changed:
            rate = seconds / job.tokens
            self.rate = 0.7 * self.rate + 0.3 * rate if self.rate else rate
        self.running = None  # before its client hears of it, who may look at the metrics
        self.metrics.wait_seconds.observe(started - job.arrived)
        self.metrics.model_seconds.observe(seconds)
        job.future.set_result(answer)
        self.level()
