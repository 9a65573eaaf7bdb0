"""`finetune`: one run from top to bottom. The same command continues a run that was stopped, to the same weights."""

from __future__ import annotations

import hashlib
import math
import os
import statistics
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from veca.devices import fast_bfloat16
from veca.errors import InputError
from veca.files import lock_folder, write_json
from veca.images import normalise
from veca.model import Veca
from veca.tasks.base.contract import Look, Seen, Task
from veca.tasks.base.heads import load_head
from veca.tasks.base.options import CHANGEABLE, FineTuneOptions
from veca.tasks.base.tables import Row, Table, merge_seeds
from veca.training.checkpoints import Checkpoints, load_optimisers, read_checkpoint
from veca.training.loop import Loop, Pace
from veca.training.ranks import Ranks, StopSignal
from veca.training.records import Records
from veca.training.schedule import choose, epoch_order, learning_rate, random_at
from veca.weights import weights_digest

WARMUP = 0.1  # of the steps
LOG_EVERY = 20


def finetune(model: Veca, task: Task, settings: FineTuneOptions, side: int, command: str = "") -> Table | None:
    """Train until done or stopped; the table of test scores (with the `command` that made it), or None if stopped."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise InputError("veca finetune is one process: start it without torchrun")
    with lock_folder(settings.out):
        return run(model, task, settings, side, command)


def run(model: Veca, task: Task, settings: FineTuneOptions, side: int, command: str) -> Table | None:
    out, ranks = settings.out, Ranks(settings.device)
    budgets, weights = training_budgets(settings, model.config.bank)
    scored = score_budgets(settings, budgets, model.config.bank)
    torch.manual_seed(random_at(settings.seed, "head").getrandbits(63))
    head = (trained_head(model, task, settings) or task.new_head(model.config.feature_width)).to(ranks.device)
    model.to(ranks.device).requires_grad_(not settings.head_only)
    optimiser = build_optimiser(model, head, settings)
    count = len(task.parts["train"])
    total = max(1, math.ceil(settings.epochs * count / settings.batch))
    identity = {**settings.to_dict(), "start": weights_digest(model), "files": files_digest(task)}
    checkpoints = Checkpoints(out / "checkpoints")
    newest = checkpoints.newest(ranks.say)
    progress: dict[str, Any] = {"step": 0, "best": None}
    if newest is None:
        write_json(out / "settings.json", identity)
        size = sum(
            parameter.numel() for parameter in (*model.parameters(), *head.parameters()) if parameter.requires_grad
        )
        ranks.say(
            f"{count} images, {total} steps of {settings.batch}; training {size:,} parameters "
            f"({'the head' if settings.head_only else 'all'}) at {', '.join(map(str, budgets))} cores; {ranks.device}"
        )
    else:
        saved = read_checkpoint(newest)
        changed = [key for key in identity if key not in CHANGEABLE and identity[key] != saved["identity"].get(key)]
        if changed:
            was, now = ({key: one.get(key) for key in changed} for one in (saved["identity"], identity))
            raise InputError(f"{out} was started with other settings ({was}, not {now}): use another --out")
        model.load_state_dict(saved["model"])
        head.load_state_dict(saved["head"])
        load_optimisers([optimiser], [saved["optimiser"]], out)
        progress = saved["progress"]
        ranks.say(f"continuing {out} at step {progress['step']} of {total}")

    records = Records(out, total=total, start=progress["step"], board=False)
    tuner = FineTuner(model, head, task, settings, optimiser, progress, identity, budgets, weights, total, side,
                      max(scored), records)  # fmt: skip
    pace = Pace(total, LOG_EVERY, tuner.judge_every, settings.checkpoint_minutes, settings.stop_at, settings.clip)
    try:
        with StopSignal() as stop:
            finished = Loop(tuner, out, ranks, stop, records, checkpoints, pace).run()
    finally:
        tuner.batches.close()
        records.close()
    if not finished:
        return None
    if tuner.chooses and (best := checkpoints.list("best")):
        state = read_checkpoint(best[0])
        model.load_state_dict(state["model"])
        head.load_state_dict(state["head"])
        ranks.say(f"keeping the weights of step {state['progress']['step']}, the best on val/")
    table = finish(model, head, task, settings, side, scored)
    table.command = command
    table.write(out)
    return table


class FineTuner:
    """What fine-tuning brings to the training loop."""

    def __init__(
        self, model: Veca, head: nn.Module, task: Task, settings: FineTuneOptions, optimiser: torch.optim.Optimizer,
        progress: dict[str, Any], identity: dict[str, Any], budgets: list[int], weights: list[float], total: int,
        side: int, judged_at: int, records: Records,
    ) -> None:  # fmt: skip
        self.model, self.head, self.task, self.settings = model, head, task, settings
        self.optimisers, self.progress, self.identity = [optimiser], progress, identity
        self.budgets, self.weights, self.total = budgets, weights, total
        self.side, self.judged_at, self.records = side, judged_at, records
        self.device = next(model.parameters()).device
        self.bfloat16 = self.device.type != "mps" and fast_bfloat16(self.device)
        self.chooses = bool(task.parts["validation"])  # the best weights; else test/ is only looked at
        count = len(task.parts["train"])
        self.judge_every = round(settings.score_every * count / settings.batch) or (
            math.ceil(count / settings.batch) if self.chooses else 0
        )
        self.batches = batches(task, settings, side, progress["step"], total)
        self.losses: list[float] = []  # since the last record
        self.budget, self.began = 0, time.monotonic()

    def rate(self, step: int) -> float:
        return learning_rate(step, self.total, round(WARMUP * self.total), 1.0, 0.0)

    def parameters(self) -> Sequence[nn.Parameter]:
        return [parameter for group in self.optimisers[0].param_groups for parameter in group["params"]]

    def backward(self, step: int) -> bool:
        settings = self.settings
        images, labels = next(self.batches)
        self.budget = choose(self.budgets, self.weights, settings.seed, "budget", step)
        self.model.train(not settings.head_only)
        self.head.train()
        torch.manual_seed(random_at(settings.seed, "positions", step).getrandbits(63))  # the jitter of positions
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bfloat16):
            seen = look_with(self.model, self.budget)(images.to(self.device))
            loss = self.task.loss(self.head, seen, labels)
        torch.autograd.backward(loss)
        self.losses.append(float(loss.detach()))
        return math.isfinite(self.losses[-1])

    def record(self, step: int, rate: float, norm: float) -> tuple[dict[str, Any], str]:
        mean, speed = statistics.fmean(self.losses), len(self.losses) * self.settings.batch / self.seconds()
        self.losses = []
        values = {"loss": mean, "lr": rate * self.settings.lr, "budget": self.budget}
        return values, f"loss {mean:.4f}  {speed:.1f} images/s"

    def seconds(self) -> float:
        """Since this was last asked."""
        before, self.began = self.began, time.monotonic()
        return self.began - before

    def judge(self, step: int) -> float | None:
        if not self.chooses and (not self.judge_every or step % self.judge_every):
            return None
        part, main = "validation" if self.chooses else "test", self.task.main
        scores = evaluate(self.model, self.head, self.task, part, self.judged_at, self.side)
        text = f"{part} {main} {scores[main]:.4f} at {self.judged_at} cores"
        self.records.judged(step, {"part": part, **scores}, {}, text)
        self.seconds()
        return float(scores[main]) if self.chooses else None

    def better(self, score: float, best: Any) -> bool:
        return is_better(score, best, self.task.better)

    def give_up(self, step: int, skipped: int) -> str:
        return f"the loss is not finite at step {step}: try a lower --lr and --head-lr"

    def state(self) -> dict[str, Any]:
        states = {"model": self.model.state_dict(), "head": self.head.state_dict()}
        return {**states, "optimiser": self.optimisers[0].state_dict(), "identity": self.identity}

    def keep_best(self) -> None:
        """The checkpoint is enough: `finish` loads it."""

    def keep_last(self) -> None:
        """`finish` writes the weights, with their test scores."""


def trained_head(model: Veca, task: Task, settings: FineTuneOptions) -> nn.Module | None:
    """The head of a probe to begin with; it must fit the data, and the weights it was trained on."""
    if settings.start_head is None:
        return None
    given = load_head(settings.start_head)
    if given.task != task.name or given.about.get("classes", []) != task.classes:
        raise InputError(f"--start-head {settings.start_head}: not a head for the classes of {settings.data}")
    if given.about["weights"] != weights_digest(model):
        raise InputError(f"--start-head {settings.start_head}: not trained on the weights of {settings.model}")
    return task.module(given)


def batches(
    task: Task, settings: FineTuneOptions, side: int, start: int, total: int
) -> Generator[tuple[Tensor, list[Tensor]], None, None]:
    """(images B×S×S×3 uint8, labels) of each step, read ahead by threads; its number alone decides what it sees."""
    count = len(task.parts["train"])

    @lru_cache(maxsize=2)
    def order(epoch: int) -> list[int]:
        return [int(number) for number in epoch_order([count], settings.seed, epoch)]

    def load(place: int) -> tuple[Tensor, Tensor]:
        epoch, within = divmod(place, count)
        return task.load(order(epoch)[within], side, random_at(settings.seed, "view", place))

    def submit(step: int) -> list[Future[tuple[Tensor, Tensor]]]:
        places = range(step * settings.batch, (step + 1) * settings.batch) if step < total else ()
        return [pool.submit(load, place) for place in places]

    with ThreadPoolExecutor(settings.workers) as pool:
        coming = submit(start)
        for step in range(start, total):
            present, coming = [future.result() for future in coming], submit(step + 1)
            yield torch.stack([image for image, _ in present]), [label for _, label in present]


def training_budgets(settings: FineTuneOptions, bank: int) -> tuple[list[int], list[float]]:
    """The budgets to draw from and how often; without --cores those of the paper, as far as the bank goes."""
    if settings.cores:
        check_budgets(settings.cores, bank, "--cores")
        return list(settings.cores), [1.0] * len(settings.cores)
    pairs = [pair for pair in zip(range(8, 72, 8), (1, 1, 2, 2, 3, 3, 4, 4), strict=True) if pair[0] <= bank] or [
        (bank, 1)
    ]
    return [budget for budget, _ in pairs], [float(weight) for _, weight in pairs]


def score_budgets(settings: FineTuneOptions, trained: list[int], bank: int) -> list[int]:
    check_budgets(settings.score_cores, bank, "--score-cores")
    return sorted({*settings.score_cores} or {min(trained), max(trained)}, reverse=True)


def check_budgets(budgets: tuple[int, ...], bank: int, flag: str) -> None:
    for budget in budgets:
        if not 1 <= budget <= bank:
            raise InputError(f"{flag} {budget}: this model has budgets from 1 to {bank}")


def layer_of(name: str, depth: int) -> int:
    """Where a parameter of the backbone sits: 0 for what comes before the blocks, depth + 1 for what comes after."""
    part, *rest = name.split(".")
    if part == "blocks":
        return int(rest[0]) + 1
    return depth + 1 if part in ("norm", "project") else 0


def build_optimiser(model: Veca, head: nn.Module, settings: FineTuneOptions) -> torch.optim.AdamW:
    """AdamW with one group per layer and kind; `rate` is the group's highest rate, scaled by the schedule."""
    depth = model.config.depth
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            rate = settings.lr * settings.layer_decay ** (depth + 1 - layer_of(name, depth))
            decay = settings.weight_decay if parameter.ndim > 1 and not name.startswith(("bank.", "table")) else 0.0
            groups.setdefault((rate, decay), []).append(parameter)
    for parameter in head.parameters():
        decay = settings.weight_decay if parameter.ndim > 1 else 0.0
        groups.setdefault((settings.head_lr, decay), []).append(parameter)
    return torch.optim.AdamW(
        [{"params": parameters, "rate": rate, "weight_decay": decay} for (rate, decay), parameters in groups.items()],
        lr=settings.lr,
    )


def look_with(model: Veca, cores: int) -> Look:
    def look(images: Tensor) -> Seen:
        out = model(normalise(images), cores=cores)
        return Seen(out.cls, out.patches, out.cores)

    return look


def evaluate(model: Veca, head: nn.Module, task: Task, part: str, cores: int, side: int) -> dict[str, Any]:
    model.eval()
    head.eval()
    return task.score(head, look_with(model, cores), part, side)


def is_better(score: float, best: float | None, better: str) -> bool:
    if best is None or not math.isfinite(best):
        return math.isfinite(score)
    return score > best if better == "higher" else score < best


def finish(model: Veca, head: nn.Module, task: Task, settings: FineTuneOptions, side: int, scored: list[int]) -> Table:
    """Test scores at each budget, and what is kept: model/, head/, results.json and results.csv."""
    out = settings.out
    model.eval().requires_grad_(True)
    start = str(model.card.pop("source", settings.model))
    model.card = {
        **model.card,
        "finetuned": {"task": task.name, "data": settings.data.name, "from": start, "head only": settings.head_only},
    }
    if not settings.head_only:
        model.calibration = None  # of other weights
    model.save(out / "model")
    digest = weights_digest(model)
    table = Table(f"finetune {task.name}", settings.data.name, task.main, task.better, task.classes)
    table.settings = settings.to_dict()
    for cores in scored:
        values, per_class = merge_seeds([evaluate(model, head, task, "test", cores, side)])
        table.rows.append(Row(out.name, str(out / "model"), digest, side, side, cores, values, per_class=per_class))
        table.write(out)
    kept = task.saved_head(head)
    kept.about = {**table.rows[0].for_head(), **kept.about}
    kept.save(out / "head")
    return table


def files_digest(task: Task) -> str:
    """One data set from another, by the names and sizes of its files."""
    digest = hashlib.sha256()
    for part in task.parts:
        for path in task.files(part):
            digest.update(f"{part}/{path.parent.name}/{path.name}/{path.stat().st_size}\n".encode())
    return digest.hexdigest()
