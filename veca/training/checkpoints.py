"""Checkpoints that can be trusted: written whole, named by their own digest, the last two and the best kept.

A checkpoint is `checkpoints/step-00001200.4f0c….pt`; a file whose content no longer has that digest is passed over.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from veca.errors import InputError
from veca.files import file_digest, whole_file

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

    def newest(self, say: Callable[[str], None]) -> Path | None:
        """The newest checkpoint whose content is what was written; says which ones it passed over, and renames them."""
        for path in self.list():
            match = _NAME.fullmatch(path.name)
            assert match is not None
            try:
                if file_digest(path)[:16] == match[3]:
                    return path
            except OSError as error:  # what was written is there: no reason to begin anew, and to lose the run
                raise InputError(_unreadable(path, error)) from error
            say(f"passing over the damaged checkpoint {path.name} (its content changed since it was written)")
            with contextlib.suppress(OSError):  # or it would count as one of the two that are kept
                path.rename(path.with_suffix(".damaged"))
        return None


def read_checkpoint(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        return state
    except Exception as error:
        raise InputError(_unreadable(path, error)) from error


def load_optimisers(optimisers: Sequence[torch.optim.Optimizer], states: Sequence[dict[str, Any]], out: Path) -> None:
    """Refuse, in one line, what an older version split among its optimisers in another way."""
    try:
        for optimiser, state in zip(optimisers, states, strict=True):
            optimiser.load_state_dict(state)
    except ValueError as error:
        reason = " ".join(str(error).split())[:120]
        raise InputError(
            f"{out} was started by another version, which trained other parameters ({reason}): use another --out"
        ) from error


def _unreadable(path: Path, error: Exception) -> str:
    reason = " ".join(str(error).split())[:120] or type(error).__name__
    return f"the checkpoint {path} cannot be read ({reason}): try again, or remove it"
