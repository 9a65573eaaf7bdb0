"""`finetune`: one run from top to bottom.

As in distillation, every draw is a function of the seed and the step, and a checkpoint holds the rest: the same command
continues a run that was stopped, to the same weights.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from veca.backbones import weights_digest
from veca.distill.checkpoints import Checkpoints
from veca.distill.ranks import StopSignal, choose_device, fast_bfloat16
from veca.distill.records import METRICS, keep_until
from veca.distill.schedule import draw, epoch_order, learning_rate, stream
from veca.errors import InputError
from veca.files import write_json
from veca.finetune.settings import CHANGEABLE, Common
from veca.finetune.tasks import Task
from veca.model import Veca
from veca.optim import set_rate
from veca.probes.heads import Head
from veca.probes.run import head_about
from veca.probes.tables import Row, Table, merge_seeds

WARMUP = 0.1  # of the steps
LOG_EVERY = 20


def finetune(model: Veca, task: Task, settings: Common, side: int, command: str = "") -> Table | None:
    """Train until done or stopped; the table of test scores (with the `command` that made it), or None if stopped."""
    out, device = settings.out, choose_device(settings.device)
    bfloat16 = device.type != "mps" and fast_bfloat16(device)
    budgets, weights = training_budgets(settings, model.config.bank)
    scored = score_budgets(settings, budgets, model.config.bank)
    torch.manual_seed(stream(settings.seed, "head").getrandbits(63))
    head = (trained_head(model, task, settings) or task.new_head(model.config.feature_width)).to(device)
    model.to(device).requires_grad_(not settings.head_only)
    optimiser = build_optimiser(model, head, settings)
    count = len(task.parts["train"])
    total = max(1, math.ceil(settings.epochs * count / settings.batch))
    identity = {**settings.to_dict(), "start": weights_digest(model), "files": files_digest(task)}
    checkpoints = Checkpoints(out / "checkpoints")
    saved = checkpoints.load_last(print)
    progress: dict[str, Any] = {"step": 0, "best": None}
    if saved is None:
        write_json(out / "settings.json", identity)
        size = sum(
            parameter.numel() for parameter in (*model.parameters(), *head.parameters()) if parameter.requires_grad
        )
        print(
            f"{count} images, {total} steps of {settings.batch}; training {size:,} parameters "
            f"({'the head' if settings.head_only else 'all'}) at {', '.join(map(str, budgets))} cores; {device}",
            flush=True,
        )
    else:
        changed = [key for key in identity if key not in CHANGEABLE and identity[key] != saved["identity"].get(key)]
        if changed:
            was, now = ({key: one[key] for key in changed} for one in (saved["identity"], identity))
            raise InputError(f"{out} was started with other settings ({was}, not {now}): use another --out")
        model.load_state_dict(saved["model"])
        head.load_state_dict(saved["head"])
        optimiser.load_state_dict(saved["optimiser"])
        progress = saved["progress"]
        print(f"continuing {out} at step {progress['step']} of {total}", flush=True)

    start: int = progress["step"]
    keep_until(out / METRICS, start)
    has_validation = bool(task.parts["validation"])
    part = "validation" if has_validation else "test"
    every = round(settings.score_every * count / settings.batch) or (
        math.ceil(count / settings.batch) if has_validation else 0
    )
    seen, began, saved_at = Means(), time.monotonic(), time.monotonic()

    def save(step: int, finished: bool = False) -> Path:
        progress["step"] = step
        state = {"model": model.state_dict(), "head": head.state_dict(), "optimiser": optimiser.state_dict()}
        return checkpoints.save({**state, "progress": progress, "identity": identity, "finished": finished}, step)

    with StopSignal() as stop:
        for step, images, labels in batches(task, settings, start, total):
            if stop.asked or step == settings.stop_at > 0:
                save(step)
                print(f"stopped at step {step}; the same command continues", flush=True)
                return None
            budget = draw(budgets, weights, settings.seed, "budget", step)
            lr = learning_rate(step, total, round(WARMUP * total), 1.0, 0.0)
            set_rate([optimiser], lr)
            model.train(not settings.head_only)
            head.train()
            torch.manual_seed(stream(settings.seed, "positions", step).getrandbits(63))  # the jitter of positions
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bfloat16):
                loss = task.loss(model, head, images.to(device), labels, budget)
            if not bool(loss.isfinite()):
                raise InputError(f"the loss is not finite at step {step}: try a lower --lr and --head-lr")
            optimiser.zero_grad(set_to_none=True)
            torch.autograd.backward(loss)
            if settings.clip:
                trained = [p for group in optimiser.param_groups for p in group["params"] if p.grad is not None]
                torch.nn.utils.clip_grad_norm_(trained, settings.clip)
            optimiser.step()
            seen.add(float(loss.detach()))

            done = step + 1
            if done % LOG_EVERY == 0 or done == total:
                rate = (done - start) * settings.batch / (time.monotonic() - began)
                mean, left = seen.take(), (total - done) * settings.batch / rate / 60
                record(out, {"kind": "train", "step": done, "loss": mean, "lr": lr * settings.lr, "budget": budget})
                print(f"step {done}/{total}  loss {mean:.4f}  {rate:.1f} images/s  {left:.1f} min left", flush=True)
            if every and (done % every == 0 or (done == total and has_validation)):
                scores = evaluate(model, head, task, part, max(scored))
                record(out, {"kind": "validation", "step": done, "part": part, **scores})
                print(f"step {done}: {part} {task.main} {scores[task.main]:.4f} at {max(scored)} cores", flush=True)
                if has_validation and is_better(scores[task.main], progress["best"], task.better):
                    progress["best"] = scores[task.main]
                    checkpoints.mark_best(save(done))
            if done == total or time.monotonic() - saved_at >= 60 * settings.checkpoint_minutes:
                save(done, finished=done == total)
                saved_at = time.monotonic()
    if has_validation and (best := checkpoints.list("best")):
        state = torch.load(best[0], map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        head.load_state_dict(state["head"])
        print(f"keeping the weights of step {state['progress']['step']}, the best on val/", flush=True)
    table = finish(model, head, task, settings, side, scored)
    table.command = command
    table.write(out)
    return table


def trained_head(model: Veca, task: Task, settings: Common) -> nn.Linear | None:
    """The head of a probe to begin with; it must fit the data, and the weights it was trained on."""
    if settings.start_head is None:
        return None
    given = Head.load(settings.start_head)
    if given.task != task.name or given.about.get("classes", []) != task.classes:
        raise InputError(f"--start-head {settings.start_head}: not a head for the classes of {settings.data}")
    if given.about["weights"] != weights_digest(model):
        raise InputError(f"--start-head {settings.start_head}: not trained on the weights of {settings.model}")
    linear = nn.Linear(given.weight.shape[1], given.weight.shape[0])
    linear.load_state_dict({"weight": given.weight, "bias": given.bias})
    return linear


def batches(task: Task, settings: Common, start: int, total: int) -> Iterator[tuple[int, Tensor, list[Tensor]]]:
    """(step, images B×3×S×S, labels), read ahead by threads; what a step sees depends on its number alone."""
    count = len(task.parts["train"])

    @lru_cache(maxsize=2)
    def order(epoch: int) -> list[int]:
        return [int(number) for number in epoch_order([count], settings.seed, epoch)]

    def load(place: int) -> tuple[Tensor, Tensor]:
        epoch, within = divmod(place, count)
        return task.load(order(epoch)[within], stream(settings.seed, "view", place))

    def submit(step: int) -> list[Future[tuple[Tensor, Tensor]]]:
        places = range(step * settings.batch, (step + 1) * settings.batch) if step < total else ()
        return [pool.submit(load, place) for place in places]

    with ThreadPoolExecutor(settings.workers) as pool:
        coming = submit(start)
        for step in range(start, total):
            present, coming = [future.result() for future in coming], submit(step + 1)
            yield step, torch.stack([image for image, _ in present]), [label for _, label in present]


def training_budgets(settings: Common, bank: int) -> tuple[list[int], list[float]]:
    """The budgets to draw from and how often; without --cores those of the paper, as far as the bank goes."""
    if settings.cores:
        check_budgets(settings.cores, bank, "--cores")
        return list(settings.cores), [1.0] * len(settings.cores)
    pairs = [pair for pair in zip(range(8, 72, 8), (1, 1, 2, 2, 3, 3, 4, 4), strict=True) if pair[0] <= bank] or [
        (bank, 1)
    ]
    return [budget for budget, _ in pairs], [float(weight) for _, weight in pairs]


def score_budgets(settings: Common, trained: list[int], bank: int) -> list[int]:
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


def build_optimiser(model: Veca, head: nn.Module, settings: Common) -> torch.optim.AdamW:
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


def evaluate(model: Veca, head: nn.Module, task: Task, part: str, cores: int) -> dict[str, Any]:
    model.eval()
    head.eval()
    return task.score(model, head, part, cores)


def is_better(score: float, best: float | None, better: str) -> bool:
    if best is None or not math.isfinite(best):
        return math.isfinite(score)
    return score > best if better == "higher" else score < best


def finish(model: Veca, head: nn.Module, task: Task, settings: Common, side: int, scored: list[int]) -> Table:
    """Test scores at each budget, and what is kept: model/, head/, results.json and results.csv."""
    out = settings.out
    model.eval().requires_grad_(True)
    start = str(model.card.pop("source", settings.model))
    model.card = {
        **model.card,
        "finetuned": {"task": task.name, "data": settings.data.name, "from": start, "head only": settings.head_only},
    }
    model.save(out / "model")
    digest = weights_digest(model)
    table = Table(f"finetune {task.name}", settings.data.name, task.main, task.better, task.classes)
    table.settings = settings.to_dict()
    for cores in scored:
        values, per_class = merge_seeds([evaluate(model, head, task, "test", cores)])
        table.rows.append(Row(out.name, str(out / "model"), digest, side, side, cores, values, per_class=per_class))
        table.write(out)
    kept = task.saved_head(head)
    kept.about = {**head_about(table.rows[0], str(kept.about["feature"])), **kept.about}
    kept.save(out / "head")
    return table


def files_digest(task: Task) -> str:
    """One data set from another, by the names and sizes of its files."""
    digest = hashlib.sha256()
    for part in task.parts:
        for path in task.files(part):
            digest.update(f"{part}/{path.parent.name}/{path.name}/{path.stat().st_size}\n".encode())
    return digest.hexdigest()


def record(out: Path, values: dict[str, Any]) -> None:
    with open(out / METRICS, "a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")


class Means:
    """The mean loss since the last record."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def add(self, value: float) -> None:
        self.values.append(value)

    def take(self) -> float:
        mean = sum(self.values) / len(self.values)
        self.values = []
        return mean
