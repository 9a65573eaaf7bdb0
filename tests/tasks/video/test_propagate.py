"""Labels that follow features: against a loop over patches, and where the answer is planted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from veca.tasks.video import propagate
from veca.tasks.video.propagate import Propagation


def by_loop(features: list[Tensor], first: Tensor) -> Tensor:
    """Soft labels (h×w×K) of the last of these frames (h×w×D), patch by patch."""
    height, width, _ = features[0].shape
    units = [nn.functional.normalize(frame, dim=-1) for frame in features]
    labels = [first]
    for now in range(1, len(features)):
        context = [0, *range(max(1, now - propagate.LAST), now)]
        found = torch.zeros(height, width, first.shape[-1])
        for y in range(height):
            for x in range(width):
                near = [
                    (float(units[now][y, x] @ units[t][v, u]), t, v, u)
                    for t in context
                    for v in range(height)
                    for u in range(width)
                    if max(abs(v - y), abs(u - x)) <= propagate.RADIUS
                ]
                best = sorted(near, reverse=True)[: propagate.NEIGHBOURS]
                weights = [np.exp(cosine / propagate.TEMPERATURE) for cosine, *_ in best]
                for weight, (_, t, v, u) in zip(weights, best, strict=True):
                    found[y, x] += weight / sum(weights) * labels[t][v, u]
        labels.append(found)
    return labels[-1]


def test_labels_are_those_of_a_loop_over_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(propagate, "RADIUS", 2)
    monkeypatch.setattr(propagate, "LAST", 2)
    frames = [torch.randn(5, 7, 6) for _ in range(5)]
    mask = np.random.default_rng(0).integers(0, 3, (5, 7))
    follow = Propagation(frames[0], mask, [1, 2])
    for frame in frames[1:]:
        follow(frame)
    first = nn.functional.one_hot(torch.from_numpy(mask), 3).float()
    torch.testing.assert_close(follow.last[-1][1], by_loop(frames, first))


def moving(count: int) -> tuple[list[Tensor], list[np.ndarray]]:
    """A square of patches, all different from each other and from the background, that moves a patch a frame."""
    square, background = torch.randn(4, 4, 32), torch.randn(12, 24, 32)
    frames, masks = [], []
    for number in range(count):
        frame, mask = background.clone(), np.zeros((12 * 14, 24 * 14), np.uint8)
        left = 2 + number
        frame[4:8, left : left + 4] = square
        mask[4 * 14 : 8 * 14, left * 14 : (left + 4) * 14] = 7
        frames.append(frame)
        masks.append(mask)
    return frames, masks


def test_a_planted_square_is_followed_where_its_features_are_and_nowhere_else() -> None:
    frames, masks = moving(12)
    follow, led_away, lost = (Propagation(frames[0], masks[0], [7]) for _ in range(3))
    for frame in frames[1:]:
        found, away = follow(frame), led_away(frame.roll(6, 1))  # a square is 4 wide, so 6 patches away is beside it
        shuffled = lost(frame.flatten(0, 1)[torch.randperm(12 * 24)].view_as(frame))

    def overlap(guess: np.ndarray, mask: np.ndarray) -> float:
        return float(((guess == 7) & (mask == 7)).sum() / ((guess == 7) | (mask == 7)).sum())

    assert set(np.unique(found)) == {0, 7}
    assert overlap(found, masks[-1]) > 0.9
    assert overlap(away, np.roll(masks[-1], 6 * 14, 1)) > 0.9
    assert overlap(away, masks[-1]) < 0.02
    assert overlap(shuffled, masks[-1]) < 0.05


def test_a_patch_does_not_look_beyond_the_radius() -> None:
    background = torch.randn(3, 40, 16)
    first, second = background.clone(), background.clone()
    thing = torch.randn(16)
    first[1, 1], second[1, 1 + propagate.RADIUS + 1] = thing, thing
    mask = np.zeros((3, 40), np.uint8)
    mask[1, 1] = 1
    assert Propagation(first, mask, [1])(second)[1, 1 + propagate.RADIUS + 1] == 0
    second[1, 1 + propagate.RADIUS] = thing
    follow = Propagation(first, mask, [1])
    follow(second)
    assert follow.last[0][1][1, 1 + propagate.RADIUS, 1] > 0.5
