"""What the student is asked to match, in float32 whatever the precision of the networks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

EPS = 1e-6


class Loss(NamedTuple):
    total: Tensor
    global_cosine: Tensor  # mean cosine of the global features; the loss holds 1 − it
    dense_cosine: Tensor  # mean cosine of the patch features
    mse: Tensor  # of the patch features
    hints: Tensor  # the weighted loss on the layers, 0 without hints


class Standard(NamedTuple):
    """Mean and deviation per channel (…×D) of a teacher's features; both sides of a loss are seen through them."""

    mean: Tensor
    deviation: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        return (features - self.mean) * self.deviation.reciprocal()


class Standards(NamedTuple):
    """How each kind of the teacher's features is distributed."""

    cls: Standard
    patches: Standard
    layers: Standard | None  # L×D each


def dense_loss(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:  # B×N×D each
    """The mean cosine and the mean squared error of patch features."""
    student, teacher = student.float(), teacher.float()
    cosine = functional.cosine_similarity(student, teacher, dim=-1, eps=EPS).mean()
    return cosine, functional.mse_loss(student, teacher)


def distillation_loss(
    student_cls: Tensor,  # B×D
    student_patches: Tensor,  # B×N×D
    teacher_cls: Tensor,
    teacher_patches: Tensor,
    standards: Standards | None = None,
) -> Loss:
    """(1 − cos) of the global feature + mean (1 − cos) of the patches + their MSE, all with weight 1.

    With `standards` every feature is first standardised with the teacher's statistics: the weights of the terms then
    no longer depend on the teacher's scale, and the student still answers in the teacher's own space.
    """
    student_cls, teacher_cls = student_cls.float(), teacher_cls.float()
    student_patches, teacher_patches = student_patches.float(), teacher_patches.float()
    if standards is not None:
        student_cls, teacher_cls = standards.cls(student_cls), standards.cls(teacher_cls)
        student_patches, teacher_patches = standards.patches(student_patches), standards.patches(teacher_patches)
    global_cosine = functional.cosine_similarity(student_cls, teacher_cls, dim=-1, eps=EPS).mean()
    dense_cosine, mse = dense_loss(student_patches, teacher_patches)
    total = (1 - global_cosine) + (1 - dense_cosine) + mse
    return Loss(total, global_cosine, dense_cosine, mse, torch.zeros_like(total))


def hint_loss(student: Sequence[Tensor], teacher: Iterable[Tensor], standard: Standard) -> Tensor:
    """The dense loss on the patches that leave each block (L of B×N×D each), averaged over the blocks.

    Always standardised, per layer and channel: the scale of a residual stream grows with depth.
    """
    losses = []
    for layer, (ours, theirs) in enumerate(zip(student, teacher, strict=True)):
        here = Standard(standard.mean[layer], standard.deviation[layer])
        a, b = here(ours.float()), here(theirs.float())
        # Cosine and squared error from the same three sums: half the time of `dense_loss`, and there are many layers.
        ab, aa, bb = (a * b).sum(-1), (a * a).sum(-1), (b * b).sum(-1)
        cosine = ab * (aa * bb).clamp_min(EPS**2).rsqrt()
        losses.append((1 - cosine).mean() + (aa + bb - 2 * ab).mean() / a.shape[-1])
    return torch.stack(losses).mean()


def gram_loss(student: Tensor, teacher: Tensor) -> Tensor:  # B×N×D each
    """The mean squared difference between the cosines of all pairs of patches of an image."""
    ours, theirs = (functional.normalize(patches.float(), dim=-1, eps=EPS) for patches in (student, teacher))
    return functional.mse_loss(ours @ ours.transpose(1, 2), theirs @ theirs.transpose(1, 2))


class Moments:
    """Mean and deviation per channel of features that come in batches (…×D, all but `keep` leading axes averaged)."""

    def __init__(self, keep: int = 0) -> None:
        self.keep, self.count = keep, 0
        self.total: Tensor = torch.zeros(())
        self.squares: Tensor = torch.zeros(())

    def add(self, features: Tensor) -> None:
        rows = features.cpu().double().flatten(self.keep, -2)
        self.count += rows.shape[-2]
        self.total = self.total + rows.sum(-2)
        self.squares = self.squares + rows.square().sum(-2)

    def standard(self) -> Standard:
        mean = self.total / self.count
        deviation = (self.squares / self.count - mean.square()).clamp_min(0).sqrt()
        floor = deviation.mean(-1, keepdim=True) * 1e-3 + 1e-12  # a channel that never moves must not become infinite
        return Standard(mean.float(), torch.maximum(deviation, floor).float())
