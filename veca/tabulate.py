"""The one table writer: rows of cells, headings first, as text, Markdown, or in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

Rows = Sequence[Sequence[str]]


def text(rows: Rows) -> str:
    """Aligned, for reading and for logs: the first column to the left, all others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def markdown(rows: Rows) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def show(console: Console, title: str, rows: Rows, left: Sequence[str] = ()) -> None:
    """In a terminal; `left` names the columns of words."""
    table = Table(title=title, title_justify="left")
    for heading in rows[0]:
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    for row in rows[1:]:
        table.add_row(*row)
    console.print(table)
