"""`veca probe teacher`: how close models are to their teacher, over budgets and sizes.

The measuring is that of a run's validation; here the statistics for standardised cosines come from the photos measured.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from veca.backbones import Backbone, load_backbone, short_names
from veca.devices import pick_device, pick_dtype
from veca.distill.data import Key, collate
from veca.distill.losses import Standards
from veca.distill.sources import index_images
from veca.distill.student import estimate_standards
from veca.distill.teaching import Teaching
from veca.distill.validation import Validation
from veca.errors import InputError
from veca.files import whole_file
from veca.model import Veca
from veca.probes.settings import Fidelity
from veca.progress import progress
from veca.tasks.base.tables import Row, Table
from veca.teachers import load_teacher
from veca.training.ranks import Ranks

METRICS = ("dense_cosine", "global_cosine", "raw_dense_cosine", "raw_global_cosine")
BATCH = 16


def fidelity(settings: Fidelity, done: Callable[[Table], None]) -> Table:
    """The table, written after every model and size; and its picture."""
    if not settings.model:
        raise InputError("give at least one --model")
    if settings.images < 1 or any(size < 1 for size in settings.size):
        raise InputError("--images and --size must be at least 1")
    device = pick_device(settings.device)
    photos, teacher = index_images((str(settings.data),)), load_teacher(settings.teacher, device)
    table = Table("teacher", settings.data.name, "dense_cosine", "higher", shares=False)
    table.note(settings)
    backbones = [load_backbone(source, device, pick_dtype(settings.dtype, device)) for source in settings.model]
    for backbone, name in zip(backbones, short_names(settings.model), strict=True):
        backbone.name = name
        backbone.reading(settings.share, None).budgets(settings.cores)  # refused before the long work
        if not isinstance(backbone.model, Veca) or backbone.width != teacher.width:
            raise InputError(
                f"{backbone.source}: not a VECA whose features are as wide as the teacher's ({teacher.width})"
            )
    measured: dict[tuple[int, int], tuple[Validation, Standards]] = {}
    cells = [(size, backbone) for size in settings.size for backbone in backbones]
    for size, backbone in progress(cells, "cosines", len(cells)):
        side, patch = backbone.pixels(size), backbone.patch_size
        if (side, patch) not in measured:
            measured.clear()  # the teacher's features of one size are kept, not of all
            validation = Validation(
                photos, Teaching(teacher, patch, BATCH), Ranks(str(device)), sizes=(side,), budgets=(),
                count=settings.images, batch=BATCH, workers=0,
            )  # fmt: skip
            measured[side, patch] = validation, teacher_standards(validation, side)
        validation, standards = measured[side, patch]
        table.rows += rows(backbone, size, validation, standards, settings.cores)
        done(table)
    table.rows.sort(key=lambda row: settings.model.index(row.source))
    done(table)
    plot_cosines(table, settings.out / "fidelity.png")
    return table


@torch.no_grad()
def teacher_standards(validation: Validation, side: int) -> Standards:
    """The teacher's statistics over the photos that are measured; its features are kept for the models."""
    device = validation.ranks.device

    def outputs() -> Any:
        for number, part in enumerate(validation.batches):
            pixels = collate([validation.views[Key(index, -1, side)] for index in part]).images.to(device)
            yield validation.teach(number, side, pixels)

    found = estimate_standards(outputs())
    moved = [type(standard)(*(value.to(device) for value in standard)) for standard in (found.cls, found.patches)]
    return Standards(moved[0], moved[1], None)


def rows(
    backbone: Backbone, size: int, validation: Validation, standards: Standards, cores: tuple[int, ...]
) -> list[Row]:
    """One row per budget of one model at one size."""
    budgets = backbone.budgets(cores)
    validation.budgets = tuple(budget or backbone.veca.config.bank for budget in budgets)
    result = validation.run(backbone.veca, standards, lambda: False, share=backbone.share)
    assert result is not None
    side = backbone.pixels(size)
    figures = result.grid[str(side)]
    return [
        Row(
            backbone.name, backbone.source, backbone.digest, size, side, budget,
            {**{name: [figures[str(used)][name]] for name in METRICS}, "constant": [result.constant[str(side)]]},
            extra={"images": sum(map(len, validation.batches))},
        )
        for budget, used in zip(budgets, validation.budgets, strict=True)
    ]  # fmt: skip


def plot_cosines(table: Table, path: Path) -> None:
    """Cosine over budget, a line per size: patches and global feature, standardised and raw, one row per model."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    models = list(dict.fromkeys((row.source, row.model) for row in table.rows))
    figure = Figure(figsize=(13, 0.6 + 2.9 * len(models)), layout="constrained")
    FigureCanvasAgg(figure)
    grid: Any = figure.subplots(len(models), len(METRICS), squeeze=False, sharex=True)
    titles = ("patches, standardised", "global, standardised", "patches, raw", "global, raw")
    for line, (source, name) in zip(grid, models, strict=True):
        for axes, metric, title in zip(line, METRICS, titles, strict=True):
            own = [row for row in table.rows if row.source == source]
            for number, size in enumerate(dict.fromkeys(row.size for row in own)):
                points = [(row.cores or 0, row.mean(metric)) for row in own if row.size == size]
                colour, pixels = f"C{number}", next(row.pixels for row in own if row.size == size)
                axes.plot(*zip(*points, strict=True), marker="o", ms=4, color=colour, label=f"{pixels}²")
                if metric == "dense_cosine":
                    constant = next(row.mean("constant") for row in own if row.size == size)
                    axes.axhline(constant, color=colour, linestyle=":", linewidth=1)
            axes.set_title(f"{name}: {title}", fontsize=9)
            axes.grid(alpha=0.3)
            axes.set_xticks(sorted({row.cores or 0 for row in own}))
            axes.set_ylim(min(0.0, *(row.mean(metric) for row in table.rows)) - 0.03, 1.02)
        line[0].legend(fontsize=7, title="dotted: best constant", title_fontsize=7)
        line[0].set_ylabel("cosine to the teacher")
    for axes in grid[-1]:
        axes.set_xlabel("active cores")
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=130)
