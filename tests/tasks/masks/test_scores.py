"""What is exactly there scores 1, what is shuffled near 0, and panoptic quality against its own few lines."""

from __future__ import annotations

import pytest
import torch

from veca.tasks.masks.decode import Segment, instances, panoptic, semantic
from veca.tasks.masks.labels import Outline, segments_of
from veca.tasks.masks.scores import MaskScores


def scene(seed: int, things: int = 4, classes: int = 3) -> torch.Tensor:
    """Squares of several classes that do not touch, and a row that does not count."""
    torch.manual_seed(seed)
    label = torch.zeros(64, 64, dtype=torch.int32)
    for number in range(things):
        row, column = divmod(number, 2)
        height, width = torch.randint(8, 28, (2,)).tolist()
        kind = int(torch.randint(1, classes + 1, ()))
        top, left = 2 + 31 * row, 2 + 31 * column
        label[top : top + height, left : left + width] = kind * 1000 + number
    label[63] = -1
    return label


def truth_of(label: torch.Tensor) -> list[Segment]:
    numbers, kinds = segments_of(label)
    return [Segment(kind, 1.0, label == number) for number, kind in zip(numbers.tolist(), kinds.tolist(), strict=True)]


def scored(pairs: list[tuple[torch.Tensor, list[Segment]]], stuff: tuple[int, ...] = ()) -> dict[str, float]:
    scores = MaskScores(3, stuff)
    for label, segments in pairs:
        scores.add(label, segments, segments)
    return scores.result()


def test_what_is_there_scores_one_and_what_is_elsewhere_nothing() -> None:
    labels = [scene(seed) for seed in range(6)]
    perfect = scored([(label, truth_of(label)) for label in labels])
    assert perfect["PQ"] == perfect["mask_mAP"] == perfect["SQ"] == perfect["RQ"] == pytest.approx(1.0)
    moved = [
        (label, [Segment(s.label, 1.0, s.mask.roll((17, 23), (0, 1))) for s in truth_of(label)]) for label in labels
    ]
    assert scored(moved)["PQ"] < 0.1
    assert scored(moved)["mask_mAP"] < 0.1
    renamed = [(label, [Segment((s.label + 1) % 3, 1.0, s.mask) for s in truth_of(label)]) for label in labels]
    assert scored(renamed)["PQ"] < 0.1
    assert scored([(label, []) for label in labels])["PQ"] == 0
    assert scored([(label, []) for label in labels])["mask_mAP"] == 0


def test_things_that_overlap_are_compared_whole_and_crowds_do_not_count() -> None:
    """As COCO does: an answer that is exactly the outline of a partly covered thing is right."""
    planes = torch.zeros(3, 32, 32, dtype=torch.bool)
    planes[0, 2:20, 2:20], planes[1, 8:20, 8:20], planes[2, 24:] = True, True, True
    label = torch.zeros(32, 32, dtype=torch.int32)
    label[planes[0]], label[planes[1]], label[planes[2]] = 1000, 1001, -1
    outlines = [Outline(0, plane.numpy(), bool(number == 2)) for number, plane in enumerate(planes)]
    answers = [Segment(0, 0.9 - number / 10, plane) for number, plane in enumerate(planes)]
    in_crowd = torch.zeros(32, 32, dtype=torch.bool)
    in_crowd[26:28, 3:9] = True
    scores = MaskScores(1, ())
    scores.add(label, truth_of(label), [Segment(0, 0.95, in_crowd), *answers[:2]], outlines)
    assert scores.result()["mask_mAP"] == pytest.approx(1.0)
    flat = MaskScores(1, ())
    flat.add(label, truth_of(label), answers[:2])
    assert flat.result()["mask_mAP"] < 0.8  # half of the larger one is hidden


def test_a_segment_where_nothing_is_counts_as_wrong_but_not_where_nothing_counts() -> None:
    label = scene(0)
    base = truth_of(label)
    extra = torch.zeros(64, 64, dtype=torch.bool)
    extra[32:36, 60:64] = True
    assert scored([(label, [*base, Segment(base[0].label, 0.9, extra)])])["PQ"] < 0.99
    void = torch.zeros(64, 64, dtype=torch.bool)
    void[63, :40] = True
    assert scored([(label, [*base, Segment(base[0].label, 0.9, void)])])["PQ"] == pytest.approx(1.0)


def quality(pairs: list[tuple[torch.Tensor, list[Segment]]]) -> float:
    """Panoptic quality as its definition reads, pixel by pixel of sets."""
    each = {}
    for kind in range(3):
        hits, total, wrong = 0, 0.0, 0
        for label, segments in pairs:
            counted = label != -1
            truths = [s.mask for s in truth_of(label) if s.label == kind]
            guesses = [s.mask for s in segments if s.label == kind]
            ious = [[float((t & g).sum() / ((t | g) & counted).sum()) for g in guesses] for t in truths]
            found = [iou for row in ious for iou in row if iou > 0.5]
            hits, total = hits + len(found), total + sum(found)
            wrong += len(truths) + len(guesses) - 2 * len(found)
        if hits + wrong:
            each[kind] = total / (hits + wrong / 2)
    return sum(each.values()) / len(each)


@pytest.mark.parametrize("seed", range(4))
def test_panoptic_quality_is_its_definition(seed: int) -> None:
    pairs = []
    for number in range(3):
        label = scene(10 * seed + number)
        guesses = []
        for index, segment in enumerate(truth_of(label)):
            mask = segment.mask.roll((index, 2), (0, 1)) & (label != -1)
            guesses.append(Segment((segment.label + (index == 3)) % 3, 0.9, mask))
        pairs.append((label, guesses))
    assert scored(pairs)["PQ"] == pytest.approx(quality(pairs), abs=1e-6)


def queries() -> tuple[torch.Tensor, torch.Tensor]:
    """Three queries of two classes: a left half, a right half, and the same left half less surely."""
    masks = torch.full((3, 4, 4), -9.0)
    masks[0, :, :2] = masks[2, :, :2] = 9
    masks[1, :, 2:] = 9
    return torch.tensor([[6.0, 0, 0], [0, 6, 0], [2, 0, 0]]), masks


def test_one_head_three_answers() -> None:
    classes, masks = queries()
    found = panoptic(classes, masks, (8, 8))
    assert [(one.label, int(one.mask.sum())) for one in found] == [(0, 32), (1, 32)]
    sure = instances(classes, masks, (8, 8))
    assert [one.label for one in sure[:2]] in ([0, 1], [1, 0])
    assert sure[2].label == 0
    assert sure[2].score < sure[1].score
    meaning = semantic(classes, masks, (8, 8))
    assert meaning[:, :4].eq(0).all()
    assert meaning[:, 4:].eq(1).all()
    nothing = torch.tensor([[0.0, 0, 9]] * 3)
    assert panoptic(nothing, masks, (8, 8)) == []
    assert semantic(nothing, masks, (8, 8)).eq(2).all()


def test_stuff_that_two_queries_found_is_one_segment() -> None:
    classes, masks = torch.tensor([[6.0, 0, 0], [6, 0, 0]]), queries()[1][:2]
    assert len(panoptic(classes, masks, (4, 4))) == 2
    (one,) = panoptic(classes, masks, (4, 4), stuff=(0,))
    assert one.fused
    assert one.mask.all()
    label = torch.ones(4, 4, dtype=torch.int32)
    assert scored([(label, [one])], stuff=(0,))["PQ"] == 1
