from __future__ import annotations

from dataclasses import dataclass

from veca.distill.settings import Distillation


@dataclass(frozen=True, kw_only=True)
class Stage1(Distillation):
    r"""Stage 1 of the paper: a student from nothing, at 256² crops.

    trains    veca_small, veca_small_plus, veca_base or veca_large, from fresh weights and the teacher's patch embedding
    on        ImageNet-1k or a larger unlabelled set, a DINOv3 of the same size as teacher
    for       135 epochs, 25 of them warm-up, batch 128 per rank, bfloat16
    hardware  eight GPUs of 80 GB, or several nodes (docs/cluster.md); not for one CPU: see `laptop`, `convert`
    expects   after stage 2, Base, 64 cores: ImageNet top-1 81.9, ADE20K mIoU 50.7, NYUv2 RMSE 0.37 (paper, table 1)

    torchrun --nproc-per-node 8 -m veca.cli distill stage1 --train 'imagenet/train-{000000..001023}.tar' \
        --val imagenet/val.tar --teacher facebook/dinov3-vitb16-pretrain-lvd1689m --student veca_base --out runs/base1
    """

    epochs: float = 135
    warmup_epochs: float = 25
    batch: int = 128
    lr: float = 4e-4
    min_lr: float = 5e-5
    weight_decay: float = 0.015
    resolutions: tuple[int, ...] = (256,)
    workers: int = 8
