"""From the records of the referee's experiment to its answer: results.json, results.csv, referee.png, and the page."""

from __future__ import annotations

import csv
import io
import json
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sections import put_section

from veca import tabulate
from veca.files import whole_file, write_json, write_text
from veca.training.records import METRICS, read_metrics

# Measures, as the table names them: (words, which is better, digits).
MEASURES = {
    "dense_cosine": ("validation: cosine of the patches, standardised", "higher", 4),
    "global_cosine": ("validation: cosine of the global feature, standardised", "higher", 4),
    "raw_dense_cosine": ("validation: cosine of the patches, raw", "higher", 4),
    "pets": ("pets, top-1", "higher", 4),
    "voc-seg": ("voc-seg, mIoU", "higher", 4),
    "nyu-depth": ("nyu-depth, RMSE in metres", "lower", 4),
    "half_distance": ("locality: half distance, in shorter sides", "", 3),
}
COLUMNS = {"core 64": "VECA, 64 cores", "core 8": "VECA, 8 cores", "dense": "dense twin"}
SCALE = {"teacher": "teacher", "untrained 64": "random weights"}
COLOURS = {"core 64": "#1b7f79", "core 8": "#7fc4bf", "dense": "#b8860b", "teacher": "#8c2d5a"}


def gather(out: Path, seeds: int, command: str, quick: bool) -> dict[str, Any]:
    """Every number by measure and column, one per seed; and the curves for the plot."""
    values: dict[str, dict[str, list[float | None]]] = {measure: {} for measure in MEASURES}
    curves: list[dict[str, Any]] = []
    distances: dict[str, list[list[float | None]]] = {}

    def add(measure: str, column: str, value: float | None) -> None:
        values[measure].setdefault(column, []).append(value)

    names = [*(f"{arm}-{seed}" for seed in range(seeds) for arm in ("core", "dense")), "teacher", "untrained"]
    for name in names:
        kind = name.split("-")[0]
        budgets = ("64", "8") if kind in ("core", "untrained") else ("None",)
        columns = {budget: kind if budget == "None" else f"{kind} {budget}" for budget in budgets}
        if kind in ("core", "dense"):
            records = read_metrics(out / name / METRICS)
            views = json.loads((out / name / "settings.json").read_text(encoding="utf-8"))["batch"]
            validations = [record for record in records if record["kind"] == "validation"]
            for budget, column in columns.items():
                grids = [next(iter(r["grid"].values()))["64" if budget == "None" else budget] for r in validations]
                for measure in ("dense_cosine", "global_cosine", "raw_dense_cosine"):
                    add(measure, column, grids[-1][measure])
                curves.append({
                    "column": column, "run": name, "views": [r["step"] * views for r in validations],
                    "dense_cosine": [figures["dense_cosine"] for figures in grids],
                    "constant": next(iter(validations[-1]["constant"].values())),
                })  # fmt: skip
        for task in ("pets", "voc-seg", "nyu-depth"):
            table = json.loads((out / "probes" / f"{task}-{name}" / "results.json").read_text(encoding="utf-8"))
            for row in table["rows"]:
                add(task, columns[str(row["cores"])], row["metrics"][table["main"]]["mean"])
        for budget, found in json.loads((out / "locality" / f"{name}.json").read_text(encoding="utf-8")).items():
            add("half_distance", columns[budget], found["half_distance"])
            distances.setdefault(columns[budget], []).append(found["cosine"])
            places = found["distance"]
    return {
        "command": command, "quick": quick, "seeds": seeds, "values": values, "curves": curves,
        "locality": {"distance": places, "cosine": distances},
    }  # fmt: skip


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """Over seeds; of one value the deviation is unknown."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def shown(values: Sequence[float | None] | None, digits: int, sign: bool = False) -> str:
    known = [value for value in values or () if value is not None]
    if not known:
        return "–"
    mean, deviation = mean_and_deviation(known)
    text = f"{mean:+.{digits}f}" if sign else f"{mean:.{digits}f}"
    return text if deviation is None else f"{text} ± {deviation:.{digits}f}"


def markdown(results: dict[str, Any]) -> str:
    """The table of the page; the difference is taken seed by seed, since a seed's two arms start from equal weights."""
    columns = {**COLUMNS, "difference": "VECA, 64 cores − dense twin", **SCALE}
    rows = [["", *columns.values()]]
    for measure, (words, better, digits) in MEASURES.items():
        found = results["values"][measure]
        ours, theirs = found.get("core 64", []), found.get("dense", [])
        differences = [None if None in pair else pair[0] - pair[1] for pair in zip(ours, theirs, strict=True)]
        cells = [
            shown(differences, digits, sign=True) if column == "difference" else shown(found.get(column), digits)
            for column in columns
        ]
        rows.append([f"{words}{f' ({better} is better)' if better else ''}", *cells])
    quick = ["**A quick trial of a few steps: these numbers say nothing.**", ""] if results["quick"] else []
    return "\n".join(
        [
            *quick,
            f"Mean ± sample standard deviation over {results['seeds']} training seeds; each probe's score is first "
            "averaged over its heads.",
            "",
            tabulate.markdown(rows),
            "",
            "```text",
            results["command"],
            "```",
        ]
    )


def write(results: dict[str, Any], out: Path, page: Path | None) -> None:
    write_json(out / "results.json", results)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["measure", "column", "seed", "value"])
    for measure, columns in results["values"].items():
        for column, values in columns.items():
            rows = ((seed, value) for seed, value in enumerate(values) if value is not None)
            writer.writerows([measure, column, seed, f"{value:.6f}"] for seed, value in rows)
    write_text(out / "results.csv", text.getvalue())
    draw(results, out / "referee.png")
    table = markdown(results)
    print(table)
    if page is not None:
        picture = page.parent / "referee.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(picture) as temporary:
            shutil.copyfile(out / "referee.png", temporary)
        put_section(page, "referee", f"{table}\n\n![Curves, probes and locality of both arms](referee.png)")
    print(f"written to {out}: results.json, results.csv, referee.png" + (f"; {page}" if page else ""))


def draw(results: dict[str, Any], path: Path) -> None:
    """Validation curves, probes relative to the dense twin, and similarity over distance."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots(1, 3)
    for curve in results["curves"]:
        column = curve["column"]
        label = COLUMNS[column] if curve["run"].endswith("-0") else None
        axes[0].plot(curve["views"], curve["dense_cosine"], color=COLOURS[column], marker=".", lw=1.2, label=label)
    axes[0].axhline(results["curves"][0]["constant"], color="grey", ls=":", label="best constant")
    axes[0].set(title="validation: cosine of the patches", xlabel="views")

    tasks = ("pets", "voc-seg", "nyu-depth")
    for place, column in enumerate(COLUMNS):
        heights, errors = [], []
        for task in tasks:
            found = results["values"][task]
            reference = statistics.fmean(value for value in found["dense"] if value is not None)
            upside_down = MEASURES[task][1] == "lower"
            # Of a score that is 0 (a quick trial) there are no shares.
            shares = [
                (reference / value if value else 0.0) if upside_down else (value / reference if reference else 0.0)
                for value in found[column]
                if value is not None
            ]
            mean, deviation = mean_and_deviation(shares)
            heights.append(mean)
            errors.append(deviation or 0.0)
        at = [number + (place - 1) * 0.26 for number in range(len(tasks))]
        axes[1].bar(at, heights, 0.24, yerr=errors, capsize=3, color=COLOURS[column], label=COLUMNS[column])
    axes[1].set_xticks(range(len(tasks)), [MEASURES[task][0].split(" in ")[0] for task in tasks])
    axes[1].axhline(1, color="grey", lw=0.8)
    axes[1].set(title="probes: share of the dense twin's score")

    for column, runs in results["locality"]["cosine"].items():
        if column in COLOURS:
            for number, cosines in enumerate(runs):
                points = [
                    (x, y) for x, y in zip(results["locality"]["distance"], cosines, strict=True) if y is not None
                ]
                label = {**COLUMNS, **SCALE}[column] if number == 0 else None
                axes[2].plot(*zip(*points, strict=True), color=COLOURS[column], lw=1.2, label=label)
    axes[2].set(title="locality: cosine of two patches", xlabel="distance in shorter sides")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=130)
