from __future__ import annotations

from dataclasses import dataclass

from veca.distill.settings import Distillation


@dataclass(frozen=True, kw_only=True)
class Stage2(Distillation):
    r"""Stage 2 of the paper: from stage 1 to any resolution.

    trains    the model of stage 1 (its geometry comes with it), at 256² to 768², one resolution per step
    on        the same images and teacher as stage 1
    for       50,000 steps, 7,000 of them warm-up; 256/384/512 for the first 7,000, then 768 too
    hardware  as stage 1, about as long; --activation-checkpointing and --accumulate where memory is short
    expects   the paper's table 1 (see stage1), stable features from 256² to 768²; the best checkpoint is the one with
              the lowest mean loss over resolutions × budgets

    torchrun --nproc-per-node 8 -m veca.cli distill stage2 --train 'imagenet/train-{000000..001023}.tar' \
        --val imagenet/val.tar --teacher facebook/dinov3-vitb16-pretrain-lvd1689m --init runs/base1 --out runs/base2
    """

    init: str
    steps: int = 50_000
    warmup_steps: int = 7_000
    batch: int = 128
    lr: float = 8e-5
    min_lr: float = 3e-5
    weight_decay: float = 0.01
    resolutions: tuple[int, ...] = (256, 384, 512)
    resolution_weights: tuple[float, ...] = (0.35, 0.35, 0.30)
    late_from: float = 0.14  # step 7,000 of 50,000
    late_resolutions: tuple[int, ...] = (256, 384, 512, 768)
    late_resolution_weights: tuple[float, ...] = (0.15, 0.25, 0.30, 0.30)
    val_every: int = 2_500
    val_budgets: tuple[int, ...] = (8, 16, 24, 32, 40, 48, 56, 64)
    workers: int = 8
