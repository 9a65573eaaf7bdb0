"""Scores, from torchmetrics; what an ignored pixel or an absent class means is settled here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MeanAbsolutePercentageError, MeanMetric, MeanSquaredError
from torchmetrics.classification import BinaryAveragePrecision, MulticlassAccuracy, MulticlassConfusionMatrix

from veca.tasks.base.pairs import IGNORE


def accuracy(logits: Tensor, labels: Tensor) -> dict[str, Any]:
    """logits: V×K, labels: V → top-1, top-5 and the accuracy of each class (None where it has no image)."""
    classes = logits.shape[1]
    top = {
        f"top{k}": float(MulticlassAccuracy(classes, top_k=k, average="micro")(logits, labels))
        for k in (1, 5)
        if k <= classes
    }
    each = MulticlassAccuracy(classes, average=None)(logits, labels)
    there = torch.bincount(labels, minlength=classes) > 0
    return {**top, "per_class": [float(value) if seen else None for value, seen in zip(each, there, strict=True)]}


def accuracy_of_any(logits: Tensor, labels: Sequence[Sequence[int]]) -> dict[str, float]:
    """Top-1 where an image may have several right answers (ReaL); images without any are left out."""
    hits, top = MeanMetric(), logits.argmax(dim=1)
    for best, right in zip(top.tolist(), labels, strict=True):
        if right:
            hits.update(float(best in right))
    return {"top1": float(hits.compute())}


def average_precision(logits: Tensor, labels: Tensor) -> dict[str, Any]:
    """logits: V×K, labels: V×K of 0 and 1 → mean average precision over the classes that have an image."""
    each = [
        float(BinaryAveragePrecision()(guess, truth)) if truth.any() else None
        for guess, truth in zip(logits.T, labels.T, strict=True)
    ]
    known = [value for value in each if value is not None]
    return {"mAP": sum(known) / len(known) if known else 0.0, "per_class": each}


def segmentation(predictions: Iterable[tuple[Tensor, Tensor]], classes: int) -> dict[str, Any]:
    """(logits K×H×W, labels H×W) of each image → mIoU, pixel accuracy and per-class IoU over all pixels together.

    A class that is neither in a label nor predicted has no IoU (None) and is left out of the mean.
    """
    counts = MulticlassConfusionMatrix(classes, ignore_index=IGNORE)
    for logits, label in predictions:
        counts.update(logits.argmax(dim=0)[None], label[None].long().to(logits.device))
    matrix = counts.compute().double()  # row: label, column: prediction
    hit, union = matrix.diag(), matrix.sum(0) + matrix.sum(1) - matrix.diag()
    there = union > 0
    iou = hit / union.clamp(min=1)
    return {
        "mIoU": float(iou[there].mean()) if there.any() else 0.0,
        "pixel_accuracy": float(hit.sum() / matrix.sum().clamp(min=1)),
        "per_class": [float(value) if seen else None for value, seen in zip(iou, there, strict=True)],
    }


def depth(predictions: Iterable[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """(metres 1×H×W, metres H×W with 0 where unknown) → RMSE, AbsRel and δ1 over all known pixels together."""
    squared, relative, close = MeanSquaredError(squared=False), MeanAbsolutePercentageError(), MeanMetric()
    for metres, label in predictions:
        known = label > 0
        if not known.any():
            continue
        guess, truth = metres[0][known.to(metres.device)].cpu(), label[known]
        squared.update(guess, truth)
        relative.update(guess, truth)
        close.update((torch.maximum(guess / truth, truth / guess) < 1.25).float())
    return {"RMSE": float(squared.compute()), "AbsRel": float(relative.compute()), "delta1": float(close.compute())}
