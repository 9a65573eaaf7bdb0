"""Matching, loss and head, against brute force and planted answers."""

from __future__ import annotations

import itertools

import pytest
import torch

from veca.tasks.masks.head import Found, MaskHead
from veca.tasks.masks.loss import loss_of, match, pixel_parts, target_of


@pytest.mark.parametrize("seed", range(5))
def test_the_matching_is_the_cheapest_of_all(seed: int) -> None:
    torch.manual_seed(seed)
    cost = torch.randn(5, 3)
    rows, columns = match(cost)
    every = [sum(cost[row, column] for column, row in enumerate(some)) for some in itertools.permutations(range(5), 3)]
    assert float(cost[rows, columns].sum()) == pytest.approx(float(min(every)))
    assert sorted(columns.tolist()) == [0, 1, 2]
    assert len(match(torch.randn(2, 4))[0]) == 2  # more things than queries


def test_targets_are_shares_of_cells_and_void_does_not_count() -> None:
    label = torch.zeros(8, 8, dtype=torch.int32)
    label[:4, :3] = 1000
    label[4:, 4:] = 2001
    label[0, 6:] = -1
    target = target_of(label, (4, 4))
    assert target.classes.tolist() == [0, 1]
    assert target.masks[0].view(4, 4)[:2].tolist() == [[1, 0.5, 0, 0]] * 2
    assert target.masks[1].view(4, 4)[2:, 2:].eq(1).all()
    assert target.counted.view(4, 4)[0].tolist() == [1, 1, 1, 0.5]


def test_both_pixel_parts_by_hand() -> None:
    torch.manual_seed(0)
    logits, masks, counted = torch.randn(2, 6), torch.rand(3, 6).round(), torch.tensor([1.0, 1, 1, 1, 0, 0])
    pixel, dice = pixel_parts(logits, masks, counted)
    for query, thing in itertools.product(range(2), range(3)):
        one, truth = logits[query, :4], masks[thing, :4]  # the last two do not count
        wanted = torch.nn.functional.binary_cross_entropy_with_logits(one, truth)
        assert pixel[query, thing] == pytest.approx(float(wanted), abs=1e-5)
        chance = one.sigmoid()
        wanted = 1 - (2 * (chance * truth).sum() + 1) / (chance.sum() + truth.sum() + 1)
        assert dice[query, thing] == pytest.approx(float(wanted), abs=1e-5)


def planted(label: torch.Tensor, order: list[int]) -> Found:
    """Queries that say exactly what the label of two things says, in any order; the third says "nothing"."""
    planes = [label == 1000, label == 2000, torch.zeros_like(label, dtype=torch.bool)]
    kinds = [0, 1, 2]
    masks = torch.stack([planes[place] for place in order]).float() * 60 - 30
    classes = torch.nn.functional.one_hot(torch.tensor([kinds[place] for place in order]), 3).float() * 60
    return Found(classes[None], masks[None])


def test_the_right_answer_costs_nothing_in_any_order_and_a_wrong_class_does() -> None:
    label = torch.zeros(8, 8, dtype=torch.int32)
    label[:4], label[6:] = 1000, 2000
    large = label.repeat_interleave(4, 0).repeat_interleave(4, 1)
    costs = [float(loss_of([planted(label, list(order))], [large])) for order in itertools.permutations(range(3))]
    assert max(costs) - min(costs) < 1e-4
    found = planted(label, [0, 1, 2])
    shuffled = Found(found.classes[:, [1, 0, 2]], found.masks)
    assert float(loss_of([shuffled], [large])) > costs[0] + 1
    assert torch.isfinite(loss_of([found], [torch.zeros_like(large)]))  # nothing there at all


def test_any_grid_budget_and_stride() -> None:
    torch.manual_seed(0)
    head = MaskHead(24, 2, queries=5, depth=2, width=64).eval()
    for cores, grid in ((1, (3, 5)), (8, (4, 4)), (64, (7, 2))):
        found = head(torch.randn(2, cores, 24), torch.randn(2, grid[0] * grid[1], 24), grid)
        assert len(found) == 2
        assert found[-1].classes.shape == (2, 5, 3)
        assert found[-1].masks.shape == (2, 5, *grid)


def test_finer_patches_look_along_the_same_queries() -> None:
    """The same features on a lattice twice as fine: masks are those of the grid, classes do not change at all."""
    torch.manual_seed(0)
    head = MaskHead(24, 2, queries=5, depth=2, width=64).eval()
    torch.nn.init.zeros_(head.place.weight)  # else a patch's place, a quarter of a patch away, is seen too
    cores, patches = torch.randn(1, 4, 24), torch.randn(1, 6, 6, 24)
    finer = patches.repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1, 2)
    with torch.inference_mode():
        coarse = head(cores, patches.flatten(1, 2), (6, 6))[-1]
        fine = head(cores, patches.flatten(1, 2), (6, 6), (finer, (12, 12)))[-1]
    torch.testing.assert_close(fine.masks, coarse.masks.repeat_interleave(2, 2).repeat_interleave(2, 3))
    torch.testing.assert_close(fine.classes, coarse.classes)


def test_the_loss_falls_on_a_toy() -> None:
    """Two colours of patches, one thing each: a head that learns must tell them apart."""
    torch.manual_seed(0)
    label = torch.zeros(32, 32, dtype=torch.int32)
    label[:16, :16], label[16:, 16:] = 1000, 2000
    colours = torch.randn(3, 16)
    small = label[2::4, 2::4]
    patches = colours[torch.where(small > 0, small // 1000, 0).long()].flatten(0, 1)[None]
    head = MaskHead(16, 2, queries=4, depth=1, width=64)
    optimiser = torch.optim.AdamW(head.parameters(), lr=2e-3)
    losses = []
    for _ in range(60):
        loss = loss_of(head(patches[:, :1], patches, (8, 8)), [label])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.2 * losses[0]
