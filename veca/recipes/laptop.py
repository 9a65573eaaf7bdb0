from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from veca.distill.settings import BUDGETS, Distillation


@dataclass(frozen=True, kw_only=True)
class Laptop(Distillation):
    r"""From nothing on a small machine: to see the whole path work, and to compare ideas.

    trains    veca_tiny (5.5 M parameters) from fresh weights, at 128² crops
    on        a few thousand photographs, any teacher that fits in memory
    for       10 epochs; with --cache-teacher the teacher runs only for --views of them
    hardware  two CPU cores, about an hour for 6,000 photographs (computed from 0.06 s of CPU time a view)
    expects   a validation cosine above the best constant prediction (2,400 views at 64²: dense 0.25 against 0.21), far
              below a converted model

    veca distill laptop --train 'photos-{000..005}.tar' --val photos-006.tar --teacher teacher/ --out runs/tiny \
        --cache-teacher cache/tiny
    """

    student: str = "veca_tiny"
    epochs: float = 10
    warmup_epochs: float = 0.5
    batch: int = 32
    matrices: Literal["normuon", "adamw"] = "adamw"  # NorMuon's orthogonalisation is a large share of a small step
    lr: float = 3e-3
    min_lr: float = 1e-4
    resolutions: tuple[int, ...] = (128,)
    budgets: tuple[int, ...] = BUDGETS
    standardise: bool = True
    clip: float = 1.0
    views: int = 2
    val_images: int = 256
    checkpoint_minutes: float = 5
