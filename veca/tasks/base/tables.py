"""The result of a probe or a fine-tuning: rows of scores, printed as a table and written as JSON and CSV."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from veca import tabulate
from veca._version import __version__
from veca.files import write_json, write_text
from veca.paper import PaperRow, comparable

NAMED = ("model", "source", "weights", "size", "pixels", "cores", "patches")  # what tells a row from others


@dataclass
class Row:
    """One model at one size and budget; every metric has one value a seed."""

    model: str
    source: str
    weights: str  # digest
    size: int  # as asked for
    pixels: int  # the side the model saw: the nearest whole number of patches
    cores: int | None  # None: a model without budgets
    values: dict[str, list[float]]
    per_class: list[float | None] = field(default_factory=list)  # mean over seeds
    extra: dict[str, Any] = field(default_factory=dict)
    patches: float | str = 1.0  # share of them that was spent

    @property
    def spends_all(self) -> bool:
        return self.patches == 1

    def for_head(self) -> dict[str, Any]:
        """The fields that every head.json has."""
        own = {"model": self.source, "weights": self.weights}
        return {**own, "cores": self.cores, "size": self.pixels, "patches": self.patches}

    def mean(self, metric: str) -> float:
        return statistics.fmean(self.values[metric])

    def deviation(self, metric: str) -> float:
        """Sample standard deviation over seeds; 0 for one seed."""
        return statistics.stdev(self.values[metric]) if len(self.values[metric]) > 1 else 0.0

    @classmethod
    def from_json(cls, left: dict[str, Any]) -> Row:
        """As `Table.json` wrote it."""
        own = {name: left[name] for name in NAMED}
        values = {metric: scores["values"] for metric, scores in left["metrics"].items()}
        extra = {name: left[name] for name in left if name not in (*NAMED, "metrics", "share_of_first", "per_class")}
        return cls(**own, values=values, per_class=left["per_class"], extra=extra)

    def shown(self, metric: str) -> str:
        """Mean ± deviation; of a single value nothing is known about its spread."""
        spread = f" ± {self.deviation(metric):.4f}" if len(self.values[metric]) > 1 else ""
        return f"{self.mean(metric):.4f}{spread}"


@dataclass
class Table:
    task: str
    data: str
    main: str  # the metric that plots and shares are about
    better: str  # higher or lower
    classes: list[str] = field(default_factory=list)
    command: str = ""  # what to type to get this table again
    settings: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    paper: Sequence[PaperRow] = ()
    made_with: str = ""  # a digest of options and data: rows of another run with the same one are these
    shares: bool = True  # whether to show what each row keeps of the first model's score

    def note(self, chosen: Any) -> None:
        """What results.json should tell of the command line."""
        left_out = ("cache", "cache_gb", "out", "command")
        self.command = chosen.command
        self.settings = {name: _plain(value) for name, value in vars(chosen).items() if name not in left_out}

    def share(self, row: Row) -> float | None:
        """What the row keeps of the first model's score at the same size (all its patches, its largest budget).

        Where lower is better, the share is the first model's error over this one's.
        """
        same = [other for other in self.rows if other.source == self.rows[0].source and other.size == row.size]
        if not same or not self.shares:
            return None
        first = max(same, key=lambda other: (other.spends_all, other.cores or 0)).mean(self.main)
        over, under = (first, row.mean(self.main)) if self.better == "lower" else (row.mean(self.main), first)
        return over / under if under else None

    @property
    def mixed(self) -> bool:
        """Whether some row spends fewer patches than there are."""
        return not all(row.spends_all for row in self.rows)

    def metrics(self) -> list[str]:
        return list(dict.fromkeys(metric for row in self.rows for metric in row.values))

    def text(self) -> str:
        """The table as aligned text."""
        metrics, mixed = self.metrics(), self.mixed
        spent = ["patches"] if mixed else []
        lines = [["model", "cores", "size", *spent, *metrics, *([f"of first ({self.main})"] if self.shares else [])]]
        for row in self.rows:
            scores = [row.shown(metric) if metric in row.values else "–" for metric in metrics]
            share = self.share(row)
            kept = ["–" if share is None else f"{share:.1%}"] if self.shares else []
            spent = [str(row.patches)] if mixed else []
            lines.append([row.model, str(row.cores or "–"), str(row.pixels), *spent, *scores, *kept])
        for known in self._comparable():
            scores = [f"{known.values[metric]:.4f}" if metric in known.values else "" for metric in metrics]
            name = f"paper, {known.table}: {known.model}"
            blank = [""] if mixed else []
            lines.append(
                [name, str(known.cores or "–"), str(known.size), *blank, *scores, *([""] if self.shares else [])]
            )
        return tabulate.text(lines)

    def _comparable(self) -> list[PaperRow]:
        if not self.paper:
            return []
        return comparable(self.paper, self.task, {row.size for row in self.rows}, {row.cores for row in self.rows})

    def csv(self) -> str:
        metrics = self.metrics()
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        pairs = [name for metric in metrics for name in (metric, f"{metric}_deviation")]
        spent = ["patches"] if self.mixed else []
        writer.writerow(["model", "source", "cores", "size", "pixels", *spent, "seeds", *pairs, "share_of_first"])
        for row in self.rows:
            scores = [
                f"{value:.6f}" if metric in row.values else ""
                for metric in metrics
                for value in ((row.mean(metric), row.deviation(metric)) if metric in row.values else (0.0, 0.0))
            ]
            share = self.share(row)
            seeds = len(next(iter(row.values.values())))
            writer.writerow(
                [row.model, row.source, row.cores or "", row.size, row.pixels, *([row.patches] if spent else [])]
                + [seeds, *scores]
                + ["" if share is None else f"{share:.6f}"]
            )
        return out.getvalue()

    def json(self) -> dict[str, Any]:
        rows = []
        for row in self.rows:
            scores = {
                metric: {"mean": row.mean(metric), "deviation": row.deviation(metric), "values": row.values[metric]}
                for metric in row.values
            }
            rows.append(
                {
                    **{name: getattr(row, name) for name in NAMED},
                    "metrics": scores,
                    "share_of_first": self.share(row),
                    "per_class": row.per_class,
                    **row.extra,
                }
            )
        return {
            "task": self.task,
            "data": self.data,
            "command": self.command,
            "versions": {"veca": __version__, "torch": torch.__version__},
            "made_with": self.made_with,
            "main": self.main,
            "better": self.better,
            "settings": self.settings,
            "classes": self.classes,
            "rows": rows,
            "paper": [known.__dict__ for known in self.paper],
        }

    def write(self, folder: Path) -> None:
        write_json(folder / "results.json", self.json())
        write_text(folder / "results.csv", self.csv())


def _plain(value: Any) -> Any:
    """Paths as text, so that JSON can hold them."""
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, Path) else value


def merge_seeds(scores: Sequence[dict[str, Any]]) -> tuple[dict[str, list[float]], list[float | None]]:
    """Metrics of each seed → lists by metric, and the mean over seeds of the per-class scores."""
    values = {name: [float(score[name]) for score in scores] for name in scores[0] if name != "per_class"}
    each = list(zip(*(score.get("per_class", []) for score in scores), strict=True))
    per_class = []
    for column in each:
        known = [value for value in column if value is not None]
        per_class.append(statistics.fmean(known) if known else None)
    return values, per_class
