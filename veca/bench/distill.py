"""`veca bench distill`: how much of the machine the training loop leaves to the networks."""

from __future__ import annotations

import contextlib
import io
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from veca.bench.measure import load_before, noise, noise_said, spread
from veca.cli import parse
from veca.devices import fast_bfloat16, pick_device
from veca.distill.engine import train
from veca.distill.student import Student, build_student
from veca.distill.teaching import Teaching
from veca.files import write_json
from veca.recipes.laptop import Laptop
from veca.teachers import load_teacher
from veca.training.records import METRICS, read_metrics


@dataclass(frozen=True, kw_only=True)
class DistillBench:
    """Images per second of whole training steps, next to the networks alone on a batch that lies in memory.

    "alone" is the teacher's forward pass and the student's forward and backward pass, no more; a whole step also reads
    and augments images in worker processes, checks, clips, steps the optimisers and keeps records. The rounds of all
    kinds are interleaved and medians are reported, so that a busy machine disturbs all of them alike.

    veca bench distill --train photos/ --teacher teacher/ --out bench-distill.json
    """

    train: tuple[str, ...]
    """Images, as for `veca distill`."""
    teacher: str
    """A teacher, as for `veca distill`."""
    student: str = "veca_tiny"
    """The size to train."""
    size: int = 224
    """Crop size."""
    batch: int = 32
    """Images per step."""
    steps: int = 6
    """Steps per measurement."""
    rounds: int = 3
    """Measurements of each kind."""
    workers: int = 2
    """Processes that read images."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    out: Path | None = None
    """Where to write the figures as JSON."""


def main(arguments: list[str]) -> int:
    settings = parse(DistillBench, arguments, "veca bench distill")
    before = load_before()
    rates = measure(settings)
    about = noise({name: spread([1 / rate for rate in values]) for name, values in rates.items()}, before)
    print(table(figures(rates)))
    print(noise_said(about))
    if settings.out is not None:
        write_json(settings.out, {**figures(rates), "noise": about})
    return 0


def measure(settings: DistillBench) -> dict[str, list[float]]:
    """Images per second of each kind, round by round."""
    alone = Alone(settings)
    rates: dict[str, list[float]] = {"both alone": [], "student alone": [], "whole step": [], "whole step, cached": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(settings.rounds):
            rates["both alone"].append(alone.rate(with_teacher=True))
            rates["whole step"].append(whole_steps(settings, folder / f"online-{number}", None))
            rates["student alone"].append(alone.rate(with_teacher=False))
            rates["whole step, cached"].append(whole_steps(settings, folder / f"cached-{number}", folder / "cache"))
    return rates


def figures(rates: dict[str, list[float]]) -> dict[str, float]:
    """Median images per second, and what they are of each other."""
    figures = {name: statistics.median(values) for name, values in rates.items()}
    figures["whole step / both alone"] = figures["whole step"] / figures["both alone"]
    figures["cached step / student alone"] = figures["whole step, cached"] / figures["student alone"]
    figures["cached step / whole step"] = figures["whole step, cached"] / figures["whole step"]
    return figures


def recipe(settings: DistillBench, out: Path, **changes: Any) -> Laptop:
    return Laptop(
        train=settings.train, teacher=settings.teacher, student=settings.student, out=out, epochs=0, warmup_epochs=0,
        steps=3 * settings.steps, batch=settings.batch, resolutions=(settings.size,),
        budgets=(32,), budget_weights=(1,),
        workers=settings.workers, device=settings.device, standardise_images=settings.batch, log_every=settings.steps,
        checkpoint_minutes=60, views=1, **changes,
    )  # fmt: skip


def whole_steps(settings: DistillBench, out: Path, cache: Path | None) -> float:
    """Images per second of the real loop, after a first stretch in which workers start."""
    with contextlib.redirect_stdout(io.StringIO()):
        train(recipe(settings, out, cache_teacher=cache))
    records = [record for record in read_metrics(out / METRICS) if record["kind"] == "train"]
    return float(statistics.median(record["images_per_second"] for record in records[1:]))


class Alone:
    """The networks on one batch in memory."""

    def __init__(self, settings: DistillBench) -> None:
        self.settings, self.device = settings, pick_device(settings.device)
        self.bfloat16 = fast_bfloat16(self.device)
        teacher = load_teacher(settings.teacher, self.device)
        model, _ = build_student(recipe(settings, Path()), teacher)
        self.teaching = Teaching(teacher, model.patch_size, bfloat16=self.bfloat16)
        self.student = Student(model.to(self.device).train())
        self.pixels = torch.randn(settings.batch, 3, settings.size, settings.size, device=self.device)
        self.target = self.teaching(self.pixels)

    def rate(self, with_teacher: bool) -> float:
        times = []
        for _ in range(self.settings.steps + 1):
            began = time.perf_counter()
            with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bfloat16):
                target = self.teaching(self.pixels) if with_teacher else self.target
                loss = self.student(self.pixels, 32, target, None, 0.0, None, 0.0)
            torch.autograd.backward(loss.total)
            self.student.zero_grad(set_to_none=True)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return self.settings.batch / statistics.median(times[1:])


def table(figures: dict[str, float]) -> str:
    width = max(map(len, figures))
    lines = [f"{name:<{width}}  {value:8.2f}{'' if '/' in name else ' images/s'}" for name, value in figures.items()]
    return "\n".join(lines)
