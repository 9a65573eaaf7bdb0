"""What `veca finetune` takes on the command line; the docstrings are its --help."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from veca.errors import InputError
from veca.files import refuse_file
from veca.probes.settings import Flag, Numbers

# What may differ between the command that started a run and the one that continues it.
CHANGEABLE = {"data", "out", "device", "workers", "checkpoint_minutes", "score_every", "score_cores", "stop_at"}


@dataclass(kw_only=True)
class Common:
    data: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """the data set, laid out as for `veca probe`"""
    model: str
    """what to start from: a bundled name, a model folder, a hub id, or random:veca_tiny"""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("finetuned")
    """folder of the run; the same command again continues what it finds there"""

    start_head: Annotated[Path | None, tyro.conf.arg(metavar="HEAD")] = None
    """begin with a head that `veca probe` trained on this model, instead of a fresh one: surer and quicker"""
    head_only: Flag = False
    """train the head alone: the backbone stays as it is"""
    cores: Numbers = ()
    """one budget: fixed; several: one drawn each step. Without this, 8, 16, … up to the bank, drawn as in training, so
    that the model keeps all its budgets"""
    epochs: float = 10
    """passes over the training images"""
    batch: int = 16
    """images a step"""
    lr: float = 1e-4
    """highest rate of the backbone's last layer; 10 % of the steps warm up to it, then a cosine to 0"""
    head_lr: float = 1e-3
    """highest rate of the head"""
    layer_decay: float = 0.75
    """each layer below the last one learns this much more slowly than the one above it"""
    weight_decay: float = 0.05
    """of matrices; biases, norms and cores have none"""
    clip: float = 1.0
    """largest norm of the gradient; 0: no clipping"""
    seed: int = 0
    """of the head, the order of the images, the crops and the budgets"""

    score_every: float = 0
    """epochs between scores while training, on val/ (where there is none on test/: for looking at, nothing is chosen by
    it); 0: every epoch where there is val/, otherwise only at the end"""
    score_cores: Numbers = ()
    """budgets to score at the end; the largest and the smallest of those trained without this"""
    device: str = "auto"
    """auto, cpu, cuda or mps"""
    workers: int = 4
    """threads that read images"""
    checkpoint_minutes: float = 5
    """minutes between checkpoints"""
    stop_at: int = 0
    """save and leave at this step, as if interrupted; 0: never"""

    def check(self) -> None:
        for name in ("epochs", "batch", "lr", "head_lr", "layer_decay", "workers", "size"):
            if getattr(self, name) <= 0:
                raise InputError(f"--{name.replace('_', '-')} must be more than 0, not {getattr(self, name)}")
        refuse_file(self.out)
        for name in ("seed", "weight_decay", "clip", "score_every", "stop_at", "checkpoint_minutes"):
            if getattr(self, name) < 0:
                raise InputError(f"--{name.replace('_', '-')} must not be negative, not {getattr(self, name)}")
        if self.layer_decay > 1:
            raise InputError(f"--layer-decay is a share from 0 to 1, not {self.layer_decay}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON and checkpoints hold them."""
        values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self), default=str))
        return values


@dataclass(kw_only=True)
class Classify(Common):
    """Fine-tune for classes: a linear head on the global feature, and the backbone below it.

    DIR holds train/<class>/ and test/<class>/, perhaps val/<class>/, or CSV files; as `veca probe classify` reads them.
    Where there is val/, the best epoch is kept; without it all of train/ is used and the last weights are kept. The
    test images are scored once, at the end. The run's folder then holds model/ (for veca.load) and head/ (for
    `veca probe predict` and transformers).

    Examples:
      veca finetune classify --data pets/ --model veca-s14 --size 196 --epochs 10 --out runs/pets
      veca finetune classify --data pets/ --model veca-s14 --cores 64 --head-only --out runs/pets-head
      veca finetune classify --data pets/ --model veca-s14 --start-head pets-probe/heads/veca-s14-196px-64cores
    """

    size: int = 224
    """side of the crop, rounded to whole patches; the image is first resized to 1.125 times that"""


@dataclass(kw_only=True)
class Dense(Common):
    size: int = 448
    """side of the square crop, rounded to whole patches; the image's short side is resized to it"""
    batch: int = 8
    """crops a step"""


@dataclass(kw_only=True)
class Segment(Dense):
    """Fine-tune for masks: a linear head on every patch (global feature appended), and the backbone below it.

    DIR holds train/images, train/masks and val/ (or test/) in the same way, or the layout of the preset, as
    `veca probe segment` reads them. All of train/ is used, the last weights are kept.

    Examples:
      veca finetune segment --data voc-seg/ --preset voc2012 --model veca-s14 --size 448 --out runs/voc
      veca finetune segment --data mine/ --ignore 0 --offset -1 --model veca-s14 --cores 16
    """

    preset: Literal["voc2012", "context60", "ade20k", "coco_stuff", "coco_object", "cityscapes"] | None = None
    """what a published data set's files and labels mean"""
    classes: int | None = None
    """number of classes; without it and without a preset, what classes.txt or the training masks show"""
    ignore: int | None = None
    """the stored label that does not count (255)"""
    offset: int | None = None
    """added to stored labels (0); those that fall below 0 do not count"""


@dataclass(kw_only=True)
class Depth(Dense):
    """Fine-tune for depth: a linear head on every patch (global feature appended), and the backbone below it.

    DIR holds train/images, train/depth and test/ (or val/) in the same way, or the layout of the preset, as
    `veca probe depth` reads them. All of train/ is used, the last weights are kept.

    Example:
      veca finetune depth --data nyu-depth/ --preset nyu --model veca-s14 --size 308 --out runs/nyu
    """

    preset: Literal["nyu", "kitti"] | None = None
    """scale, range, evaluation crop and files of a published data set"""
    head: Literal["bins", "regression"] = "bins"
    """weights over 256 depths, or the depth itself"""
    scale: float | None = None
    """stored value × scale = metres (0.001)"""
    nearest: float | None = None
    """depth below this many metres does not count (0.001)"""
    farthest: float | None = None
    """depth above this many metres does not count (10)"""
