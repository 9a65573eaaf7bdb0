"""What a run leaves to look at: `metrics.jsonl`, TensorBoard, a progress bar, and a picture of the curves.

Records are for looking at; a full disk or a missing TensorBoard must not end a run, so they fail with one warning.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from veca.distill.data import Batch, next_batch
from veca.distill.losses import Loss
from veca.errors import InputError, require
from veca.files import whole_file, write_text

METRICS = "metrics.jsonl"


class Records:
    """Written by the first rank; silent on the others."""

    def __init__(self, folder: Path, *, total: int, start: int, active: bool) -> None:
        self.folder, self.active, self.warned = folder, active, False
        self.board: Any = None
        self.progress: Progress | None = None
        if not active:
            return
        try:
            keep_until(folder / METRICS, start)
        except OSError as error:
            self._fail(error)
        try:
            from torch.utils.tensorboard import SummaryWriter

            self._check_room()
            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=start)
        except (ImportError, OSError) as error:
            self.warn(f"no TensorBoard records ({error})")
        if sys.stdout.isatty():
            self.progress = Progress(
                BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"),
                console=Console(),
            )  # fmt: skip
            self.task = self.progress.add_task("", total=total, completed=start)
            self.progress.start()
        self.total, self.start, self.began = total, start, time.monotonic()

    def train(self, step: int, values: dict[str, float]) -> None:
        """One record of training; `values` as in metrics.jsonl."""
        if not self.active:
            return
        self._write({"kind": "train", "step": step, **values})
        self._scalars("train", values, step)
        text = (
            f"loss {values['loss']:.4f}  cosine {values['dense_cosine']:.3f}/{values['global_cosine']:.3f}  "
            f"cores {values['budget']:.0f}  {values['resolution']:.0f}²  {values['images_per_second']:.1f} images/s  "
            f"waiting {100 * values['waiting']:.0f}%"
        )
        if self.progress is not None:
            self.progress.update(self.task, completed=step, description=text)
            return
        left = (time.monotonic() - self.began) / max(1, step - self.start) * (self.total - step)
        print(f"step {step}/{self.total}  {text}  {_duration(left)} left", flush=True)

    def validation(self, step: int, values: dict[str, Any], table: str) -> None:
        if not self.active:
            return
        self._write({"kind": "validation", "step": step, **values})
        for size, row in values["grid"].items():
            for budget, figures in row.items():
                self._scalars(f"validation/{size}/{budget}", figures, step)
        self._scalars("validation", {"loss": values["loss"]}, step)
        self.say(f"step {step}: {table}")

    def say(self, text: str) -> None:
        if not self.active:
            return
        if self.progress is not None:
            self.progress.console.print(text, highlight=False)
        else:
            print(text, flush=True)

    def warn(self, text: str) -> None:
        self.say(f"warning: {text}")

    def close(self) -> None:
        if self.progress is not None:
            self.progress.stop()
        try:
            if self.board is not None:
                self.board.close()
        except OSError:
            pass  # said before

    def _write(self, record: dict[str, Any]) -> None:
        try:
            with open(self.folder / METRICS, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            self._fail(error)

    def _scalars(self, group: str, values: dict[str, float], step: int) -> None:
        if self.board is None:
            return
        try:
            self._check_room()
            for name, value in values.items():
                self.board.add_scalar(f"{group}/{name}", value, step)
        except OSError as error:
            self._fail(error)

    def _check_room(self) -> None:
        """TensorBoard writes in a thread of its own, whose failure nobody could catch."""
        if shutil.disk_usage(self.folder).free < 1 << 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _fail(self, error: OSError) -> None:
        if not self.warned:
            self.warn(f"records cannot be written ({error.strerror}); training goes on without them")
        self.warned = True


class Meter:
    """Means since the last record, and how the time was spent."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.sums: torch.Tensor | None = None
        self.steps, self.passes, self.waited, self.began = 0, 0, 0.0, time.monotonic()

    def wait(self, batches: Iterator[Any]) -> Batch:
        began = time.monotonic()
        batch = next_batch(batches)
        assert batch is not None
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


def keep_until(path: Path, step: int) -> None:
    """Drop the records after a step, and a half-written last line: a continued run writes them again."""
    if path.is_file():
        kept = [record for record in read_metrics(path) if record["step"] <= step]
        write_text(path, "".join(json.dumps(record) + "\n" for record in kept))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue  # cut off by a kill
    return records


def plot(run: Path) -> Path:
    """The curves of a run as `curves.png`: training loss, rate, and validation cosine by budget."""
    if not (run / METRICS).is_file():
        raise InputError(f"{run} holds no {METRICS}: give the folder of a distillation run")
    require("matplotlib", "train")
    from matplotlib.figure import Figure

    records = read_metrics(run / METRICS)
    train = [record for record in records if record["kind"] == "train"]
    validation = [record for record in records if record["kind"] == "validation"]
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for name, label in (("loss", "loss"), ("hints", "of which hints"), ("mse", "MSE")):
        if any(record[name] for record in train):
            left.plot([r["step"] for r in train], [r[name] for r in train], label=label, linewidth=1)
    if validation:
        left.plot([r["step"] for r in validation], [r["loss"] for r in validation], "k.-", label="validation loss")
        for size, row in validation[-1]["grid"].items():
            for budget in row:
                seen = [r for r in validation if budget in r["grid"].get(size, {})]  # a run may change what it looks at
                cosines = [r["grid"][size][budget]["dense_cosine"] for r in seen]
                middle.plot([r["step"] for r in seen], cosines, ".-", label=f"{size}², {budget} cores", linewidth=1)
        constant = next(iter(validation[-1]["constant"].values()))
        middle.axhline(constant, color="grey", linestyle=":", label="best constant")
    right.plot([r["step"] for r in train], [r["lr"] for r in train])
    for axis, title in ((left, "loss"), (middle, "validation: dense cosine"), (right, "rate")):
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=6)
    with whole_file(run / "curves.png") as temporary:
        figure.savefig(temporary, dpi=120)
    return run / "curves.png"


def _duration(seconds: float) -> str:
    minutes = int(seconds // 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min {int(seconds % 60):02d} s"
