from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from veca.distill.settings import Distillation


@dataclass(frozen=True, kw_only=True)
class Convert(Distillation):
    r"""From a teacher's own weights: a useful VECA in hours on a CPU instead of weeks on GPUs (docs/training.md).

    trains    a student with the teacher's geometry and weights, and 64 new cores; first each block alone on the
              teacher's patches (forcing), then on ever more of its own (fading), then freely; with a loss on every
              layer (hints)
    on        a few thousand photographs and a DINOv2 or DINOv3 teacher
    for       100,000 views of 196², the last quarter of the steps at 196² to 448²
    hardware  two CPU cores: six hours for a ViT-S/14 with --cache-teacher DIR --cache-resolutions 196 --views 3
              (36 GB of disk)
    expects   a standardised dense cosine of 0.84 at 64 cores and 0.76 at 8 already after 1,400 steps, 78 minutes;
              go on from there at a tenth of the rate (docs/research/pilots.md)

    veca distill convert --train 'photos-{000..005}.tar' --val photos-006.tar --teacher teacher/ --out runs/convert
    """

    student: str = "teacher"
    init: str = "teacher"
    steps: int = 6_250
    warmup_steps: int = 100
    batch: int = 16
    lr: float = 2e-4
    min_lr: float = 5e-6
    weight_decay: float = 0.01
    relative_rates: bool = True
    matrices: Literal["normuon", "adamw"] = "adamw"
    clip: float = 1.0
    budget_weights: tuple[float, ...] = (5, 3, 2, 2, 2, 2, 2, 4)
    resolutions: tuple[int, ...] = (196,)
    late_from: float = 0.75
    late_resolutions: tuple[int, ...] = (196, 252, 336, 448)
    late_resolution_weights: tuple[float, ...] = (0.6, 0.15, 0.15, 0.1)
    trivial_augment: bool = False
    patch_share: float = 0.25
    standardise: bool = True
    hints: float = 1.0
    forcing: float = 0.2
    fading: float = 0.1
    val_every: int = 500
    val_images: int = 128
    val_budgets: tuple[int, ...] = (8, 16, 32, 64)
    val_resolutions: tuple[int, ...] = (196, 448)  # one size alone would choose a model that has unlearned the others
    checkpoint_minutes: float = 5
