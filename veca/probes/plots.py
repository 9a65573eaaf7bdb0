"""Score against budget (paper, Fig. 5) and against resolution."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from veca.files import whole_file
from veca.paper import CORES, SIZES
from veca.tasks.base.tables import Row, Table

LABELS = {
    "top1": "top-1 accuracy",
    "mAP": "mean average precision",
    "mIoU": "mean IoU",
    "RMSE": "RMSE in metres (lower is better)",
    "top1_k20": "20-NN accuracy",
    "J&F": "J&F, mean over objects",
}


def plot_scores(table: Table, folder: Path) -> None:
    """`budget.png` and `resolution.png` in the folder."""
    _plot(table, folder / "budget.png", "active cores", lambda row: row.cores, lambda row: row.size, "{} px")
    _plot(table, folder / "resolution.png", "side in pixels", lambda row: row.size, lambda row: row.cores, "{} cores")


def _plot(
    table: Table,
    path: Path,
    axis: str,
    x: Callable[[Row], int | None],
    other: Callable[[Row], int | None],
    label: str,
) -> None:
    """One line for each model and value of `other`; a model without budgets is a level line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    lines: dict[tuple[str, int | None], list[Row]] = {}
    for row in table.rows:
        name = row.model if row.spends_all else f"{row.model}, patches {row.patches}"
        lines.setdefault((name, other(row)), []).append(row)
    several = len({key[1] for key in lines if key[1] is not None}) > 1
    for number, ((model, value), rows) in enumerate(lines.items()):
        name = f"{model}, {label.format(value)}" if several and value is not None else model
        colour = f"C{number % 10}"
        points = sorted((at, row.mean(table.main), row.deviation(table.main)) for row in rows if (at := x(row)))
        if points:
            places, means, deviations = zip(*points, strict=True)
            axes.errorbar(places, means, yerr=deviations, marker="o", capsize=3, color=colour, label=name)
        else:
            axes.axhline(rows[0].mean(table.main), linestyle="--", color=colour, label=name)
    for number, (model, known) in enumerate(_paper_lines(table, axis).items()):
        style = {"color": f"C{(len(lines) + number) % 10}", "linestyle": ":", "label": f"paper: {model}"}
        if len(known) > 1:
            axes.plot(*zip(*sorted(known), strict=True), marker="x", **style)
        else:
            axes.axhline(known[0][1], **style)
    ticks = sorted({at for row in table.rows if (at := x(row))})
    if ticks:
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xticks([], minor=True)
    else:
        axes.set_xticks([])
    axes.set_xlabel(axis)
    axes.set_ylabel(LABELS.get(table.main, table.main))
    axes.set_title(f"{table.task} on {table.data}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=130)


def _paper_lines(table: Table, axis: str) -> dict[str, list[tuple[int, float]]]:
    """The paper's VECAs and their teachers, by model: score over budgets at its usual size, or over sizes."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in table.paper:
        if not row.model.startswith(("VECA", "DINOv3")) or table.main not in row.values:
            continue
        usual = row.size == SIZES[table.task] if axis == "active cores" else row.cores in (None, CORES)
        at = row.cores or 0 if axis == "active cores" else row.size
        if usual:
            lines.setdefault(row.model, []).append((at, row.values[table.main]))
    return lines
