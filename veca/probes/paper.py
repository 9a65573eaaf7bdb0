"""The paper's own numbers (docs/paper_tables/*.csv), for `--against paper`."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from veca.errors import InputError

# An installed package carries the tables beside this file, a checkout in docs/.
FOLDERS = (Path(__file__).parent / "paper_tables", Path(__file__).parents[2] / "docs" / "paper_tables")


@dataclass(frozen=True)
class PaperRow:
    dataset: str
    metric: str
    model: str
    cores: int | None
    value: float  # as our tables print it: a share of 1, or metres


def paper_rows(task: str, dataset: str) -> list[PaperRow]:
    """What the paper reports for a data set; an unknown one lists those that are known."""
    rows = [row for path in _tables() for row in _read(path) if row[0] == task]
    found = [row for _, row in rows if row.dataset == dataset]
    if not found:
        known = ", ".join(sorted({row.dataset for _, row in rows})) or "none"
        raise InputError(f"--against paper: no numbers for {dataset!r}; known for {task}: {known} (--preset names it)")
    return found


def _tables() -> list[Path]:
    for folder in FOLDERS:
        if folder.is_dir():
            return sorted(folder.glob("*.csv"))
    raise InputError("--against paper: the tables (docs/paper_tables) are not part of this installation")


def _read(path: Path) -> list[tuple[str, PaperRow]]:
    """(task, row) of every line; lines that begin with # say where the numbers come from."""
    with open(path, newline="", encoding="utf-8") as file:
        lines = [line for line in file if not line.startswith("#")]
    rows = []
    for line in csv.DictReader(lines):
        value = float(line["value"]) / (100 if line["unit"] == "%" else 1)
        cores = int(line["cores"]) if line["cores"] else None
        rows.append((line["task"], PaperRow(line["dataset"], line["metric"], line["model"], cores, value)))
    return rows
