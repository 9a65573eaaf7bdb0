"""Depth: a linear layer on the same features as segmentation, scale-invariant log loss (docs/probes.md)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from veca.probes.dense import upsample
from veca.probes.pairs import Array, DepthReader
from veca.probes.presets import DepthPreset

BINS = 256
VARIANCE = 0.85  # how much of the mean log error is forgiven: 0 is plain log RMSE, 1 is blind to scale
FLOOR = 0.1  # added to each bin's weight, so that no patch is left without one


class Depth:
    """`bins`: weights over evenly spaced depths, whose mean is the answer. `regression`: the answer itself,
    as a share of the range."""

    main, better = "RMSE", "lower"
    rate = 1e-3

    def __init__(self, preset: DepthPreset, kind: str = "bins") -> None:
        self.preset = preset
        self.kind = kind
        self.outputs = BINS if kind == "bins" else 1
        self.zoom = preset.zoom
        self.trim = preset.trim
        self.read_depth = DepthReader(preset)

    def read(self, path: Path) -> Array:
        return self.read_depth.trimmed(path)

    def decode(self, maps: Tensor) -> Tensor:
        """K×h×w → metres, 1×h×w."""
        return metres(maps, self.kind, self.preset.nearest, self.preset.farthest)

    def loss(self, maps: Sequence[Tensor], labels: Sequence[Tensor]) -> Tensor:
        """maps: K×h×w each, labels: H×W each, metres → mean over the images that know any depth."""
        losses = []
        for part, label in zip(maps, labels, strict=True):
            known = label > 0
            if known.any():
                guess = upsample(self.decode(part), (label.shape[0], label.shape[1]))[0]
                losses.append(scale_invariant(guess[known], label[known]))
        return torch.stack(losses).mean() if losses else maps[0].sum() * 0

    def score(self, predictions: Iterator[tuple[Tensor, Tensor]]) -> dict[str, Any]:
        from veca.probes import metrics  # only scoring needs torchmetrics: transformers models use this file too

        return metrics.depth(predictions)

    def about(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "nearest": self.preset.nearest,
            "farthest": self.preset.farthest,
            "trim": self.trim,
            "zoom": self.zoom,
        }


def metres(maps: Tensor, kind: str, nearest: float, farthest: float) -> Tensor:
    """maps: K×h×w → metres in [nearest, farthest], 1×h×w."""
    if kind == "regression":
        return nearest + (farthest - nearest) * maps.sigmoid()
    centres = torch.linspace(nearest, farthest, maps.shape[0], device=maps.device)
    weights = maps.relu() + FLOOR
    return (weights * centres[:, None, None]).sum(0, keepdim=True) / weights.sum(0, keepdim=True)


def scale_invariant(guess: Tensor, truth: Tensor) -> Tensor:
    """Scale-invariant log loss of known pixels (Eigen et al.)."""
    error = guess.log() - truth.log()
    return ((error**2).mean() - VARIANCE * error.mean() ** 2).clamp(min=1e-8).sqrt()
