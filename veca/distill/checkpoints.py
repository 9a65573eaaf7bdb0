"""Checkpoints that can be trusted: written whole, named by their own digest, the last two and the best kept.

A checkpoint is `checkpoints/step-00001200.4f0c….pt`; a file whose content no longer has that digest is passed over.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from veca.errors import InputError
from veca.files import file_digest, whole_file
from veca.model import Veca

_NAME = re.compile(r"(step|best)-(\d{8})\.([0-9a-f]{16})\.pt")


class Checkpoints:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def list(self, kind: str = "step") -> list[Path]:
        """Checkpoints of a kind, the newest first."""
        found = [path for path in self.folder.glob(f"{kind}-*.pt") if _NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: path.name, reverse=True)

    def save(self, state: dict[str, Any], step: int) -> Path:
        """Write the state of a step; older ones are removed only once it is safely there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for stray in (*self.folder.glob(".*.partial*"), *self.folder.glob("*.writing.pt")):  # left by a killed process
            stray.unlink(missing_ok=True)
        with whole_file(self.folder / f"step-{step:08d}.writing.pt") as temporary:
            torch.save(state, temporary)
            digest = file_digest(temporary)[:16]
        path = self.folder / f"step-{step:08d}.{digest}.pt"
        (self.folder / f"step-{step:08d}.writing.pt").replace(path)
        same_step = [old for old in self.folder.glob(f"step-{step:08d}.*.pt") if old != path]
        for old in (*same_step, *[other for other in self.list() if other not in same_step][2:]):
            old.unlink(missing_ok=True)
        return path

    def mark_best(self, path: Path) -> None:
        """Keep a checkpoint as the best one: a second name for the same file, where the disk allows it."""
        best = path.with_name(path.name.replace("step-", "best-"))
        if not best.exists():
            try:
                os.link(path, best)
            except OSError:
                with whole_file(best) as temporary:
                    shutil.copyfile(path, temporary)
        for old in self.list("best"):
            if old != best:
                old.unlink(missing_ok=True)

    def load_last(self, say: Callable[[str], None]) -> dict[str, Any] | None:
        """The newest checkpoint whose content is what was written; says which ones it passed over, and renames them."""
        for path in self.list():
            match = _NAME.fullmatch(path.name)
            assert match is not None
            try:
                if file_digest(path)[:16] == match[3]:
                    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
                    return state
            except FileNotFoundError:  # another rank has just passed over it
                continue
            except Exception as error:  # what was written is there: no reason to begin anew, and to lose the run
                reason = " ".join(str(error).split())[:120] or type(error).__name__
                raise InputError(f"the checkpoint {path} cannot be read ({reason}): try again, or remove it") from error
            say(f"passing over the damaged checkpoint {path.name} (its content changed since it was written)")
            with contextlib.suppress(OSError):  # or it would count as one of the two that are kept
                path.rename(path.with_suffix(".damaged"))
        return None


class Keeper:
    """Saves a run, on the first rank only: all ranks hold the same state."""

    def __init__(
        self,
        out: Path,
        checkpoints: Checkpoints,
        model: Veca,
        optimisers: list[torch.optim.Optimizer],
        progress: dict[str, Any],
        constants: dict[str, Any],
        warn: Callable[[str], None],
        active: bool,
    ) -> None:
        self.out, self.checkpoints, self.model, self.optimisers = out, checkpoints, model, optimisers
        self.progress, self.constants, self.warn, self.active = progress, constants, warn, active
        self.last = time.monotonic()

    def minutes(self) -> float:
        """Since the last checkpoint."""
        return (time.monotonic() - self.last) / 60

    def save(self, *, final: bool = False, finished: bool = False, best: float | None = None) -> None:
        """Write a checkpoint, and the best model if `best` is its loss.

        A disk that refuses ends the run only where nothing could follow; the model was then not the best so far.
        """
        self.last = time.monotonic()
        before = self.progress["best"]
        if best is not None:
            self.progress["best"] = best
        if not self.active:
            return
        step = self.progress["step"]
        self.model.card |= {"steps": step, "views": step * self.constants["step_images"]}
        state = {
            "model": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "progress": self.progress,
            "finished": finished,
            **self.constants,
        }
        try:
            if best is not None:
                self.model.save(self.out / "best")
            path = self.checkpoints.save(state, step)
            if best is not None:
                self.checkpoints.mark_best(path)
        except OSError as error:
            self.progress["best"] = before
            kept = self.checkpoints.list()
            there = f"{kept[0].name} stays" if kept else "there is none before it"
            line = f"the checkpoint of step {step} cannot be written ({error.strerror}); {there}"
            if final:
                raise InputError(f"{line}: make room and run the same command again") from error
            self.warn(f"{line}; trying again later")
