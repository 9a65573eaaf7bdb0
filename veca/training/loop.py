"""The one training loop: steps, records, judgements and checkpoints, until done or asked to stop.

What differs between trainings is a `Job`. What makes all of them survive everything is here: every draw of a job is a
function of the seed and the step (`schedule`), a checkpoint holds the rest (`checkpoints`), and the same command finds
it again. All ranks agree on what happens next, so none of them waits for another in vain.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from veca.errors import InputError
from veca.optim import set_rate
from veca.training.checkpoints import Checkpoints
from veca.training.ranks import Ranks, StopSignal
from veca.training.records import Records


class Interrupted(Exception):
    """A judgement was broken off because the run is asked to stop; raised on every rank alike."""


class Job(Protocol):
    """What one kind of training brings to the loop."""

    optimisers: list[torch.optim.Optimizer]
    progress: dict[str, Any]  # "step" and "best", and whatever else is counted; part of every checkpoint

    def rate(self, step: int) -> float:
        """What the groups' own rates are multiplied by at this step."""
        ...

    def backward(self, step: int) -> bool:
        """Leave the gradients of one step in the parameters; whether every loss was finite."""
        ...

    def parameters(self) -> Sequence[nn.Parameter]:
        """What is trained, for the norm of the gradient."""
        ...

    def record(self, step: int, rate: float, norm: float) -> tuple[dict[str, Any], str] | None:
        """What happened since the last record, as values and as a line; None: nothing to tell."""
        ...

    def judge(self, step: int) -> float | None:
        """The score on other images, if the best weights are chosen by it."""
        ...

    def better(self, score: float, best: Any) -> bool: ...

    def give_up(self, step: int, skipped: int) -> str:
        """What to tell the user when so many steps in a row had no finite loss."""
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds beside `progress`."""
        ...

    def keep_best(self) -> None:
        """Write the weights for others to load; they are the best so far."""
        ...

    def keep_last(self) -> None:
        """The same for the last weights, once everything is done."""
        ...


@dataclass(frozen=True)
class Pace:
    """How long, and how often what."""

    total: int  # steps
    log_every: int
    judge_every: int  # steps; 0: at the end only
    checkpoint_minutes: float
    stop_at: int = 0  # as if interrupted there; 0: never
    clip: float = 0.0  # largest norm of the gradient; 0: no clipping
    max_nonfinite: int = 1  # so many steps in a row without a finite loss end the run


class Loop:
    def __init__(
        self, job: Job, out: Path, ranks: Ranks, stop: StopSignal, records: Records, checkpoints: Checkpoints,
        pace: Pace,
    ) -> None:  # fmt: skip
        self.job, self.out, self.ranks, self.stop, self.pace = job, out, ranks, stop, pace
        self.records, self.checkpoints = records, checkpoints
        self.skipped = 0  # steps in a row
        self.saved_at = time.monotonic()
        self.stopping = False

    def run(self) -> bool:
        """Train until done (True) or asked to stop (False); both leave a checkpoint."""
        job, pace = self.job, self.pace
        start: int = job.progress["step"]
        self.stopping = self.ranks.any(self.stop.asked)[0]
        for step in range(start, pace.total):
            if self.stopping or step == pace.stop_at > 0:
                self.save(final=True)
                self.records.say(f"stopped at step {step}; the same command continues")
                return False
            rate = job.rate(step)
            set_rate(job.optimisers, rate)
            norm = self.update(step, job.backward(step))
            done = step + 1
            job.progress["step"] = done
            self.records.beat(done)
            if (done % pace.log_every == 0 or done == pace.total) and (told := job.record(done, rate, norm)):
                self.records.train(done, *told)
            best = None
            if pace.judge_every and done % pace.judge_every == 0 and done < pace.total:
                best = self.judge(done)
            if best is not None or time.monotonic() - self.saved_at >= 60 * pace.checkpoint_minutes:
                self.save(best=best)
        # Every step is done: judge the last weights and keep them, and only then call the run finished.
        self.save(final=True, best=self.judge(pace.total))
        if self.stopping:
            self.records.say(f"stopped at step {pace.total}, before its validation; the same command continues")
            return False
        if self.ranks.first:
            try:
                job.keep_last()
            except OSError as error:
                raise InputError(
                    f"the weights in {self.out} cannot be written ({error.strerror}): make room and run the same "
                    "command again"
                ) from error
        self.save(final=True, finished=True)
        return True

    def update(self, step: int, finite: bool) -> float:
        """Step the optimisers, unless some rank's loss or gradient is not finite; the norm of the gradient."""
        job, pace = self.job, self.pace
        parameters = [parameter for parameter in job.parameters() if parameter.grad is not None]
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        broken, self.stopping = self.ranks.any(not (finite and bool(norm.isfinite())), self.stop.asked)
        if broken:
            self.skipped += 1
            job.progress["skipped"] = job.progress.get("skipped", 0) + 1
            if self.skipped >= pace.max_nonfinite:
                raise InputError(job.give_up(step, self.skipped))
            self.records.warn(f"step {step}: the loss is not finite; skipped ({self.skipped} in a row)")
        else:
            self.skipped = 0
            if pace.clip:
                nn.utils.clip_grads_with_norm_(parameters, pace.clip, norm)
            for optimiser in job.optimisers:
                optimiser.step()
        for optimiser in job.optimisers:
            optimiser.zero_grad(set_to_none=True)
        return float(norm)

    def judge(self, step: int) -> float | None:
        """The score of these weights if it is the best so far."""
        if self.stopping:
            return None
        try:
            score = self.job.judge(step)
        except Interrupted:
            self.stopping = True
            return None
        return score if score is not None and self.job.better(score, self.job.progress["best"]) else None

    def save(self, *, final: bool = False, finished: bool = False, best: float | None = None) -> None:
        """Write a checkpoint, and the best weights if `best` is their score; on the first rank, all hold the same.

        A disk that refuses ends the run only where nothing could follow; the weights were then not the best so far.
        """
        progress = self.job.progress
        self.saved_at = time.monotonic()
        before = progress["best"]
        if best is not None:
            progress["best"] = best
        if not self.ranks.first:
            return
        step = progress["step"]
        try:
            if best is not None:
                self.job.keep_best()
            path = self.checkpoints.save({**self.job.state(), "progress": progress, "finished": finished}, step)
            if best is not None:
                self.checkpoints.mark_best(path)
        except OSError as error:
            progress["best"] = before
            kept = self.checkpoints.list()
            there = f"{kept[0].name} stays" if kept else "there is none before it"
            line = f"the checkpoint of step {step} cannot be written ({error.strerror}); {there}"
            if final:
                raise InputError(f"{line}: make room and run the same command again") from error
            self.records.warn(f"{line}; trying again later")
