"""The one table writer: rows of cells, headings first, as text, Markdown, or in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

Rows = Sequence[Sequence[str]]


def text(rows: Rows, left: Sequence[int] = (0,)) -> str:
    """Aligned, for reading and for logs: the columns `left` to the left, all others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    aligned = [str.ljust if column in left else str.rjust for column in range(len(widths))]
    lines = [
        "  ".join(align(cell, width) for align, cell, width in zip(aligned, row, widths, strict=True)).rstrip()
        for row in rows
    ]
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
