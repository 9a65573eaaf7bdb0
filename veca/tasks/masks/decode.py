"""From what the queries say to segments: one head, three answers (instance, semantic, panoptic).

`classes` are Q×(K+1) logits, the last one "nothing"; `masks` are Q×h×w logits, enlarged here to `size` (height, width).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from veca.tasks.base.dense import upsample

THRESHOLD = 0.5  # least score of a segment
COVERED = 0.5  # least share of its own mask that a segment must win from the others


@dataclass
class Segment:
    label: int  # class, from 0
    score: float
    mask: Tensor  # H×W bool
    fused: bool = False  # stuff that several queries found


@torch.inference_mode()
def instances(classes: Tensor, masks: Tensor, size: tuple[int, int], most: int = 100) -> list[Segment]:
    """The surest pairs of query and class, masks may overlap; the score is the class's times the mask's own."""
    chances = classes.softmax(-1)[:, :-1]
    best, places = chances.flatten().topk(min(most, chances.numel()))
    found, seen = [], {}
    for score, place in zip(best.tolist(), places.tolist(), strict=True):
        query, label = divmod(place, chances.shape[1])
        if query not in seen:
            mask = upsample(masks[query][None], size)[0]
            plane = mask > 0
            sure = float(mask.sigmoid()[plane].mean()) if plane.any() else 0.0
            seen[query] = plane, sure
        plane, sure = seen[query]
        if sure:
            found.append(Segment(label, score * sure, plane))
    return sorted(found, key=lambda segment: -segment.score)


@torch.inference_mode()
def semantic(classes: Tensor, masks: Tensor, size: tuple[int, int]) -> Tensor:  # H×W
    """The class of each pixel; K where no class is more likely than not."""
    each = torch.einsum("qk,qhw->khw", classes.softmax(-1)[:, :-1], masks.sigmoid())
    most = upsample(each, size).max(0)
    return torch.where(most.values >= 0.5, most.indices, len(each))


@torch.inference_mode()
def panoptic(
    classes: Tensor,
    masks: Tensor,
    size: tuple[int, int],
    stuff: Collection[int] = (),
    threshold: float = THRESHOLD,
    mask_threshold: float = 0.5,
    covered: float = COVERED,
) -> list[Segment]:
    """Every pixel in one segment at most: the query whose score times mask is largest there has it."""
    score, label = classes.softmax(-1).max(-1)
    kept = ((label < classes.shape[1] - 1) & (score >= threshold)).nonzero()[:, 0]
    if not len(kept):
        return []
    chance = upsample(masks[kept], size).sigmoid()
    owner = (chance * score[kept, None, None]).argmax(0)
    found: list[Segment] = []
    for index, query in enumerate(kept.tolist()):
        whole = chance[index] >= mask_threshold
        mask = whole & (owner == index)
        if not mask.any() or float(mask.sum()) < covered * float(whole.sum()):
            continue
        one = Segment(int(label[query]), float(score[query]), mask)
        same = [other for other in found if other.label == one.label and one.label in stuff]
        if same:
            same[0].mask, same[0].fused = same[0].mask | mask, True
        else:
            found.append(one)
    return found
