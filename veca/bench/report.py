"""What a benchmark leaves behind: a table to read, JSON and CSV for programs, a plot."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from veca import tabulate
from veca.bench.measure import noise_said
from veca.errors import require
from veca.files import whole_file, write_json, write_text

COLUMNS = {
    "size": "image",
    "batch": "batch",
    "arm": "network",
    "gflops": "GFLOPs",
    "best_ms": "best ms",
    "median_ms": "median ms",
    "spread": "spread",
    "images_per_second": "images/s",
    "times_faster_than_dinov2": "× DINOv2",
    "times_faster_than_dinov3": "× DINOv3",
    "times_faster_than_dense": "× dense",
    "times_faster_than_veca": "× veca",
    "times_faster_than_all_patches": "× all patches",
    "share_of_products": "of products",
    "memory_mb": "peak MB",
}

PAPER = "The paper's Table S14: one attention layer with its projections, 1024², VECA with 64 cores, on an L40S"


def slope(points: Sequence[tuple[float, float]]) -> float | None:
    """Of log(time) over log(patches), least squares: 1 means linear, 2 quadratic."""
    if len(points) < 2:
        return None
    x, y = ([math.log(point[axis]) for point in points] for axis in (0, 1))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread if spread else None


def cell(column: str, value: Any) -> str:
    if value is None:
        return "–"
    if column == "size":
        return f"{value}²"
    if column == "spread":
        return f"{value:.0%}"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return str(value)


def cells(results: dict[str, Any], path: str) -> list[list[str]]:
    """The table of one path: its headings, then a row a measurement; columns that nobody has are left out."""
    rows = [row for row in results["rows"] if row["path"] == path]
    columns = [name for name in COLUMNS if any(row.get(name) is not None for row in rows)]
    return [
        [COLUMNS[name] for name in columns],
        *([cell(name, row.get(name)) for name in columns] for row in rows),
    ]


def paper_cells(results: dict[str, Any]) -> list[list[str]]:
    """The paper's numbers for attention, ours in brackets behind its counts."""
    heads = ["size", "VECA GFLOPs (our count)", "DINOv3 GFLOPs (our count)", "VECA ms", "DINOv3 ms", "× DINOv3"]
    return [heads] + [
        [
            row["model"],
            f"{row['gflops']:.2f} ({row['counted_gflops']:.2f})",
            f"{row['dinov3_gflops']:.2f} ({row['counted_dinov3_gflops']:.2f})",
            f"{row['milliseconds']:.2f}",
            f"{row['dinov3_milliseconds']:.2f}",
            f"{row['dinov3_milliseconds'] / row['milliseconds']:.2f}",
        ]
        for row in results["paper"]
    ]


def paths_of(results: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["path"] for row in results["rows"]))


def markdown(results: dict[str, Any]) -> str:
    """The tables as a page shows them."""
    about = results["machine"]
    parts = [
        f"`{results['command']}`",
        f"{about['cpu']}, {about['threads']} threads, torch {about['torch']}, {about['dtype']}, {about['date']}. "
        f"Interleaved; times are of one pass of the whole batch, warm; {rounds(results['rows'])}. "
        f"{noise_said(results['noise'])}",
    ]
    for path in paths_of(results):
        slopes = "; ".join(
            f"{item['arm']} {item['slope']:.2f}"
            for item in results["slopes"]
            if item["path"] == path and item["slope"] is not None
        )
        parts += [f"{results['model']}, {path}:", tabulate.markdown(cells(results, path))]
        if slopes:
            parts.append(f"Slope of log time over log patches (1: linear, 2: quadratic): {slopes}.")
    if results["paper"]:
        parts += [f"{PAPER}:", tabulate.markdown(paper_cells(results))]
    return "\n\n".join(parts)


def rounds(rows: Sequence[dict[str, Any]]) -> str:
    """From how many measurements the times come."""
    fewest, most = min(row["rounds"] for row in rows), max(row["rounds"] for row in rows)
    if most == 1:
        return "each was measured once"
    return f"the best and the median of {most if fewest == most else f'{fewest} to {most}'} rounds"


def show(results: dict[str, Any], console: Console) -> None:
    """The tables in a terminal."""
    for path in paths_of(results):
        tabulate.show(console, f"{results['model']}, {path}", cells(results, path), left=[COLUMNS["arm"]])
    for item in results["slopes"]:
        if item["slope"] is not None:
            console.print(f"{item['path']}, {item['arm']}: log time over log patches has slope {item['slope']:.2f}")
    if results["paper"]:
        tabulate.show(console, PAPER, paper_cells(results))
    console.print(noise_said(results["noise"]), highlight=False, soft_wrap=True)


def write(results: dict[str, Any], folder: Path) -> list[Path]:
    """bench.json, bench.csv, bench.md and bench.png."""
    paths = [folder / f"bench.{kind}" for kind in ("json", "csv", "md", "png")]
    write_json(paths[0], results)
    text = io.StringIO()
    names = ["path", *COLUMNS, "patches", "gflops_closed_form"]
    writer = csv.DictWriter(text, names, extrasaction="ignore", restval="")
    writer.writeheader()
    writer.writerows(results["rows"])
    write_text(paths[1], text.getvalue())
    write_text(paths[2], markdown(results) + "\n")
    plot_costs(results, paths[3])
    return paths


def plot_costs(results: dict[str, Any], path: Path) -> None:
    """Time (of training: memory) of one image over its patches, both axes logarithmic: a slope of 1 is linear."""
    figure_class = require("matplotlib.figure", "bench").Figure
    kinds = paths_of(results)
    figure = figure_class(figsize=(5.2 * len(kinds), 4.2), layout="constrained")
    styles = {
        "veca": ("#1b7f79", "o"),
        "dense": ("#b8860b", "s"),
        "dinov2": ("#8c2d5a", "^"),
        "dinov3": ("#8c2d5a", "^"),
        "stream": ("#4c6fb1", "v"),
        "compile": ("#7a5aa6", "D"),
        "onnx": ("#6b7780", "P"),
        "int8": ("#c8553d", "X"),
    }
    for index, kind in enumerate(kinds):
        axes = figure.add_subplot(1, len(kinds), index + 1)
        rows = [row for row in results["rows"] if row["path"] == kind and row["batch"] == results["rows"][0]["batch"]]
        measure = "memory_mb" if kind == "training" and "memory_mb" in rows[0] else "best_ms"
        ours = [arm for arm in dict.fromkeys(row["arm"] for row in rows) if arm.startswith("veca,")]
        fewest = ours[:1] if len(ours) > 1 else []
        for arm in dict.fromkeys(row["arm"] for row in rows):
            points = [(row["patches"], row[measure] / row["batch"]) for row in rows if row["arm"] == arm]
            colour, marker = styles[arm.replace(",", " ").split()[0]]
            few = arm in fewest or "checkpointed" in arm
            axes.plot(*zip(*points, strict=True), marker=marker, color=colour, ls="--" if few else "-", ms=5, label=arm)
        axes.set(xscale="log", yscale="log", xlabel="patches", title=f"{results['model']}, {kind}")
        axes.set_ylabel("milliseconds per image" if measure == "best_ms" else "MB per image")
        axes.grid(color="#e7eaed", which="both", linewidth=0.6)
        axes.legend(frameon=False, fontsize=8)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=150)
