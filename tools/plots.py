"""The plots of docs/results.md, from the rows in docs/numbers.

python tools/plots.py
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from PIL import Image
from steps import Rows, read_csv

DOCS = Path(__file__).parents[1] / "docs"
OURS, FEW, DENSE, PLAIN = "#1b7f79", "#62b6ae", "#8c2d5a", "#6b7780"
LOOK = {
    "font.size": 11,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e7ea",
    "legend.frameon": False,
    "legend.fontsize": 10,
    "legend.handlelength": 3,
    "lines.linewidth": 2,
    "lines.markersize": 6,
}
WIDTH = 7.6  # inches; at 140 dots an inch a column of a page shows the words at their printed size


def main() -> None:
    for path in draw_all(DOCS / "numbers", DOCS / "images"):
        print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


def draw_all(numbers: Path, images: Path) -> list[Path]:
    """Every plot whose rows are there, as images/results-NAME.webp: a step that never ran has none."""
    drawn = []
    for name, draw in PLOTS.items():
        with contextlib.suppress(FileNotFoundError):
            drawn.append(save(draw, numbers, images / f"results-{name}.webp"))
    return drawn


def save(draw: Callable[[Path, Figure], None], numbers: Path, path: Path) -> Path:
    with rc_context(LOOK):
        figure = Figure(layout="constrained")
        draw(numbers, figure)
        drawn = io.BytesIO()
        figure.savefig(drawn, dpi=140, format="png")
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.open(drawn).convert("RGB").save(path, lossless=True, method=6)
    return path


def panels(figure: Figure, count: int, height: float, rows: int = 1) -> Sequence[Axes]:
    """`rows` of `count` panels, row by row."""
    figure.set_size_inches(WIDTH, height)
    return list(figure.subplots(rows, count, squeeze=False).flat)


def column(rows: Rows, name: str, **where: str) -> list[float]:
    """The values of a column in the rows that are so."""
    return [float(row[name]) for row in rows if all(row[key] == value for key, value in where.items())]


def ticks(axis: Any, values: Sequence[float], label: Callable[[float], str] = "{:g}".format) -> None:
    """Words at these values only, also on a logarithmic axis."""
    axis.set_major_locator(FixedLocator(values))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: label(value)))


def words_below(figure: Figure, axes: Axes) -> None:
    """One legend for all panels, where it hides no line."""
    lines, words = axes.get_legend_handles_labels()
    figure.legend(lines, words, loc="outside lower center", ncols=4 if sum(map(len, words)) < 60 else 2)


def cost(numbers: Path, figure: Figure) -> None:
    """Time over image size, and how many times as fast."""
    small, own, attention = (read_csv(numbers / f"{name}.csv") for name in ("small", "cost", "attention"))
    time, gain = panels(figure, 2, 3.7)
    for arm, label, style in (
        ("dinov3", "DINOv3-S", {"color": DENSE, "marker": "^"}),
        ("veca, 8 cores", "VECA-S, 8 cores", {"color": FEW, "marker": "o", "ls": "--"}),
        ("veca, 64 cores", "VECA-S, 64 cores", {"color": OURS, "marker": "o"}),
    ):
        seconds = [value / 1000 for value in column(small, "best_ms", arm=arm)]
        time.plot(column(small, "size", arm=arm), seconds, label=label, **style)
    time.set(xscale="log", yscale="log", title="Seconds an image", xlabel="side of the image, pixels")
    ticks(time.yaxis, (0.1, 1, 10))
    for rows, rival, label, style in (
        (attention, "dinov3", "attention alone", {"color": PLAIN, "ls": ":", "marker": "s"}),
        (small, "dinov3", "VECA-S, than DINOv3-S", {"color": OURS, "marker": "o"}),
        (own, "dinov2", "veca-s14, than its teacher", {"color": DENSE, "ls": "--", "marker": "D"}),
    ):
        arm = {"arm": "veca, 64 cores"}
        gain.plot(column(rows, "size", **arm), column(rows, f"times_faster_than_{rival}", **arm), label=label, **style)
    gain.axhline(1, color="#1d262c", lw=1)
    gain.set(xscale="log", yscale="log", title="Times as fast, 64 cores", xlabel="side of the image, pixels")
    ticks(gain.yaxis, (1, 2, 5, 10, 20, 50))
    for axes in (time, gain):
        ticks(axes.xaxis, (224, 512, 1024, 2048))
        axes.legend(loc="upper left")


def quality(numbers: Path, figure: Figure) -> None:
    """Score over budget beside the teacher's, for three tasks."""
    tasks = (
        ("voc", "mIoU", "voc-seg, mIoU\n(higher is better)"),
        ("pets", "top1", "pets, top-1\n(higher is better)"),
        ("nyu", "RMSE", "nyu-depth, RMSE, m\n(lower is better)"),
    )
    for axes, (name, metric, title) in zip(panels(figure, 3, 3.6), tasks, strict=True):
        rows = read_csv(numbers / f"probe-{name}.csv")
        teacher, own = rows[0], rows[1:]
        cores = column(own, "cores")
        spread = column(own, f"{metric}_deviation")
        axes.errorbar(cores, column(own, metric), yerr=spread, color=OURS, marker="o", capsize=3, label="veca-s14")
        axes.axhline(float(teacher[metric]), color=DENSE, ls="--", label="its teacher")
        for count, score in zip(cores, column(own, metric), strict=True):
            share = score / float(teacher[metric])
            axes.annotate(
                f"{share:.2f}×" if metric == "RMSE" else f"{share:.0%}",
                (count, score),
                xytext=(4, 8 if metric == "RMSE" else -14),
                textcoords="offset points",
                color=OURS,
                fontsize=10,
            )
        axes.set(xscale="log", title=title, xlabel="cores", xlim=(7, 95))
        axes.margins(y=0.14)
        ticks(axes.xaxis, (8, 16, 32, 64))
    words_below(figure, axes)


def fidelity(numbers: Path, figure: Figure) -> None:
    """Cosine to the teacher over budget, a line a size."""
    rows = read_csv(numbers / "fidelity.csv")
    sizes = list(dict.fromkeys(row["pixels"] for row in rows))
    shades = ("#0f4f4b", "#1b7f79", "#62b6ae", "#b8860b")
    names = (("dense_cosine", "Patches"), ("global_cosine", "Global feature"))
    for axes, (metric, title) in zip(panels(figure, 2, 3.3), names, strict=True):
        for size, shade in zip(sizes, shades, strict=False):
            axes.plot(
                column(rows, "cores", pixels=size),
                column(rows, metric, pixels=size),
                color=shade,
                marker="o",
                label=f"{size}²",
            )
        axes.set(title=title, xlabel="cores", ylabel="cosine, standardised", ylim=(0.72, 0.93))
        ticks(axes.xaxis, (8, 16, 24, 32, 40, 48, 56, 64))
        axes.legend(loc="lower right")


def training(numbers: Path, figure: Figure) -> None:
    """A step's time and memory over image size."""
    rows = read_csv(numbers / "training.csv")
    arms = (
        ("dinov3", "DINOv3-S", DENSE, "-"),
        ("dinov3 checkpointed", "DINOv3-S, checkpointed", DENSE, "--"),
        ("veca, 64 cores", "VECA-S, 64 cores", OURS, "-"),
        ("veca checkpointed, 64 cores", "VECA-S, checkpointed", OURS, "--"),
    )
    time, memory = panels(figure, 2, 3.9)
    for arm, label, colour, line in arms:
        sizes = column(rows, "size", arm=arm)
        for axes, name in ((time, "best_ms"), (memory, "memory_mb")):
            values = [value / 1000 for value in column(rows, name, arm=arm)]
            axes.plot(sizes, values, color=colour, ls=line, marker="o", label=label)
    time.set(title="Seconds a step, one image", xlabel="side of the image, pixels", yscale="log")
    memory.set(title="GB beyond weights and image", xlabel="side of the image, pixels", yscale="log")
    ticks(time.yaxis, (1, 2, 5, 10, 20, 50))
    ticks(memory.yaxis, (0.1, 0.2, 0.5, 1, 2, 4))
    for axes in (time, memory):
        ticks(axes.xaxis, (512, 1024, 1536))
    words_below(figure, time)


def ways(numbers: Path, figure: Figure) -> None:
    """The same network by other ways to run it."""
    rows = read_csv(numbers / "ways.csv")
    words = {
        "veca": "PyTorch, float32",
        "stream": "streamed",
        "compile": "torch.compile",
        "onnx": "ONNX, float32",
        "int8": "ONNX, 8 bits",
    }
    (axes,) = panels(figure, 1, 2.4)
    names = [words[row["arm"].split(",")[0]] for row in rows]
    best = column(rows, "best_ms")
    bars = axes.barh(names, best, color=[OURS if "PyTorch" in name else FEW for name in names], height=0.66)
    axes.bar_label(bars, [f"{value:.0f} ms" for value in best], padding=4)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(title="One image of 512², 64 cores", xlabel="milliseconds", xlim=(0, 1.12 * max(best)))


def service(numbers: Path, figure: Figure) -> None:
    """Answers a second and p99 over the number of clients."""
    rows = read_csv(numbers / "serve.csv")
    names = list(dict.fromkeys(row["service"] for row in rows))  # the plainest first, the one that adapts most last
    looks = [(PLAIN, ":"), (DENSE, "--"), (FEW, "-.")][: len(names) - 1] + [(OURS, "-")]
    rate, wait = panels(figure, 2, 3.9)
    for name, (colour, line) in zip(names, looks, strict=True):
        where = {"load": "closed", "service": name}
        clients = column(rows, "clients", **where)
        for axes, measure in ((rate, "per_second"), (wait, "p99")):
            axes.plot(clients, column(rows, measure, **where), color=colour, ls=line, marker="o", label=name)
    wait.axhline(0.5, color="#1d262c", lw=1)
    rate.set(title="Answers a second", xlabel="clients that ask at once", xscale="log", ylim=(0, None))
    wait.set(title="p99, seconds (line: the objective)", xlabel="clients that ask at once", xscale="log", yscale="log")
    ticks(wait.yaxis, (0.2, 0.5, 1, 2, 5))
    for axes in (rate, wait):
        ticks(axes.xaxis, (1, 2, 4, 8, 16, 32))
    words_below(figure, rate)


def cells(numbers: Path, figure: Figure) -> None:
    """Milliseconds of large photographs over their width, and quality against milliseconds: a line a way."""
    keys = ("model", "cores", "share", "tiles", "width")
    quality = {tuple(row[key] for key in keys): row["mAP"] for row in read_csv(numbers / "cells.csv")}
    ways: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for row in read_csv(numbers / "cells-time.csv"):
        place = tuple(row[key] for key in keys)
        ways.setdefault(place[:-1], []).append((row["width"], row["ms_bfloat16"], quality.get(place, "")))
    time, score = panels(figure, 2, 4.4)
    tiled = {"whole": ("-", "^"), "apart": ("--", "s"), "overlapping": (":", "D")}
    for (model, cores, share, tiles), points in ways.items():
        if model == "teacher":
            line, mark = tiled[tiles]
            colour, word = DENSE, "teacher, whole" if tiles == "whole" else f"teacher, tiles {tiles}"
        else:
            line, mark = ("-" if share == "1.0" else "--"), "o"
            colour = {"8": FEW, "64": OURS}.get(cores, "#0f4f4b")
            word = f"{model}, {cores} cores" + ("" if share == "1.0" else f", share {share}")
        look: dict[str, Any] = {"color": colour, "ls": line, "marker": mark, "label": word}
        time.plot([int(width) for width, _, _ in points], [float(ms) for _, ms, _ in points], **look)
        known = [(float(ms), float(value)) for _, ms, value in points if value]
        score.plot([ms for ms, _ in known], [value for _, value in known], **look)
    time.set(xscale="log", yscale="log", title="Milliseconds, bfloat16", xlabel="width, pixels (height 9/16)")
    ticks(time.xaxis, (448, 896, 1344, 1792))
    ticks(time.yaxis, (50, 100, 200, 500, 1000, 2000, 5000, 10000))
    score.set(xscale="log", title="Mean average precision", xlabel="milliseconds an image")
    ticks(score.xaxis, (50, 100, 200, 500, 1000, 2000, 5000, 10000))
    words_below(figure, time)


def stability(numbers: Path, figure: Figure) -> None:
    """Features of a photograph over its width against its own at 448."""
    rows = read_csv(numbers / "stability.csv")
    names = dict.fromkeys((row["model"], row["cores"]) for row in rows)
    for axes, photos in zip(panels(figure, 2, 3.5), ("underwater", "davis"), strict=True):
        for model, cores in names:
            where = {"photos": photos, "model": model, "cores": cores}
            colour = DENSE if model == "teacher" else FEW if cores == "8" else OURS
            axes.plot(
                column(rows, "width", **where),
                column(rows, "centred", **where),
                color=colour,
                ls="--" if cores == "8" else "-",
                marker="^" if model == "teacher" else "o",
                label="teacher" if model == "teacher" else f"{model}, {cores} cores",
            )
        size = {"underwater": "3840×2160", "davis": "854×480"}[photos]
        axes.set(title=f"{photos}, {size}", xlabel="width, pixels", xscale="log", ylabel="centred cosine")
        ticks(axes.xaxis, sorted(set(column(rows, "width", photos=photos))))
    words_below(figure, axes)


def floors(numbers: Path, figure: Figure) -> None:
    """What the weights keep of their teacher, and the floor of each."""
    rows = [row for row in read_csv(numbers / "judge.csv") if row["teacher"]]
    names = list(dict.fromkeys(row["what"] for row in rows))
    (axes,) = panels(figure, 1, 2.9)

    def share(row: dict[str, str], name: str) -> float:
        value = float(row[name].rstrip(" ×%"))
        return 100 / value if "×" in row[name] else value

    for cores, colour, shift in (("64", OURS, -0.18), ("8", FEW, 0.18)):
        mine = [row for row in rows if row["cores"] == cores]
        places = [names.index(row["what"]) + shift for row in mine]
        kept = [share(row, "of the teacher") for row in mine]
        bars = axes.barh(places, kept, height=0.32, color=colour, label=f"{cores} cores")
        axes.bar_label(bars, [f"{value:.0f} %" for value in kept], padding=4, fontsize=9)
        for place, row in zip(places, mine, strict=True):
            floor = share(row, "floor")
            axes.plot([floor, floor], [place - 0.17, place + 0.17], color=DENSE, lw=2.5)
    axes.plot([], [], color=DENSE, lw=2.5, label="floor of the second edition")
    axes.set(title="Shares of the teacher's scores, % (depth: its error over ours)", xlim=(0, 108))
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    words_below(figure, axes)


def elastic(numbers: Path, figure: Figure) -> None:
    """What is kept over milliseconds, a line a knob: mIoU, and the cosine to the full pass."""
    rows = [row for row in read_csv(numbers / "elastic.csv") if not row.get("reaches")]
    knobs: dict[str, tuple[str, dict[str, Any]]] = {
        "patches": ("fewer patches", {"color": OURS, "marker": "o"}),
        "smaller": ("a smaller image", {"color": DENSE, "marker": "^", "ls": "--"}),
        "cores": ("fewer cores", {"color": PLAIN, "marker": "s", "ls": ":"}),
        "auto": ("auto", {"color": FEW, "marker": "D", "ls": "-."}),
        "full": ("full", {"color": "#1d262c", "marker": "*", "ms": 11, "ls": ""}),
        "teacher": ("teacher", {"color": "#c08a1e", "marker": "X", "ms": 9, "ls": ""}),
    }
    found = {side: points for side in ("448", "896") if (points := judged(numbers, rows, side))}
    *scored, mean, worst = panels(figure, 3, 3.9) if len(found) < 2 else panels(figure, 2, 7.2, rows=2)
    for axes, (side, lines) in zip(scored, found.items(), strict=True):
        for knob, points in lines.items():
            label, style = knobs[knob]
            axes.plot(*zip(*points, strict=True), label=label, **style)
        axes.set(title=f"voc-seg mIoU, {side}²")
    side = rows[-1]["size"]
    for axes, name, title in ((mean, "cosine", "Cosine"), (worst, "worst", "Worst tenth")):
        for knob, (label, style) in knobs.items():
            if knob != "teacher":
                here = {"size": side, "knob": knob}
                axes.plot(column(rows, "ms", **here), column(rows, name, **here), label=label, **style)
        axes.set(title=f"{title}, {side}²")
    for axes in (*scored, mean, worst):
        axes.set(xlabel="milliseconds", xlim=(0, None))
    words_below(figure, max((*scored, mean), key=lambda axes: len(axes.get_legend_handles_labels()[1])))


def judged(numbers: Path, rows: Rows, side: str) -> dict[str, list[tuple[float, float]]]:
    """(milliseconds, mIoU) of each knob's settings on voc-seg; milliseconds are those of `elastic`, by tokens."""
    ms = {(row["knob"], row["setting"]): float(row["ms"]) for row in rows if row["size"] == side}
    shares = [float(setting) for knob, setting in ms if knob == "patches"]
    scores = {
        name: read_csv(path) if (path := numbers / f"{name}-voc-{side}.csv").is_file() else []
        for name in ("elastic", "smaller", "cores")
    }
    found: dict[str, list[tuple[float, float]]] = {}

    def add(knob: str, setting: str, row: dict[str, str], place: tuple[str, str] | None = None) -> None:
        if (place or (knob, setting)) in ms:
            found.setdefault(knob, []).append((ms[place or (knob, setting)], float(row["mIoU"])))

    for row in scores["elastic"]:
        share = row["patches"]
        if share == "1":
            for knob in ("patches", "smaller", "cores", "full"):
                add(knob, "", row, ("full", ""))
        else:
            add(*(("auto", "0.98") if share == "auto" else ("patches", share)), row)
    for row in scores["smaller"]:
        tokens = (float(row["pixels"]) / float(side)) ** 2
        add("smaller", f"{min(shares, key=lambda share: abs(share - tokens)):g}", row)
    for row in scores["cores"]:
        add(*(("cores", row["cores"]) if row.get("cores") else ("teacher", "")), row)
    return {knob: sorted(points) for knob, points in found.items()}


PLOTS = {
    "cost": cost,
    "quality": quality,
    "fidelity": fidelity,
    "training": training,
    "ways": ways,
    "service": service,
    "floors": floors,
    "cells": cells,
    "stability": stability,
    "elastic": elastic,
}

if __name__ == "__main__":
    main()
