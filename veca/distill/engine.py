"""`train`: one run of distillation from top to bottom (docs/training.md)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch

from veca.devices import fast_bfloat16
from veca.distill.cache import prepare_cache
from veca.distill.card import run_card
from veca.distill.curves import plot
from veca.distill.data import Key, Plan, Views, collate, loaded
from veca.distill.distiller import Distiller, Length
from veca.distill.settings import Distillation, differences
from veca.distill.sources import TrainingImages, index_images
from veca.distill.student import (
    build_student,
    estimate_standards,
    standards_from_dict,
    standards_to_dict,
)
from veca.distill.teaching import Teaching
from veca.distill.validation import Validation
from veca.errors import InputError
from veca.files import lock_folder, write_json
from veca.optim import build_optimisers, split_parameters, split_table
from veca.teachers import load_teacher
from veca.training.checkpoints import Checkpoints, load_optimisers, read_checkpoint
from veca.training.loop import Loop, Pace
from veca.training.ranks import Ranks, StopSignal
from veca.training.records import METRICS, Records
from veca.training.schedule import random_at
from veca.weights import weights_digest


def train(settings: Distillation) -> Path:
    """Train until done or stopped; returns the run's folder."""
    settings.validate()
    ranks = Ranks(settings.device)
    with ExitStack() as held:
        ranks.from_first(lambda: held.enter_context(lock_folder(settings.out)) if ranks.first else None)
        run(settings, ranks)
        ranks.wait()
    ranks.close()
    return settings.out


def read_newest(checkpoints: Checkpoints, ranks: Ranks) -> dict[str, Any] | None:
    newest = checkpoints.newest(ranks.say)
    return None if newest is None else read_checkpoint(newest)


def run(settings: Distillation, ranks: Ranks) -> None:
    device, out = ranks.device, settings.out
    bfloat16 = settings.autocast == "on" or (settings.autocast == "auto" and fast_bfloat16(device))
    torch.manual_seed(settings.seed)

    # What there is: images, teacher, student, and perhaps a checkpoint of this run.
    images: TrainingImages = ranks.first_goes_ahead(lambda: index_images(settings.train))
    val_images: TrainingImages | None = (
        ranks.first_goes_ahead(lambda: index_images(settings.val)) if settings.val else None
    )
    teacher = load_teacher(settings.teacher, device)
    checkpoints = Checkpoints(out / "checkpoints")
    saved = ranks.from_first(lambda: read_newest(checkpoints, ranks))  # only its disk need hold the run
    model, report = build_student(settings, teacher, lambda patch: some_views(settings.whole_patches(patch), images))
    if (fitting := settings.whole_patches(model.config.patch_size)) != settings:
        settings = fitting
        ranks.say(f"crop sizes in whole patches of {model.config.patch_size}: {settings.all_resolutions}")
    identity = {
        **settings.to_dict(), "images": images.digest(), "image sizes": images.sizes_digest(),
        "teacher weights": weights_digest(teacher),
    }  # fmt: skip
    model.card = run_card(settings, teacher, images, identity["teacher weights"], before=model.card)
    model.to(device).train()
    model.set_grad_checkpointing(settings.activation_checkpointing)
    shares = split_parameters(model, report.copied, settings.matrices)
    optimisers = build_optimisers(
        shares, settings.lr, settings.weight_decay, settings.copied_rate,
        torch.bfloat16 if bfloat16 and fast_bfloat16(device) else torch.float32, settings.relative_rates,
    )  # fmt: skip
    teaching = Teaching(teacher, model.config.patch_size, settings.teacher_batch, bfloat16)
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
        statistics = ranks.from_first(lambda: sample_standards(settings, images, teaching, device))
        if ranks.first:
            write_json(out / "settings.json", identity)
    else:
        if changed := differences(saved["identity"], identity):
            raise InputError(f"{out} was started with other settings ({'; '.join(changed)}): use another --out")
        model.load_state_dict(saved["model"])
        load_optimisers(optimisers, saved["optimisers"], out)
        progress, statistics = saved["progress"], saved["standards"]
        if progress.setdefault("judged_on", judged_on) != judged_on:
            ranks.say("validation has changed: the best model is chosen anew")
            progress |= {"judged_on": judged_on, "best": math.inf}
        ranks.say(f"continuing {out} at step {progress['step']} of {length.total}; {ranks.count} rank(s), "
                  f"{length.batch} images each")  # fmt: skip
        if saved["finished"]:
            ranks.say("this run is finished")
            return

    with StopSignal() as stop:
        cache = prepare_cache(settings, images, teaching, ranks, stop, identity)
        validation = None
        if val_images is not None:
            validation = Validation(
                val_images, teaching, ranks, sizes=settings.val_resolutions or settings.all_resolutions,
                budgets=settings.val_budgets, count=settings.val_images, batch=settings.val_batch,
                workers=settings.workers,
            )  # fmt: skip
        start: int = progress["step"]
        plan = Plan(settings, images.groups, total=length.total, start=start, batch=length.batch, rank=ranks.rank,
                    ranks=ranks.count)  # fmt: skip
        views = Views(images, settings.augment_seed, cache, settings.trivial_augment)
        batches = loaded(views, plan, settings.workers, pin=device.type == "cuda")
        records = Records(out, total=length.total, start=start, active=ranks.first)
        with closing(batches), closing(records):
            distiller = Distiller(
                settings, length, model, optimisers, progress,
                {"standards": statistics, "identity": identity, "step_images": length.step_images},
                images=images, teaching=teaching, ranks=ranks, stop=stop, plan=plan, batches=batches,
                validation=validation, measured=standards_from_dict(statistics, device) if statistics else None,
                records=records,
            )  # fmt: skip
            if saved is not None and distiller.average is not None:
                distiller.average.load_state_dict(saved["average"])
            pace = Pace(
                length.total, settings.log_every, settings.val_every or max(1, round(length.epoch)),
                settings.checkpoint_minutes, settings.stop_at, settings.clip, settings.max_nonfinite,
            )  # fmt: skip
            Loop(distiller, out, ranks, stop, records, checkpoints, pace).run()
        if ranks.first:
            show(out, progress)


def plan_length(settings: Distillation, images: int, ranks: int, saved: dict[str, Any] | None) -> Length:
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


def sample_standards(
    settings: Distillation, images: TrainingImages, teaching: Teaching, device: torch.device
) -> dict[str, torch.Tensor] | None:
    """Statistics of the teacher's features over a sample of training views, where the loss needs them."""
    if not settings.standardise and not settings.wants_layers:
        return None
    return standards_to_dict(
        estimate_standards(
            teaching(part.to(device), settings.wants_layers)
            for part in some_views(settings, images, settings.standardise_images)
        )
    )


def some_views(settings: Distillation, images: TrainingImages, count: int = 64) -> Iterator[torch.Tensor]:
    """A sample of training views of the first size, 16×3×S×S at a time."""
    chosen = random_at(settings.augment_seed, "standards").sample(range(len(images)), min(count, len(images)))
    views = Views(images, settings.augment_seed, trivial=settings.trivial_augment)
    for first in range(0, len(chosen), 16):
        yield collate([views[Key(number, 0, settings.resolutions[0])] for number in chosen[first : first + 16]]).images


def show(out: Path, progress: dict[str, Any]) -> None:
    """What a person wants to see at the end: images that were left out, and the curves."""
    if progress["unreadable"]:
        print(f"{len(progress['unreadable'])} images were unreadable: see {out / 'unreadable.txt'}")
    try:
        if (out / METRICS).is_file():
            print(f"curves: {plot(out)}")
    except (OSError, InputError) as error:
        print(f"no picture of the curves ({error})")
