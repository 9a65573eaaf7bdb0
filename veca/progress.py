"""Progress bars on stderr; silent where nobody watches, so that logs stay short."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    track,
)

Item = TypeVar("Item")


def progress(items: Iterable[Item], what: str, total: int | None = None) -> Iterator[Item]:
    """The items, with a bar and the time left when stderr is a terminal."""
    if not sys.stderr.isatty():
        yield from items
        return
    yield from track(items, what, total=total, console=Console(stderr=True), transient=True)


def progress_bar(*counts: ProgressColumn, console: Console | None = None, shown: bool = True) -> Progress:
    """A bar that its owner moves: what is done, how much of it (`counts`; a percentage without), and the time left."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        *(counts or [TaskProgressColumn()]),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console or Console(stderr=True), disable=not shown)


@contextmanager
def reporting(name: str, shown: bool = True) -> Iterator[Callable[[str, int, int], None]]:
    """The bar of one long computation, as what it is given to report: what it does, how much is done, of how much."""
    with progress_bar(shown=shown) as bar:
        task = bar.add_task(escape(name), total=None)

        def report(what: str, done: int, total: int) -> None:
            bar.update(task, description=escape(f"{name}: {what}"), completed=done, total=total)

        yield report
