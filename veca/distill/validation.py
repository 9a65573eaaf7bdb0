"""How close the student is to its teacher on images it never trained on, over resolutions × budgets."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from veca.distill.data import Key, Views, loaded
from veca.distill.losses import Standards, distillation_loss
from veca.distill.sources import TrainingImages
from veca.distill.teaching import Teaching
from veca.model import Veca
from veca.scan import scanned
from veca.teachers import TeacherOutput
from veca.training.ranks import Ranks

KEPT_BYTES = 1 << 30  # the teacher's answers are kept for the next validation while they fit
NAMES = ("loss", "global_cosine", "dense_cosine", "mse", "raw_global_cosine", "raw_dense_cosine")


class Result(NamedTuple):
    grid: dict[str, dict[str, dict[str, float]]]  # resolution → budget → the figures in NAMES
    constant: dict[str, float]  # resolution → the dense cosine of the best constant prediction
    loss: float  # mean over the grid


class Validation:
    def __init__(
        self, images: TrainingImages, teaching: Teaching, ranks: Ranks, *, sizes: tuple[int, ...],
        budgets: tuple[int, ...], count: int, batch: int, workers: int,
    ) -> None:  # fmt: skip
        self.views, self.teaching, self.ranks = Views(images, 0), teaching, ranks
        self.sizes, self.budgets, self.workers = sizes, budgets, workers
        step = max(1, len(images) // count)  # spread over the whole set
        chosen = list(range(0, len(images), step))[:count]
        batches = [chosen[first : first + batch] for first in range(0, len(chosen), batch)]
        self.batches = batches[ranks.rank :: ranks.count]
        self.rounds = -(-len(batches) // ranks.count)
        self.kept: dict[tuple[int, int], TeacherOutput] = {}
        self.kept_bytes = 0

    @torch.no_grad()
    def run(
        self, model: Veca, standards: Standards | None, stopped: Callable[[], bool], share: float = 1.0
    ) -> Result | None:
        """Figures over the grid, or None if the run was asked to stop; with `share`, of so many patches read."""
        device = self.ranks.device
        was_training = model.training
        model.eval()
        grid: dict[str, dict[str, dict[str, float]]] = {}
        constant: dict[str, float] = {}
        for size in self.sizes:
            totals = torch.zeros(len(self.budgets), len(NAMES), dtype=torch.float64)
            direction = torch.zeros(self.teaching.teacher.width, dtype=torch.float64)
            images, patches = 0, 0
            keys = [[Key(number, -1, size) for number in part] for part in self.batches]
            with closing(loaded(self.views, keys, min(self.workers, len(keys)), pin=False)) as batches:
                for number in range(self.rounds):
                    if stopped():  # asked as often on every rank
                        model.train(was_training)
                        return None
                    batch = next(batches, None)
                    if batch is None:  # the last round has no batch for some ranks
                        continue
                    pixels = batch.images.to(device)
                    target = self.teach(number, size, pixels)
                    seen_by_model = pixels.to(model.patch_embed.proj.weight.dtype)
                    for row, budget in enumerate(self.budgets):
                        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.teaching.bfloat16):
                            if share == 1:
                                out = model(seen_by_model, cores=budget)
                            else:
                                out = scanned(model, seen_by_model, budget, share)
                        loss = distillation_loss(out.cls, out.patches, target.cls, target.patches, standards)
                        raw = distillation_loss(out.cls, out.patches, target.cls, target.patches)
                        values = [*loss[:4], raw.global_cosine, raw.dense_cosine]
                        totals[row] += torch.stack(values).cpu().double() * len(pixels)
                    seen = target.patches if standards is None else standards.patches(target.patches)
                    direction += functional.normalize(seen, dim=-1).cpu().double().sum((0, 1))
                    images += len(pixels)
                    patches += seen.shape[0] * seen.shape[1]
            counts = self.ranks.sum(torch.tensor([images, patches], dtype=torch.float64)).cpu()
            means = (self.ranks.sum(totals).cpu() / counts[0]).tolist()
            grid[str(size)] = {
                str(budget): dict(zip(NAMES, row, strict=True)) for budget, row in zip(self.budgets, means, strict=True)
            }
            constant[str(size)] = float(self.ranks.sum(direction).cpu().norm() / counts[1])
        model.train(was_training)
        losses = [figures["loss"] for row in grid.values() for figures in row.values()]
        return Result(grid, constant, sum(losses) / len(losses))

    def teach(self, number: int, size: int, pixels: torch.Tensor) -> TeacherOutput:
        """The teacher's features of a batch; computed once where they can be kept."""
        if (size, number) not in self.kept:
            out = self.teaching(pixels)
            bytes_needed = 4 * (out.patches.numel() + out.cls.numel())
            if self.kept_bytes + bytes_needed > KEPT_BYTES:
                return out
            self.kept[size, number] = TeacherOutput(out.cls.clone(), out.patches.clone(), None)
            self.kept_bytes += bytes_needed
        return self.kept[size, number]


def result_table(result: Result) -> str:
    """Dense and global cosine for every resolution and budget, as text."""
    lines = []
    for size, row in result.grid.items():
        cells = "  ".join(
            f"{budget}: {figures['dense_cosine']:.3f}/{figures['global_cosine']:.3f}" for budget, figures in row.items()
        )
        lines.append(f"  {size}²  dense/global cosine at  {cells}  (best constant {result.constant[size]:.3f})")
    return "\n".join([f"validation loss {result.loss:.4f}", *lines])


def result_record(result: Result) -> dict[str, Any]:
    return {"loss": result.loss, "grid": result.grid, "constant": result.constant}


def result_scalars(result: Result) -> dict[str, float]:
    """Every figure by `resolution/budget/name`, and the mean loss."""
    each = {
        f"{size}/{budget}/{name}": value
        for size, row in result.grid.items()
        for budget, figures in row.items()
        for name, value in figures.items()
    }
    return {**each, "loss": result.loss}
