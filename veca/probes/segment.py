"""Segmentation: a linear layer on each patch feature with the global feature appended (docs/probes.md)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from veca.probes import metrics
from veca.probes.dense import upsample
from veca.probes.pairs import IGNORE, Array, MaskReader
from veca.probes.presets import SegmentPreset


class Segmentation:
    """Cross-entropy at the label's resolution, ignored pixels left out."""

    main, better = "mIoU", "higher"
    rate = 3e-3  # chosen on held-out training images of VOC

    def __init__(self, preset: SegmentPreset) -> None:
        self.preset = preset
        self.outputs = preset.classes
        self.zoom = preset.zoom
        self.trim: tuple[int, int] | None = None
        self.read_mask = MaskReader(preset)

    def read(self, path: Path) -> Array:
        return self.read_mask(path)

    def loss(self, maps: Sequence[Tensor], labels: Sequence[Tensor]) -> Tensor:
        """maps: K×h×w each, labels: H×W each → mean over all counted pixels of the batch."""
        total, count = maps[0].new_zeros(()), 0
        for part, label in zip(maps, labels, strict=True):
            logits = upsample(part, (label.shape[0], label.shape[1]))[None]
            target = label.long()[None]
            total = total + nn.functional.cross_entropy(logits, target, ignore_index=IGNORE, reduction="sum")
            count += int((target != IGNORE).sum())
        return total / max(count, 1)

    def decode(self, maps: Tensor) -> Tensor:
        return maps

    def score(self, predictions: Iterator[tuple[Tensor, Tensor]]) -> dict[str, Any]:
        return metrics.segmentation(predictions, self.outputs)

    def about(self) -> dict[str, Any]:
        """What head.json keeps for `predict`."""
        return {"classes": list(self.class_names()), "zoom": self.zoom}

    def class_names(self) -> tuple[str, ...]:
        return self.preset.names or tuple(str(number) for number in range(self.outputs))


def palette(classes: int) -> Tensor:  # K×3 uint8
    """Colours as PASCAL VOC assigns them: the bits of the class number spread over red, green and blue."""
    number = torch.arange(classes)
    colours = torch.zeros(classes, 3, dtype=torch.long)
    for bit in range(8):
        for channel in range(3):
            colours[:, channel] |= ((number >> (3 * bit + channel)) & 1) << (7 - bit)
    return colours.to(torch.uint8)
