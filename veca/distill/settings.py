"""Every setting of a run, typed; a recipe (`veca/recipes/`) is a set of defaults for them."""

from __future__ import annotations

import dataclasses
import json
from bisect import bisect
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from veca.errors import InputError
from veca.training.schedule import random_at

BUDGETS = (8, 16, 24, 32, 40, 48, 56, 64)

# What may differ between the command that started a run and the one that continues it, because it does not change what
# is computed. Batch and accumulation are compared as the number of images in a step, the images by their index.
CHANGEABLE = {
    "train", "val", "teacher", "out", "batch", "accumulate", "workers", "device", "teacher_batch", "log_every",
    "checkpoint_minutes", "val_every", "val_images", "val_budgets", "val_resolutions", "val_batch", "max_unreadable",
    "max_nonfinite", "activation_checkpointing", "cache_teacher", "stop_at",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """One distillation run."""

    train: tuple[str, ...]
    """Images to train on: folders, .txt lists, .tar shards; photos-{000..005}.tar and *.tar are expanded."""
    val: tuple[str, ...] = ()
    """Images to validate on, given in the same way; none: no validation."""
    teacher: str
    """A transformers vision model: a hub id or a folder."""
    out: Path
    """Folder of the run. The same command again continues what it finds there."""

    student: str = "veca_small"
    """A size (veca_tiny, veca_small, …), or `teacher`: the teacher's own geometry. A model as --init keeps its own."""
    init: str = "patch-embedding"
    """`patch-embedding` (the teacher's, where shapes agree), `teacher` (all of it), `fresh`, or a model to continue."""
    attention: Literal["core", "dense"] = "core"
    """`dense` trains the control arm, in which every token reads every token."""
    rope_zero_fraction: float | None = None
    """Share of rotary channels that do not turn; 1 switches rotation off. Unset: the size's own, or the teacher's."""
    rotate: bool = False
    """Let a model without rotation turn, and its cores move: what turns fast is made to be what mattered least."""

    bank: int = 0
    """Cores of the student; those that --init lacks are added as grey patches where none sits. 0: as many as it has."""

    epochs: float = 0
    """Length in passes over the images; or give --steps."""
    steps: int = 0
    """Length in optimiser steps, where epochs are 0."""
    warmup_epochs: float = 0
    """Warm-up in epochs; or give --warmup-steps."""
    warmup_steps: int = 0
    """Warm-up in steps."""
    batch: int = 128
    """Images per rank and backward pass."""
    accumulate: int = 1
    """Backward passes per optimiser step."""
    seed: int = 0
    """Of the fresh weights, the order, the budgets and the resolutions."""
    augment_seed: int = 0
    """Of the augmentation: a cached teacher serves runs with any --seed and the same --augment-seed."""
    trivial_augment: bool = True
    """After crop and flip, one random change of colour or shape (TrivialAugmentWide)."""

    lr: float = 4e-4
    """Highest rate."""
    min_lr: float = 5e-5
    """Rate at the start of warm-up and at the end."""
    weight_decay: float = 0.015
    """Of both optimisers."""
    copied_rate: float = 1.0
    """Factor on the rate of parameters whose values came with --init."""
    relative_rates: bool = False
    """What came with --init moves in proportion to its own size: layer scale made a teacher's tensors vary 30-fold."""
    matrices: Literal["normuon", "adamw"] = "normuon"
    """Optimiser of the weight matrices; AdamW takes everything else."""
    clip: float = 0.0
    """Largest norm of the gradient; 0: no clipping."""

    budgets: tuple[int, ...] = BUDGETS
    """Numbers of cores, one drawn per step; more than half as many as a view has patches are left to larger views."""
    budget_weights: tuple[float, ...] = (1, 1, 2, 2, 3, 3, 4, 4)
    """How often each is drawn."""
    apart: bool = False
    """Every backward pass of a step, on every rank, has its own cores, and every one of --accumulate its own share and
    scale, spread evenly over what may be drawn: one draw for a whole step pulls steps to and fro."""
    resolutions: tuple[int, ...] = (256,)
    """Crop sizes, one drawn per step."""
    resolution_weights: tuple[float, ...] = (1,)
    """How often each is drawn."""
    late_from: float = 1.0
    """From this share of the steps on, the late resolutions are drawn instead."""
    late_resolutions: tuple[int, ...] = ()
    """Crop sizes of the last part."""
    late_resolution_weights: tuple[float, ...] = ()
    """How often each is drawn."""

    standardise: bool = False
    """See both sides of the loss through the teacher's mean and deviation per channel."""
    standardise_images: int = 256
    """Images from which these are estimated."""
    hints: float = 0.0
    """Weight of the loss on every layer's patches (needs the teacher's depth and width)."""
    hints_until: float = 1.0
    """Hints end at this share of the steps."""
    gram: float = 0.0
    """Weight of the loss on how alike the patches of an image are to each other."""
    forcing: float = 0.0
    """For this first share of the steps each block is fed the teacher's patches."""
    fading: float = 0.0
    """For this next share of the steps they are mixed with the student's own, ever more of these: a soft landing."""
    patch_share: float = 1.0
    """While forced, the share of a view's patches that leave each block, drawn each step: less is quicker."""

    read_share: float = 1.0
    """In every second step the cores read an even share of the patches, from this one to all; all patches look."""
    mixed: float = 1.0
    """In every third step the student spends a share of the patches, from this one to all, at mixed scale."""
    average: float = 0.0
    """Decay of an exponential average of the weights, which is what is validated and kept; 0: none."""

    cache_teacher: Path | None = None
    """Folder for the teacher's features: computed once, then read from disk (float16)."""
    views: int = 0
    """Fixed augmented views of each image; 0: a new view every epoch. Needed for --cache-teacher."""
    cache_resolutions: tuple[int, ...] = ()
    """Crop sizes to cache; the teacher runs for the others. None given: --resolutions."""

    workers: int = 2
    """Processes that read images; 0: none beside the trainer."""
    max_unreadable: float = 0.01
    """Largest share of unreadable images that is skipped and listed; more stop the run."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    autocast: Literal["auto", "on", "off"] = "auto"
    """bfloat16 autocast; auto: where the device computes in bfloat16 (many CPUs only imitate it, slowly)."""
    activation_checkpointing: bool = False
    """Less memory for more time: compute activations again in the backward pass."""
    teacher_batch: int = 64
    """Images per forward pass of the teacher."""
    max_nonfinite: int = 5
    """So many steps in a row without a finite loss stop the run."""

    val_every: int = 0
    """Steps between validations; 0: once an epoch."""
    val_images: int = 1024
    """Images to validate on, at most."""
    val_batch: int = 64
    """Images per pass in validation."""
    val_budgets: tuple[int, ...] = (8, 16, 32, 64)
    """Budgets of the validation grid."""
    val_resolutions: tuple[int, ...] = ()
    """Resolutions of the validation grid; none given: all that are trained on."""
    checkpoint_minutes: float = 10
    """Minutes between checkpoints."""
    log_every: int = 20
    """Steps between records."""
    stop_at: int = 0
    """Save and leave at this step, as if interrupted; the same command without it goes on. 0: never."""

    def validate(self) -> None:
        """Refuse what makes no sense. Not on creation: the command line's parser would frame the message in a box."""

        def check(condition: bool, message: str) -> None:
            if not condition:
                raise InputError(message)

        pairs = (("budgets", "budget_weights"), ("resolutions", "resolution_weights"),
                 ("late_resolutions", "late_resolution_weights"))  # fmt: skip
        for values, weights in pairs:
            ours, theirs = getattr(self, values), getattr(self, weights)
            counts = f"--{_flag(values)} has {len(ours)} entries, --{_flag(weights)} {len(theirs)}"
            check(len(ours) in (1, len(theirs)), f"{counts}: give one weight for each")  # one choice needs no weights
            check(not theirs or (min(theirs) >= 0 and sum(theirs) > 0), f"--{_flag(weights)}: not weights: {theirs}")
        check(bool(self.train), "--train: give images to train on")
        check(bool(self.budgets) and bool(self.resolutions), "at least one budget and one resolution are needed")
        length = "give the length either as --epochs or as --steps, and 0 for the other"
        check((self.epochs > 0) != (self.steps > 0), length)
        for name in ("batch", "accumulate", "standardise_images", "teacher_batch", "val_images", "val_batch",
                     "max_nonfinite", "log_every"):  # fmt: skip
            check(getattr(self, name) >= 1, f"--{_flag(name)} must be at least 1, not {getattr(self, name)}")
        for name in ("hints_until", "forcing", "fading", "late_from", "max_unreadable"):
            check(0 <= getattr(self, name) <= 1, f"--{_flag(name)} is a share from 0 to 1, not {getattr(self, name)}")
        for name in ("seed", "augment_seed", "lr", "min_lr", "weight_decay", "copied_rate", "clip", "hints", "gram",
                     "workers", "views", "bank", "warmup_steps", "warmup_epochs", "val_every",
                     "checkpoint_minutes"):  # fmt: skip
            check(getattr(self, name) >= 0, f"--{_flag(name)} must not be negative, not {getattr(self, name)}")
        free = f"--forcing {self.forcing} and --fading {self.fading} leave no step at which the student runs freely"
        check(self.forcing + self.fading < 1, free)
        for name in ("patch_share", "read_share", "mixed"):
            check(0 < getattr(self, name) <= 1, f"--{_flag(name)} is a share above 0, not {getattr(self, name)}")
        check(0 <= self.average < 1, f"--average is a decay from 0 to below 1, not {self.average}")
        check(bool(self.val_budgets) or not self.val, "--val-budgets: give at least one budget to validate with")
        check(self.cache_teacher is None or self.views > 0, "--cache-teacher needs --views: how many of each image")
        wasted = [size for size in self.cache_resolutions if size not in self.all_resolutions]
        check(not wasted, f"--cache-resolutions {' '.join(map(str, wasted))}: the run has no crops of that size")
        check(self.late_from == 1 or bool(self.late_resolutions), "--late-from needs --late-resolutions")
        needs = "--student teacher needs --init teacher, or a model to go on from"
        check(self.student != "teacher" or self.init not in ("patch-embedding", "fresh"), needs)

    @property
    def wants_layers(self) -> bool:
        """Whether the teacher's patches of every layer are needed."""
        return self.hints > 0 or self.forcing + self.fading > 0

    def forced_at(self, step: int, total: int) -> float:
        """How much of the patches that enter a block is the teacher's: 1, then fading, then 0."""
        past = step / total - self.forcing
        if past < 0:
            return 1.0
        return 1 - past / self.fading if past < self.fading else 0.0

    def draw_at(self, what: str, step: int, part: int = 0, parts: int = 1) -> float:
        """A number from 0 to 1 for one of the parts of a step: the same for all, or with `apart` one from each of as
        many equal stretches, in random order.
        """
        generator = random_at(self.seed, what, step)
        if not self.apart:
            return generator.random()
        order = generator.sample(range(parts), parts)
        return (order[part] + random_at(self.seed, what, step, part).random()) / parts

    def budget_at(self, step: int, patches: int, part: int = 0, parts: int = 1) -> int:
        """The cores of a part of a step whose views have so many patches."""
        fitting = [
            (budget, weight)
            for budget, weight in zip(self.budgets, self.budget_weights, strict=False)
            if 2 * budget <= patches and weight
        ]
        if not fitting:
            return min(self.budgets)
        below = list(accumulate(weight for _, weight in fitting))
        place = bisect(below, self.draw_at("budget", step, part, parts) * below[-1])
        return fitting[min(place, len(fitting) - 1)][0]

    def read_at(self, step: int, part: int = 0) -> float:
        """The share of the patches that the cores read: all, or in every second pass less."""
        drawn = self.draw_at("read", step, part, self.accumulate)
        return float(self.read_share ** max(0.0, 2 * drawn - 1))

    def mixed_at(self, step: int, part: int = 0) -> float:
        """The share of the patches that the student spends: all, or in every third pass less, at mixed scale."""
        drawn = self.draw_at("mixed", step, part, self.accumulate)
        return float(self.mixed ** max(0.0, 3 * drawn - 2))

    def whole_patches(self, patch: int) -> Distillation:
        """The same with every crop size rounded to whole patches: so a recipe's sizes fit any teacher."""
        names = ("resolutions", "late_resolutions", "val_resolutions", "cache_resolutions")
        sizes: dict[str, Any] = {
            name: tuple(max(1, round(size / patch)) * patch for size in getattr(self, name)) for name in names
        }
        return dataclasses.replace(self, **sizes)

    @property
    def all_resolutions(self) -> tuple[int, ...]:
        return tuple(sorted({*self.resolutions, *(self.late_resolutions if self.late_from < 1 else ())}))

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, as JSON and checkpoints hold them."""
        values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self), default=str))
        return values


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The settings that changed and may not, as `name: was → is`.

    What a run of an older version did not record had the default of `Distillation`, which changes nothing.
    """
    defaults = json.loads(json.dumps({f.name: f.default for f in dataclasses.fields(Distillation)}, default=str))
    if len(saved.get("teacher weights", "")) == 16:  # another kind of digest, which cannot be compared
        saved = {**saved, "teacher weights": now["teacher weights"]}
    was = {name: saved.get(name, defaults.get(name, value)) for name, value in now.items()} | saved
    names = sorted(was.keys() - CHANGEABLE)
    return [f"{_flag(name)}: {was[name]} → {now.get(name)}" for name in names if was[name] != now.get(name)]


def _flag(name: str) -> str:
    return name.replace("_", "-")
