"""Which query answers for which thing, and how wrong it is: Hungarian matching, cross-entropy and Dice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from veca.tasks.base.dense import upsample
from veca.tasks.masks.head import Found
from veca.tasks.masks.labels import segments_of

CLASS, PIXEL, DICE = 2.0, 5.0, 5.0  # weights of the three parts, in the matching and in the loss
NOTHING = 0.1  # weight of the many queries that must say "nothing"
FINER = 2  # masks are compared on a lattice this many times finer than the patches


class Target(NamedTuple):
    """What is there, on the lattice where masks are compared."""

    classes: Tensor  # n
    masks: Tensor  # n×P, the share of each cell that a thing covers
    counted: Tensor  # P, the share of each cell that counts


def target_of(label: Tensor, lattice: tuple[int, int]) -> Target:
    """label: H×W as `labels.py` describes it."""
    numbers, classes = segments_of(label)
    return target_from(label == numbers[:, None, None], classes, lattice, label == -1)


def target_from(masks: Tensor, classes: Tensor, lattice: tuple[int, int], void: Tensor | None = None) -> Target:
    """masks: n×H×W, void: H×W, what does not count."""
    uncounted = torch.zeros_like(masks[:1].sum(0)) if void is None else void
    planes = torch.cat((uncounted[None].float(), masks.float()))
    shares = nn.functional.interpolate(planes[None], size=lattice, mode="area")[0].flatten(1)
    return Target(classes, shares[1:], 1 - shares[0])


def pixel_parts(logits: Tensor, masks: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy and Dice loss of every query (Q×P logits) with every thing (n×P): Q×n each."""
    some = counted.sum().clamp(min=1)
    inside, outside = nn.functional.softplus(-logits) * counted, nn.functional.softplus(logits) * counted
    pixel = (inside @ masks.T + outside @ (1 - masks).T) / some
    chance, there = logits.sigmoid() * counted, masks * counted
    dice = 1 - (2 * chance @ masks.T + 1) / (chance.sum(1)[:, None] + there.sum(1) + 1)
    return pixel, dice


def match(cost: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of the cheapest assignment."""
    from scipy.optimize import linear_sum_assignment  # only training needs scipy

    rows, columns = linear_sum_assignment(cost.detach().cpu().numpy())
    return torch.as_tensor(rows, device=cost.device), torch.as_tensor(columns, device=cost.device)


def loss_of(outputs: Sequence[Found], labels: Sequence[Tensor]) -> Tensor:
    """labels: H×W each."""
    device = outputs[0].masks.device
    return loss_to(outputs, [target_of(label.to(device), lattice_of(outputs)) for label in labels])


def lattice_of(outputs: Sequence[Found]) -> tuple[int, int]:
    height, width = outputs[0].masks.shape[-2:]
    return FINER * height, FINER * width


def loss_to(outputs: Sequence[Found], targets: Sequence[Target]) -> Tensor:
    """The mean over blocks: each is matched and judged for itself, so that the first ones learn too."""
    return torch.stack([one_loss(found, targets, lattice_of(outputs)) for found in outputs]).mean()


def one_loss(found: Found, targets: Sequence[Target], lattice: tuple[int, int]) -> Tensor:
    count = max(1, sum(len(target.classes) for target in targets))
    nothing = found.classes.shape[-1] - 1
    right = torch.full(found.classes.shape[:2], nothing, device=found.classes.device)
    total = found.masks.sum() * 0
    for index, target in enumerate(targets):
        if not len(target.classes):
            continue
        logits = upsample(found.masks[index], lattice).flatten(1)
        pixel, dice = pixel_parts(logits, target.masks, target.counted)
        guess = found.classes[index].softmax(-1)[:, target.classes]
        rows, columns = match(PIXEL * pixel + DICE * dice - CLASS * guess)
        right[index, rows] = target.classes[columns]
        total = total + (PIXEL * pixel[rows, columns] + DICE * dice[rows, columns]).sum() / count
    weight = torch.ones(nothing + 1, device=right.device)
    weight[nothing] = NOTHING
    named: Tensor = nn.functional.cross_entropy(found.classes.flatten(0, 1), right.flatten(), weight)
    return total + CLASS * named
