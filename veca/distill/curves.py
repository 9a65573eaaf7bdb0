"""The curves of a run as a picture: training loss, rate, and validation cosine by budget."""

from __future__ import annotations

from pathlib import Path

from veca.errors import InputError, require
from veca.files import whole_file
from veca.training.records import METRICS, read_metrics


def plot(run: Path) -> Path:
    """The curves of a run as `curves.png`: training loss, rate, and validation cosine by budget."""
    if not (run / METRICS).is_file():
        raise InputError(f"{run} holds no {METRICS}: give the folder of a distillation run")
    require("matplotlib", "train")
    from matplotlib.figure import Figure

    records = read_metrics(run / METRICS)
    train = [record for record in records if record["kind"] == "train"]
    validation = [record for record in records if record["kind"] == "validation"]
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for name, label in (("loss", "loss"), ("hints", "of which hints"), ("mse", "MSE")):
        if any(record[name] for record in train):
            left.plot([r["step"] for r in train], [r[name] for r in train], label=label, linewidth=1)
    if validation:
        left.plot([r["step"] for r in validation], [r["loss"] for r in validation], "k.-", label="validation loss")
        for size, row in validation[-1]["grid"].items():
            for budget in row:
                seen = [r for r in validation if budget in r["grid"].get(size, {})]  # a run may change what it looks at
                cosines = [r["grid"][size][budget]["dense_cosine"] for r in seen]
                middle.plot([r["step"] for r in seen], cosines, ".-", label=f"{size}², {budget} cores", linewidth=1)
        constant = next(iter(validation[-1]["constant"].values()))
        middle.axhline(constant, color="grey", linestyle=":", label="best constant")
    right.plot([r["step"] for r in train], [r["lr"] for r in train])
    for axis, title in ((left, "loss"), (middle, "validation: dense cosine"), (right, "rate")):
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=6)
    with whole_file(run / "curves.png") as temporary:
        figure.savefig(temporary, dpi=120)
    return run / "curves.png"
