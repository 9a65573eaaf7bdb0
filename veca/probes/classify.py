"""Classification: a linear layer on the global feature, trained by SGD at several rates at once (docs/probes.md).

The rate is chosen on a validation part of the training set (a fifth of each class, unless the data has its own `val`);
then the head is trained at that rate on all of it, and scored once on the test set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from veca.probes import metrics
from veca.probes.data import ClassData, Example, held_out
from veca.probes.progress import progress

RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
VALIDATION = 0.2


@dataclass(frozen=True)
class Training:
    epochs: int = 100
    batch: int = 128
    momentum: float = 0.9


def targets(examples: Sequence[Example], classes: int, several: bool) -> Tensor:
    """V class numbers, or V×K of 0 and 1 where an image may have several labels."""
    if not several:
        return torch.tensor([example.labels[0] for example in examples])
    rows = torch.zeros(len(examples), classes, dtype=torch.long)
    for row, example in zip(rows, examples, strict=True):
        row[list(example.labels)] = 1
    return rows


def fit(
    features: Tensor, labels: Tensor, classes: int, rates: Sequence[float], how: Training, seed: int
) -> list[tuple[Tensor, Tensor]]:
    """One head (K×D, K) per rate, all trained in the same pass. features: V×D; labels: V, or V×K for several."""
    draw = torch.Generator().manual_seed(seed)
    start = torch.randn(classes, features.shape[1], generator=draw) * 0.01
    weights = [start.clone().to(features.device).requires_grad_() for _ in rates]
    biases = [torch.zeros(classes, device=features.device, requires_grad=True) for _ in rates]
    groups = [{"params": pair, "lr": rate} for pair, rate in zip(zip(weights, biases, strict=True), rates, strict=True)]
    optimiser = torch.optim.SGD(groups, lr=rates[0], momentum=how.momentum)
    steps = how.epochs * math.ceil(len(features) / how.batch)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in progress(range(how.epochs), f"training, seed {seed}", how.epochs):
        for rows in torch.split(torch.randperm(len(features), generator=draw).to(features.device), how.batch):
            logits = nn.functional.linear(features[rows], torch.cat(weights), torch.cat(biases))
            # The heads share nothing, so the sum of their losses trains each as if it were alone.
            loss = torch.stack([loss_of(part, labels[rows]) for part in logits.chunk(len(rates), dim=1)]).sum()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            cosine.step()
    return [(weight.detach(), bias.detach()) for weight, bias in zip(weights, biases, strict=True)]


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    if labels.ndim == 1:
        return nn.functional.cross_entropy(logits, labels)
    return nn.functional.binary_cross_entropy_with_logits(logits, labels.float())


def score(logits: Tensor, labels: Tensor) -> dict[str, Any]:
    """Top-1, top-5 and per class; mean average precision where labels are V×K."""
    return metrics.accuracy(logits, labels) if labels.ndim == 1 else metrics.average_precision(logits, labels)


def main_metric(several: bool) -> str:
    return "mAP" if several else "top1"


def train(
    data: ClassData, train: Tensor, validation: Tensor | None, how: Training, seed: int
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Weight and bias trained at the best rate, with that rate and its validation score. train: V×D."""
    labels = targets(data.train, len(data.classes), data.several).to(train.device)
    if validation is None:
        kept, out = held_out(data.train, VALIDATION, seed)
        part, part_labels, valid, valid_labels = train[kept], labels[kept], train[out], labels[out]
    else:
        part, part_labels, valid = train, labels, validation
        valid_labels = targets(data.validation, len(data.classes), data.several).to(train.device)
    heads = fit(part, part_labels, len(data.classes), RATES, how, seed)
    name = main_metric(data.several)
    scores = [score(nn.functional.linear(valid, *head).cpu(), valid_labels.cpu())[name] for head in heads]
    best = max(range(len(RATES)), key=lambda index: scores[index] if math.isfinite(scores[index]) else -1.0)
    head = heads[best]
    if validation is None:  # nothing is wasted: the held-out images train the head that is reported
        head = fit(train, labels, len(data.classes), RATES[best : best + 1], how, seed)[0]
    return *head, {"rate": RATES[best], "validation": scores[best]}
