"""Labels from frame to frame by the likeness of frozen features, as DINO's authors measured it (arXiv 2104.14294).

Each patch of a new frame takes the mean label of its nearest neighbours by cosine. It looks for them in the first frame
and in the last few, not farther away than a radius. Nothing is trained.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

LAST = 7  # frames before this one, besides the first
NEIGHBOURS = 5  # over all these frames together
RADIUS = 12  # patches along each axis
TEMPERATURE = 0.1  # a neighbour counts with exp(cosine / this)


class Propagation:
    """One sequence, from the mask of its first frame.

    >>> follow = Propagation(features, mask, objects)
    >>> mask = follow(features)  # of the next frame, and so on
    """

    def __init__(self, features: Tensor, mask: np.ndarray[Any, Any], objects: list[int]) -> None:
        """features: h×w×D; mask: H×W, in which the objects have these numbers and all else is background."""
        self.grid, self.size = (features.shape[0], features.shape[1]), mask.shape
        self.values = np.array([0, *objects])
        each = torch.from_numpy(np.stack([~np.isin(mask, objects), *(mask == value for value in objects)])).float()
        labels = nn.functional.interpolate(each[None], self.grid, mode="nearest-exact")[0]  # K×h×w: patches' middles
        self.first = (nn.functional.normalize(features, dim=-1), labels.permute(1, 2, 0).to(features.device))
        self.last: deque[tuple[Tensor, Tensor]] = deque(maxlen=LAST)
        column = torch.arange(self.grid[1], device=features.device)
        self.far = (column[:, None] - column).abs() > RADIUS  # w×w

    def __call__(self, features: Tensor) -> np.ndarray[Any, Any]:
        """The mask (H×W) of the next frame, of which the features are h×w×D."""
        features = nn.functional.normalize(features, dim=-1)
        known, labels = (torch.stack(parts) for parts in zip(self.first, *self.last, strict=True))  # T×h×w×D, T×h×w×K
        found = torch.stack([self.row(features[row], row, known, labels) for row in range(self.grid[0])])  # h×w×K
        self.last.append((features, found))
        return self.decode(found)

    def row(self, patches: Tensor, row: int, known: Tensor, labels: Tensor) -> Tensor:
        """Labels (w×K) of one row of patches (w×D): its neighbours lie in the same rows of all T frames."""
        rows = slice(max(0, row - RADIUS), row + RADIUS + 1)
        near = patches @ known[:, rows].flatten(1, 2).transpose(1, 2)  # T×w×n
        near.unflatten(2, (-1, self.grid[1])).masked_fill_(self.far[:, None], -torch.inf)
        near = near.transpose(0, 1).flatten(1)  # w×(T·n)
        best = near.topk(min(NEIGHBOURS, near.shape[1]), dim=1)
        weights = (best.values / TEMPERATURE).softmax(1)  # exp(cosine / T), of these neighbours alone
        return (weights[:, :, None] * labels[:, rows].flatten(0, 2)[best.indices]).sum(1)

    def decode(self, labels: Tensor) -> np.ndarray[Any, Any]:
        """h×w×K → H×W: each label's map at the frame's size, stretched to 0…1, then the largest."""
        maps = nn.functional.interpolate(labels.permute(2, 0, 1)[None], self.size, mode="bilinear")[0]
        low, high = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)
        stretched = torch.where(high > 0, (maps - low) / (high - low).clamp_min(1e-12), maps)
        chosen: np.ndarray[Any, Any] = self.values[stretched.argmax(0).cpu().numpy()]
        return chosen
