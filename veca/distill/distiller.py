"""What distillation brings to the training loop: a step against the teacher, validation, what a checkpoint holds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from veca.distill.data import Batch, Plan
from veca.distill.losses import Loss, Standards
from veca.distill.settings import Distillation
from veca.distill.sources import TrainingImages
from veca.distill.student import Student
from veca.distill.teaching import Teaching
from veca.distill.validation import Validation, result_record, result_scalars, result_table
from veca.errors import InputError
from veca.files import whole_file
from veca.model import Veca
from veca.training.loop import Interrupted
from veca.training.ranks import Ranks, StopSignal
from veca.training.records import Records
from veca.training.schedule import learning_rate, random_at


class Length(NamedTuple):
    """How long a run is, in images and steps."""

    batch: int  # images per rank and backward pass
    step_images: int  # images per step, over all ranks
    total: int  # steps
    warmup: int
    epoch: float  # steps in an epoch


class Distiller:
    def __init__(
        self, settings: Distillation, length: Length, model: Veca, optimisers: list[torch.optim.Optimizer],
        progress: dict[str, Any], constants: dict[str, Any], *, images: TrainingImages, teaching: Teaching,
        ranks: Ranks, stop: StopSignal, plan: Plan, batches: Iterator[Batch], validation: Validation | None,
        measured: Standards | None, records: Records,
    ) -> None:  # fmt: skip
        self.settings, self.length, self.model, self.optimisers = settings, length, model, optimisers
        self.progress, self.constants = progress, constants
        self.images, self.teaching, self.ranks, self.stop = images, teaching, ranks, stop
        self.plan, self.batches, self.validation, self.records = plan, batches, validation, records
        self.standards = measured if settings.standardise else None
        self.hint_standard = measured.layers if measured is not None else None
        self.student: nn.Module = Student(model)
        if ranks.count > 1:
            device_ids = [ranks.device] if ranks.device.type == "cuda" else None
            self.student = DistributedDataParallel(self.student, device_ids=device_ids)
        self.average: AveragedModel | None = None
        if settings.average:
            self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(settings.average))
            optimisers[-1].register_step_post_hook(lambda *_: self.follow())
        self.meter = Meter()
        self.batch: Batch | None = None  # the last one
        self.budget = 0

    def follow(self) -> None:
        """The average after a step."""
        assert self.average is not None
        self.average.update_parameters(self.model)

    @property
    def kept(self) -> Veca:
        """What is judged and kept."""
        if self.average is None:
            return self.model
        averaged = self.average.module
        assert isinstance(averaged, Veca)
        return averaged

    def rate(self, step: int) -> float:
        settings, length = self.settings, self.length
        return learning_rate(step, length.total, length.warmup, settings.lr, settings.min_lr)

    def parameters(self) -> Sequence[nn.Parameter]:
        return list(self.model.parameters())

    def backward(self, step: int) -> bool:
        settings, total, device = self.settings, self.length.total, self.ranks.device
        patches = (self.plan.resolution(step) // self.model.config.patch_size) ** 2
        parts = settings.accumulate * self.ranks.count
        forced = settings.forced_at(step, total)
        hints = settings.hints if step < settings.hints_until * total else 0.0
        losses: list[Loss] = []
        unreadable: list[str] = []
        for micro in range(settings.accumulate):
            self.budget = settings.budget_at(step, patches, micro * self.ranks.count + self.ranks.rank, parts)
            self.batch = batch = self.meter.wait(self.batches)
            unreadable += batch.unreadable
            pixels = batch.images.to(device, non_blocking=True)
            target = self.teaching.of(batch, pixels, forced > 0 or hints > 0)
            last = micro == settings.accumulate - 1
            alone = last or not isinstance(self.student, DistributedDataParallel)
            with (
                torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.teaching.bfloat16),
                nullcontext() if alone else self.student.no_sync(),  # type: ignore[operator]
            ):
                # The shift and scale of positions is drawn by the model: one draw a step, on every rank.
                torch.manual_seed(random_at(settings.seed, "positions", step).getrandbits(63))
                loss: Loss = self.student(pixels, self.budget, target, self.standards, hints, self.hint_standard,
                                          forced, settings.patch_share, settings.read_at(step, micro),
                                          settings.gram, settings.mixed_at(step, micro))  # fmt: skip
                torch.autograd.backward(loss.total / settings.accumulate)
            losses.append(Loss(*(value.detach() for value in loss)))
        self.note_unreadable(unreadable)
        finite = all(bool(loss.total.isfinite()) for loss in losses)
        if finite:
            self.meter.add(losses)
        return finite

    def note_unreadable(self, lines: list[str]) -> None:
        """Count and list images that could not be read, on whichever rank; too large a share of them ends the run."""
        progress, count, out = self.progress, len(self.images), self.settings.out
        progress["read"] += self.length.step_images
        if not self.ranks.any(bool(lines))[0]:
            return
        known = set(progress["unreadable"])
        new = [line for line in dict.fromkeys(self.ranks.together(lines)) if line not in known]
        progress["unreadable"] += new
        if new and self.ranks.first:
            with open(out / "unreadable.txt", "a", encoding="utf-8", errors="surrogateescape") as file:
                file.writelines(line.replace("\n", "\\n") + "\n" for line in new)  # a name may hold a newline
        read = max(min(progress["read"], count), min(count, 1000))  # a few bad ones at the very start say nothing
        if len(progress["unreadable"]) > self.settings.max_unreadable * read:
            raise InputError(
                f"{len(progress['unreadable'])} of {read} images are unreadable, more than "
                f"--max-unreadable {self.settings.max_unreadable}: see {out / 'unreadable.txt'}"
            )

    def record(self, step: int, rate: float, norm: float) -> tuple[dict[str, Any], str] | None:
        if not self.meter.steps:
            return None
        values: dict[str, Any] = {
            **self.meter.read(self.length.step_images), "epoch": step / self.length.epoch, "lr": rate,
            "budget": self.budget, "resolution": self.plan.resolution(step - 1), "norm": norm,
            "skipped": self.progress["skipped"],
        }  # fmt: skip
        return values, (
            f"loss {values['loss']:.4f}  cosine {values['dense_cosine']:.3f}/{values['global_cosine']:.3f}  "
            f"cores {self.budget}  {values['resolution']}²  {values['images_per_second']:.1f} images/s  "
            f"waiting {100 * values['waiting']:.0f}%"
        )

    def judge(self, step: int) -> float | None:
        if self.validation is None:
            return None
        result = self.validation.run(self.kept, self.standards, lambda: self.ranks.any(self.stop.asked)[0])
        if result is None:
            raise Interrupted
        self.records.judged(step, result_record(result), result_scalars(result), result_table(result))
        self.meter.restart()
        return result.loss

    def better(self, score: float, best: Any) -> bool:
        return bool(score < best)

    def give_up(self, step: int, skipped: int) -> str:
        """Keep the batch that broke the loss."""
        path, batch = self.settings.out / f"nonfinite-step{step}-rank{self.ranks.rank}.pt", self.batch
        assert batch is not None
        with whole_file(path) as temporary:
            names = [self.images.name(index) for index in batch.numbers]
            torch.save({"images": batch.images, "names": names}, temporary)
        return (
            f"the loss was not finite {skipped} times in a row; the last batch is in {path}: try a lower --lr or "
            "--clip 1"
        )

    def state(self) -> dict[str, Any]:
        self.fill_card()
        optimisers = [optimiser.state_dict() for optimiser in self.optimisers]
        average = {} if self.average is None else {"average": self.average.state_dict()}
        return {"model": self.model.state_dict(), "optimisers": optimisers, **average, **self.constants}

    def keep_best(self) -> None:
        self.keep("best")

    def keep_last(self) -> None:
        self.keep("last")
        if self.validation is None:  # nothing was judged, so the last are the best
            self.keep("best")

    def keep(self, name: str) -> None:
        self.fill_card()
        self.kept.card = self.model.card
        self.kept.save(self.settings.out / Path(name))

    def fill_card(self) -> None:
        step = self.progress["step"]
        self.model.card |= {"steps": step, "views": step * self.length.step_images}


class Meter:
    """Means since the last record, and how the time was spent."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.sums: torch.Tensor | None = None
        self.steps, self.passes, self.waited, self.began = 0, 0, 0.0, time.monotonic()

    def wait(self, batches: Iterator[Batch]) -> Batch:
        began = time.monotonic()
        batch = next(batches)
        self.waited += time.monotonic() - began
        return batch

    def add(self, losses: Sequence[Loss]) -> None:
        for loss in losses:
            values = torch.stack(list(loss)).float()
            self.sums = values if self.sums is None else self.sums + values
            self.passes += 1
        self.steps += 1

    def read(self, step_images: int) -> dict[str, float]:
        assert self.sums is not None
        seconds = time.monotonic() - self.began
        names = ("loss", "global_cosine", "dense_cosine", "mse", "hints")
        values = dict(zip(names, (self.sums / self.passes).tolist(), strict=True))
        values |= {"images_per_second": self.steps * step_images / seconds, "waiting": self.waited / seconds}
        self.restart()
        return values
