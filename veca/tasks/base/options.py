"""What the commands ask for every task; a task adds its own. The docstrings are the --help."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from veca.backbones import AUTO
from veca.caches import cache_folder
from veca.devices import Dtype
from veca.errors import InputError
from veca.files import refuse_file


def _numbers(texts: list[str]) -> tuple[int, ...]:
    return tuple(int(part) for part in texts[0].split(",") if part)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(part, int) for part in value)


Numbers = Annotated[
    tuple[int, ...],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="N,N,…",
        instance_from_str=_numbers,
        is_instance=_is_numbers,
        str_from_instance=lambda value: [",".join(map(str, value))],
    ),
]


def _shares(texts: list[str]) -> tuple[float | str, ...]:
    return tuple(part if part == AUTO else float(part) for part in texts[0].split(",") if part)


Shares = Annotated[
    tuple[float | str, ...],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="SHARE,SHARE,…",
        instance_from_str=_shares,
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [",".join(f"{part:g}" if part != AUTO else AUTO for part in value)],
    ),
]
Models = Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="MODEL")]
Paths = Annotated[tyro.conf.UseAppendAction[tuple[Path, ...]], tyro.conf.arg(metavar="PATH")]
Flag = tyro.conf.FlagCreatePairsOff[bool]


def default_cache() -> Path:
    return cache_folder("probes")


@dataclass
class ProbeOptions:
    """What every probe takes."""

    data: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """the data set"""
    model: Models = ()
    """a model to judge, again for each: what veca.load takes, a transformers hub id or folder, or random:veca_small"""
    size: Numbers = (256,)
    """sides of the centre crop, rounded to whole patches; the image is first resized to 1.125 times that"""
    cores: Numbers = ()
    """budgets, for models that have them; all cores without this"""
    share: float = 1.0
    """how many of a VECA's patches its cores read, evenly spread"""
    patches: Shares = (1.0,)
    """shares of a VECA's patches that are spent, large squares standing for several where there is little to see: a row
    each; to compare at equal tokens, give a smaller --size too"""
    stride: int | float | None = None
    """pixels between features of a VECA, a divisor of its patch size; None: the patch size"""
    seeds: int = 3
    """heads trained from different seeds; the table shows mean ± deviation"""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("probe")
    """folder for results.json, results.csv, the plots and the heads; a row that it holds is not trained again"""
    dtype: Dtype = "float32"
    """precision of the models; auto: bfloat16 where the CPU or GPU computes in it, else float32"""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1, mps"""
    cache: Annotated[Path, tyro.conf.arg(metavar="DIR")] = field(default_factory=default_cache)
    """folder of features that were computed before"""
    cache_gb: float = 20.0
    """what that folder may hold; the features used longest ago make room"""
    against: Annotated[str | None, tyro.conf.arg(metavar="paper[:NAME]")] = None
    """add the paper's own numbers for this data set; NAME says which, where neither --preset nor the folder does"""
    command: tyro.conf.Suppress[str] = ""  # what was typed, for results.json


@dataclass
class DenseProbe(ProbeOptions):
    size: Numbers = (512,)
    """sides of the square crop, rounded to whole patches; the image's short side is resized to it"""
    steps: int = 500
    """optimiser steps, 8 crops each"""
    augment: Flag = False
    """train on random crops and flips, through the backbone at every step (slow without a GPU); without this, on the
    cached features of the windows that cover each training image"""


# What may differ between the command that started a run and the one that continues it.
CHANGEABLE = {"data", "out", "device", "workers", "checkpoint_minutes", "score_every", "score_cores", "stop_at"}


@dataclass(kw_only=True)
class FineTuneOptions:
    """What every fine-tuning takes."""

    data: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """the data set, laid out as for `veca probe`"""
    model: str
    """what to start from: a bundled name, a model folder, a hub id, or random:veca_tiny"""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("finetuned")
    """folder of the run; the same command again continues what it finds there"""

    size: int = 224
    """side of the crop, rounded to whole patches; the image is first resized to 1.125 times that"""
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
class DenseFineTune(FineTuneOptions):
    size: int = 448
    """side of the square crop, rounded to whole patches; the image's short side is resized to it"""
    batch: int = 8
    """crops a step"""
