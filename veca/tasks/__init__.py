"""Tasks: classes, masks, depth, boxes; each a file (or folder) with its data, head, loss, decoding, score and drawing.

A task is found by being here: a module or package of this folder that defines `TASK` (docs/add_a_task.md). `base/`
holds what tasks share; `video/` trains nothing, so `veca probe video` alone knows it.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

from veca.errors import InputError

if TYPE_CHECKING:
    from veca.tasks.base.contract import Task


def task_names() -> list[str]:
    """What the commands know by name; nothing is imported for it."""
    return [module.name for module in pkgutil.iter_modules(__path__) if module.name not in ("base", "video")]


def find_task(name: str) -> type[Task]:
    if name not in task_names():
        raise InputError(f"no task is called {name!r}; there are {', '.join(task_names())}")
    task: type[Task] = importlib.import_module(f"veca.tasks.{name}").TASK
    return task


def summaries() -> dict[str, str]:
    """Each task in a line, for the help."""
    return {name: find_task(name).summary for name in task_names()}
