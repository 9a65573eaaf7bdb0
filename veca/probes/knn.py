"""k nearest neighbours: the quick look, without training. Cosine similarity, k = 1 and 20."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from veca.tasks.base import metrics

NEIGHBOURS = (1, 20)
TEMPERATURE = 0.07  # a neighbour votes with exp(cosine / this)


def scores(train: Tensor, labels: Tensor, test: Tensor, truth: Tensor, classes: int) -> dict[str, float]:
    """train: V×D, labels: V, test: T×D, truth: T → top-1 for each k (k is at most V)."""
    train, test = nn.functional.normalize(train, dim=1), nn.functional.normalize(test, dim=1)
    near = [(part @ train.T).topk(min(max(NEIGHBOURS), len(train)), dim=1) for part in torch.split(test, 1024)]
    cosine, rows = torch.cat([part.values for part in near]), torch.cat([part.indices for part in near])
    found = {}
    for k in NEIGHBOURS:
        votes = torch.zeros(len(test), classes, device=test.device)
        votes.scatter_add_(1, labels.to(test.device)[rows[:, :k]], (cosine[:, :k] / TEMPERATURE).exp())
        found[f"top1_k{k}"] = float(metrics.accuracy(votes.cpu(), truth.cpu())["top1"])
    return found
