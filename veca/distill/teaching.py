"""The teacher as a run asks it: on the student's grid, in micro-batches, under autocast, or from the cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from veca.distill.data import Batch
from veca.teachers import Teacher, TeacherOutput


@dataclass(frozen=True)
class Teaching:
    teacher: Teacher
    patch_size: int  # the student's
    micro_batch: int = 64  # images per forward pass of the teacher
    bfloat16: bool = False

    def __call__(self, pixels: Tensor, layers: bool = False) -> TeacherOutput:
        """pixels: B×3×H×W → features on the student's grid, in float32."""
        grid = (pixels.shape[-2] // self.patch_size, pixels.shape[-1] // self.patch_size)
        with torch.autocast(pixels.device.type, dtype=torch.bfloat16, enabled=self.bfloat16):
            out: TeacherOutput = self.teacher(pixels, grid, layers, self.micro_batch)
        return out

    def of(self, batch: Batch, pixels: Tensor, layers: bool) -> TeacherOutput:
        """The features of a batch, whose pixels are on the device: from the cache if they came with it."""
        if batch.teacher is None:
            return self(pixels, layers)
        cls, patches, hidden = batch.teacher
        device = pixels.device
        return TeacherOutput(
            cls.to(device).float(), patches.to(device).float(),
            hidden.to(device).float() if layers and hidden is not None else None,
        )  # fmt: skip
