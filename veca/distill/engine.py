"""`train`: one run of distillation from top to bottom (docs/training.md).

What makes it survive everything: every draw is a function of the seed and the step (`schedule`), a checkpoint holds the
rest (`checkpoints`), and the same command finds it again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from veca.distill.cache import fingerprint, prepare_cache
from veca.distill.card import run_card
from veca.distill.checkpoints import Checkpoints, Keeper
from veca.distill.data import Batch, Key, Plan, Views, collate, loader
from veca.distill.losses import Loss
from veca.distill.ranks import Ranks, StopSignal, fast_bfloat16
from veca.distill.records import Meter, Records, plot
from veca.distill.schedule import draw, learning_rate, stream
from veca.distill.settings import Settings, differences
from veca.distill.sources import Images, find_images
from veca.distill.student import (
    Student,
    build_student,
    estimate_standards,
    standards_from_dict,
    standards_to_dict,
)
from veca.distill.validation import Result, Validation, result_record, result_table
from veca.errors import InputError
from veca.files import whole_file, write_json
from veca.model import Veca
from veca.optim import build_optimisers, set_rate, split_parameters, split_table
from veca.teachers import Teacher, TeacherOutput, load_teacher


class Length(NamedTuple):
    """How long a run is, in images and steps."""

    batch: int  # images per rank and backward pass
    step_images: int  # images per step, over all ranks
    total: int  # steps
    warmup: int
    epoch: float  # steps in an epoch


def train(settings: Settings) -> Path:
    """Train until done or stopped; returns the run's folder."""
    settings.validate()
    ranks = Ranks(settings.device)
    device, out = ranks.device, settings.out
    bfloat16 = settings.autocast == "on" or (settings.autocast == "auto" and fast_bfloat16(device))
    torch.manual_seed(settings.seed)

    # What there is: images, teacher, student, and perhaps a checkpoint of this run.
    images: Images = ranks.first_goes_ahead(lambda: find_images(settings.train))
    val_images: Images | None = ranks.first_goes_ahead(lambda: find_images(settings.val)) if settings.val else None
    teacher = load_teacher(settings.teacher, device)
    checkpoints = Checkpoints(out / "checkpoints")
    saved = checkpoints.load_last(ranks.say)
    model, report = build_student(settings, teacher)
    if (fitting := settings.whole_patches(model.config.patch_size)) != settings:
        settings = fitting
        ranks.say(f"crop sizes in whole patches of {model.config.patch_size}: {settings.all_resolutions}")
    identity = {
        **settings.to_dict(), "images": images.digest(), "image sizes": images.sizes_digest(),
        "teacher weights": fingerprint(teacher),
    }  # fmt: skip
    model.card = run_card(settings, teacher, images, identity["teacher weights"], before=model.card)
    model.to(device).train()
    model.set_grad_checkpointing(settings.activation_checkpointing)
    shares = split_parameters(model, report.copied, settings.matrices)
    optimisers = build_optimisers(
        shares, settings.lr, settings.weight_decay, settings.copied_rate,
        torch.bfloat16 if bfloat16 and fast_bfloat16(device) else torch.float32, settings.relative_rates,
    )  # fmt: skip
    length = plan_length(settings, len(images), ranks.count, saved)
    judged_on = [str(val_images and val_images.digest()), settings.val_images, *settings.val_budgets,
                 *(settings.val_resolutions or settings.all_resolutions)]  # fmt: skip
    progress: dict[str, Any] = {
        "step": 0, "best": math.inf, "judged_on": judged_on, "skipped": 0, "unreadable": [], "read": 0
    }  # fmt: skip
    if saved is None:
        ranks.say(f"{len(images):,} images; {length.total} steps of {length.step_images}; {device}, "
                  f"{'bfloat16 autocast' if bfloat16 else 'float32'}; {ranks.count} rank(s)")  # fmt: skip
        ranks.say(report.text(model) + "\n" + split_table(shares))
        statistics = ranks.from_first(lambda: sample_standards(settings, images, teacher, model, device, bfloat16))
        if ranks.first:
            write_json(out / "settings.json", identity)
    else:
        if changed := differences(saved["identity"], identity):
            raise InputError(f"{out} was started with other settings ({'; '.join(changed)}): use another --out")
        model.load_state_dict(saved["model"])
        for optimiser, state in zip(optimisers, saved["optimisers"], strict=True):
            optimiser.load_state_dict(state)
        progress, statistics = saved["progress"], saved["standards"]
        if progress.setdefault("judged_on", judged_on) != judged_on:
            ranks.say("validation has changed: the best model is chosen anew")
            progress |= {"judged_on": judged_on, "best": math.inf}
        ranks.say(f"continuing {out} at step {progress['step']} of {length.total}; {ranks.count} rank(s), "
                  f"{length.batch} images each")  # fmt: skip
        if saved["finished"]:
            ranks.say("this run is finished")
            ranks.close()
            return out
    measured = standards_from_dict(statistics, device) if statistics else None
    standards = measured if settings.standardise else None
    hint_standard = measured.layers if measured is not None else None

    with StopSignal() as stop:
        cache = prepare_cache(settings, images, teacher, model, ranks, stop, bfloat16, identity)
        validation = None
        if val_images is not None:
            validation = Validation(
                val_images, teacher, ranks, sizes=settings.val_resolutions or settings.all_resolutions,
                budgets=settings.val_budgets, count=settings.val_images, batch=settings.val_batch,
                workers=settings.workers, bfloat16=bfloat16, teacher_batch=settings.teacher_batch,
            )  # fmt: skip
        student: torch.nn.Module = Student(model)
        if ranks.count > 1:
            student = DistributedDataParallel(student, device_ids=[device] if device.type == "cuda" else None)
        start: int = progress["step"]
        plan = Plan(settings, images.groups, total=length.total, start=start, batch=length.batch, rank=ranks.rank,
                    ranks=ranks.count)  # fmt: skip
        views = Views(images, settings.augment_seed, cache, settings.trivial_augment)
        batches = iter(loader(views, plan, settings.workers, pin=device.type == "cuda"))
        records = Records(out, total=length.total, start=start, active=ranks.first)
        state = {"standards": statistics, "identity": identity, "step_images": length.step_images}
        keeper = Keeper(out, checkpoints, model, optimisers, progress, state, records.warn, active=ranks.first)
        meter, nonfinite, val_every = Meter(), 0, settings.val_every or max(1, round(length.epoch))
        stopping = ranks.any(stop.asked)[0]

        def judge(step: int) -> Result | None:
            """Validate, unless there is nothing to validate on or the run is asked to stop."""
            if validation is None or stopping:
                return None
            result = validation.run(model, standards, lambda: ranks.any(stop.asked)[0])
            if result is not None:
                records.validation(step, result_record(result), result_table(result))
            meter.restart()
            return result

        def better(result: Result | None) -> float | None:
            """Its loss, if it is the lowest so far."""
            return result.loss if result is not None and result.loss < progress["best"] else None

        for step in range(start, length.total):
            if stopping or step == settings.stop_at > 0:
                keeper.save(final=True)
                records.say(f"stopped at step {step}; the same command continues")
                break
            budget = draw(settings.budgets, settings.budget_weights, settings.seed, "budget", step)
            resolution = plan.resolution(step)
            forced = settings.forced_at(step, length.total)
            hints = settings.hints if step < settings.hints_until * length.total else 0.0
            lr = learning_rate(step, length.total, length.warmup, settings.lr, settings.min_lr)
            set_rate(optimisers, lr)

            losses: list[Loss] = []
            for micro in range(settings.accumulate):
                batch: Batch = meter.wait(batches)
                note_unreadable(batch, progress, settings, out, len(images))
                pixels = batch.images.to(device, non_blocking=True)
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bfloat16):
                    target = teach(batch, pixels, teacher, model, forced > 0 or hints > 0, settings.teacher_batch)
                    # The shift and scale of positions is drawn by the model: one draw a step, on every rank.
                    torch.manual_seed(stream(settings.seed, "positions", step).getrandbits(63))
                    last = micro == settings.accumulate - 1
                    with nullcontext() if last or ranks.count == 1 else student.no_sync():  # type: ignore[operator]
                        loss: Loss = student(pixels, budget, target, standards, hints, hint_standard, forced,
                                             settings.patch_share)  # fmt: skip
                        torch.autograd.backward(loss.total / settings.accumulate)
                losses.append(Loss(*(value.detach() for value in loss)))

            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            broken = not all(bool(loss.total.isfinite()) for loss in losses) or not bool(norm.isfinite())
            broken, stopping = ranks.any(broken, stop.asked)
            if broken:
                nonfinite += 1
                progress["skipped"] += 1
                records.warn(f"step {step}: the loss is not finite; skipped ({nonfinite} in a row)")
                if nonfinite >= settings.max_nonfinite:
                    raise InputError(save_batch(out, step, ranks.rank, batch, images, nonfinite))
            else:
                nonfinite = 0
                if settings.clip:
                    torch.nn.utils.clip_grads_with_norm_(model.parameters(), settings.clip, norm)
                for optimiser in optimisers:
                    optimiser.step()
                meter.add(losses)
            for optimiser in optimisers:
                optimiser.zero_grad(set_to_none=True)
            progress["step"] = step + 1

            done, best = step + 1 == length.total, None
            if meter.steps and ((step + 1) % settings.log_every == 0 or done):
                records.train(step + 1, {**meter.read(length.step_images), "epoch": (step + 1) / length.epoch, "lr": lr,
                                         "budget": budget, "resolution": resolution, "norm": float(norm),
                                         "skipped": progress["skipped"]})  # fmt: skip
            if (step + 1) % val_every == 0 and not done:
                best = better(judge(step + 1))
            if best is not None or keeper.minutes() >= settings.checkpoint_minutes:
                keeper.save(best=best)
        else:  # every step is done: judge the last weights and keep them, and only then call the run finished
            result = judge(length.total)
            keeper.save(final=True, best=better(result))
            if stopping or (validation is not None and result is None):
                records.say(f"stopped at step {length.total}, before its validation; the same command continues")
            else:
                if ranks.first:
                    keep_last(out, model, also_best=validation is None)
                keeper.save(final=True, finished=True)
        del batches  # workers end here, not when someone cleans up
        records.close()
        if ranks.first:
            show(out, progress)
    ranks.wait()
    ranks.close()
    return out


def plan_length(settings: Settings, images: int, ranks: int, saved: dict[str, Any] | None) -> Length:
    """Steps and batches; a continued run keeps its number of images per step on any number of ranks."""
    step_images = settings.batch * settings.accumulate * ranks
    if saved is not None and saved["step_images"] != step_images:
        before = saved["identity"]
        if settings.batch * settings.accumulate != before["batch"] * before["accumulate"]:
            raise InputError(
                f"{settings.out} was started with {saved['step_images']} images per step, this is {step_images} "
                f"({settings.batch} × {settings.accumulate} × {ranks} ranks): use another --out"
            )
        step_images = saved["step_images"]
    batch, rest = divmod(step_images, settings.accumulate * ranks)
    if rest or not batch:
        raise InputError(
            f"a step of {step_images} images cannot be divided among {ranks} ranks and --accumulate "
            f"{settings.accumulate}"
        )
    epoch = images / step_images
    total = settings.steps or math.ceil(settings.epochs * epoch)
    warmup = settings.warmup_steps or round(settings.warmup_epochs * epoch)
    return Length(batch, step_images, total, warmup, epoch)


def teach(
    batch: Batch, pixels: torch.Tensor, teacher: Teacher, model: Veca, layers: bool, micro_batch: int
) -> TeacherOutput:
    """The teacher's features of a batch: from the cache if they came with it, else computed."""
    if batch.teacher is not None:
        cls, patches, hidden = batch.teacher
        device = pixels.device
        return TeacherOutput(
            cls.to(device).float(), patches.to(device).float(),
            hidden.to(device).float() if layers and hidden is not None else None,
        )  # fmt: skip
    patch = model.config.patch_size
    grid = (pixels.shape[-2] // patch, pixels.shape[-1] // patch)
    out: TeacherOutput = teacher(pixels, grid, layers, micro_batch)
    return out


def sample_standards(
    settings: Settings, images: Images, teacher: Teacher, model: Veca, device: torch.device, bfloat16: bool
) -> dict[str, torch.Tensor] | None:
    """Statistics of the teacher's features over a sample of training views, where the loss needs them."""
    if not settings.standardise and not settings.wants_layers:
        return None
    size = settings.resolutions[0]
    count = min(settings.standardise_images, len(images))
    chosen = stream(settings.augment_seed, "standards").sample(range(len(images)), count)
    views = Views(images, settings.augment_seed, trivial=settings.trivial_augment)

    def outputs() -> Iterator[TeacherOutput]:
        for first in range(0, count, 16):
            batch = collate([views[Key(index, 0, size)] for index in chosen[first : first + 16]])
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bfloat16):
                pixels = batch.images.to(device)
                yield teach(batch, pixels, teacher, model, settings.wants_layers, settings.teacher_batch)

    return standards_to_dict(estimate_standards(outputs()))


def note_unreadable(batch: Batch, progress: dict[str, Any], settings: Settings, out: Path, count: int) -> None:
    """Count and list images that could not be read; too large a share of them ends the run."""
    progress["read"] += len(batch.numbers)
    if not batch.unreadable:
        return
    known = set(progress["unreadable"])
    new = [line for line in dict.fromkeys(batch.unreadable) if line not in known]
    progress["unreadable"] += new
    if new:
        with open(out / "unreadable.txt", "a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in new)
    read = max(min(progress["read"], count), min(count, 1000))  # a few bad ones at the very start say nothing
    if len(progress["unreadable"]) > settings.max_unreadable * read:
        raise InputError(
            f"{len(progress['unreadable'])} of {read} images are unreadable, more than "
            f"--max-unreadable {settings.max_unreadable}: see {out / 'unreadable.txt'}"
        )


def save_batch(out: Path, step: int, rank: int, batch: Batch, images: Images, count: int) -> str:
    """Keep the batch that broke the loss; returns what to tell the user."""
    path = out / f"nonfinite-step{step}-rank{rank}.pt"
    with whole_file(path) as temporary:
        torch.save({"images": batch.images, "names": [images.name(index) for index in batch.numbers]}, temporary)
    return f"the loss was not finite {count} times in a row; the last batch is in {path}: try a lower --lr or --clip 1"


def keep_last(out: Path, model: Veca, also_best: bool) -> None:
    """The last weights as a model folder; the best ones too, where nothing was validated."""
    for name in ("last", "best") if also_best else ("last",):
        try:
            model.save(out / name)
        except OSError as error:
            raise InputError(
                f"{out / name} cannot be written ({error.strerror}): make room and run the same command again"
            ) from error


def show(out: Path, progress: dict[str, Any]) -> None:
    """What a person wants to see at the end: images that were left out, and the curves."""
    if progress["unreadable"]:
        print(f"{len(progress['unreadable'])} images were unreadable: see {out / 'unreadable.txt'}")
    try:
        if (out / "metrics.jsonl").is_file():
            print(f"curves: {plot(out)}")
    except (OSError, InputError) as error:
        print(f"no picture of the curves ({error})")
