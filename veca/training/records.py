"""What a run leaves to look at: `metrics.jsonl`, TensorBoard, and a progress bar or a log.

Records are for looking at; a full disk or a missing TensorBoard must not end a run, so they fail with one warning.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from veca.files import write_text
from veca.progress import progress_bar

METRICS = "metrics.jsonl"
SILENCE = 30  # seconds after which a log without a terminal says where the run is


class Records:
    """Written by the first rank; silent on the others."""

    def __init__(self, folder: Path, *, total: int, start: int, active: bool = True, board: bool = True) -> None:
        self.folder, self.active, self.warned = folder, active, False
        self.board: Any = None
        self.progress: Progress | None = None
        self.total, self.start, self.began = total, start, time.monotonic()
        self.spoke = self.began
        if not active:
            return
        try:
            keep_until(folder / METRICS, start)
        except OSError as error:
            self._fail(error)
        if board:
            try:
                from torch.utils.tensorboard import SummaryWriter

                self._check_room()
                self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=start)
            except (ImportError, OSError) as error:
                self.warn(f"no TensorBoard records ({error})")
        if sys.stdout.isatty():
            self.progress = progress_bar(MofNCompleteColumn(), console=Console())
            self.task = self.progress.add_task("", total=total, completed=start)
            self.progress.start()

    def beat(self, step: int) -> None:
        """A step is done: move the bar; without a terminal, say so every half a minute."""
        if self.progress is not None:
            self.progress.update(self.task, completed=step)
        elif self.active and time.monotonic() - self.spoke > SILENCE:
            self.say(f"step {step}/{self.total}  {self._left(step)} left")

    def train(self, step: int, values: dict[str, Any], text: str) -> None:
        """One record of training; `text` says the same in a line."""
        if not self.active:
            return
        self._write({"kind": "train", "step": step, **values})
        self._scalars("train", values, step)
        if self.progress is not None:
            self.progress.update(self.task, completed=step, description=text)
        else:
            self.say(f"step {step}/{self.total}  {text}  {self._left(step)} left")

    def judged(self, step: int, values: dict[str, Any], scalars: dict[str, float], text: str) -> None:
        """One record of a validation; `scalars` are what TensorBoard draws of it."""
        if not self.active:
            return
        self._write({"kind": "validation", "step": step, **values})
        self._scalars("validation", scalars, step)
        self.say(f"step {step}: {text}")

    def say(self, text: str) -> None:
        if not self.active:
            return
        self.spoke = time.monotonic()
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

    def _left(self, step: int) -> str:
        seconds = (time.monotonic() - self.began) / max(1, step - self.start) * (self.total - step)
        minutes = int(seconds // 60)
        if minutes >= 60:
            return f"{minutes // 60} h {minutes % 60:02d} min"
        return f"{minutes} min {int(seconds % 60):02d} s"

    def _write(self, record: dict[str, Any]) -> None:
        try:
            append_line(self.folder / METRICS, json.dumps(record))
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


def append_line(path: Path, line: str) -> None:
    """Add a line whole or not at all, and cut off what a full disk or a kill left of the one before it."""
    with open(path, "ab+", buffering=0) as file:
        size = end = file.seek(0, os.SEEK_END)
        step = 1 << 16
        while end:  # to the end of the last whole line
            begin = max(0, end - step)
            file.seek(begin)
            if (found := (file.read(end - begin) or b"").rfind(b"\n")) >= 0:
                end = begin + found + 1
                break
            end = begin
        if end < size:
            file.truncate(end)
        data = line.encode() + b"\n"
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(end)
            raise


def keep_until(path: Path, step: int) -> None:
    """Drop the records after a step, and what is no record: a continued run writes them again."""
    if path.is_file():
        kept = [record for record in read_metrics(path) if record["step"] <= step]
        write_text(path, "".join(json.dumps(record) + "\n" for record in kept))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every record of a run; a line cut off by a kill is passed over."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "step" in record:
            records.append(record)
    return records
