"""The recipe of one arm of the referee's experiment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from veca.distill.settings import Distillation


@dataclass(frozen=True, kw_only=True)
class Referee(Distillation):
    r"""One arm of the referee's experiment: is patch-to-patch attention missed (docs/research/referee.md)?

    trains    veca_tiny (--attention core) or its twin in which every token reads every token (--attention dense), from
              fresh weights, at 128² crops; the same --seed gives both the same weights, images, order and budgets
    on        6,144 photographs, two augmented views each, any teacher, whose features are computed once for all arms
    for       20,480 views: 640 steps of 32
    hardware  two CPU cores: a quarter of an hour an arm (half an hour on slow ones), ten minutes for the teacher
    expects   docs/research/referee.md; `python tools/referee.py` runs all arms and what follows
    """

    student: str = "veca_tiny"
    init: str = "fresh"
    steps: int = 640
    warmup_steps: int = 40
    batch: int = 32
    matrices: Literal["normuon", "adamw"] = "adamw"
    lr: float = 3e-3  # that of `laptop`: both arms learned faster with it than with 1e-3 in a short trial
    min_lr: float = 1e-5
    clip: float = 1.0
    resolutions: tuple[int, ...] = (128,)
    standardise: bool = True
    views: int = 2
    val_every: int = 64
    val_images: int = 256
    val_budgets: tuple[int, ...] = (8, 64)
    checkpoint_minutes: float = 3
