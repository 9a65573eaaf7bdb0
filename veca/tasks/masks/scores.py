"""Panoptic quality (torchmetrics) and mask mAP (pycocotools), over pictures seen one by one."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics.detection import PanopticQuality

from veca.tasks.base.pairs import Array
from veca.tasks.masks.decode import Segment
from veca.tasks.masks.labels import EACH, Outline, segments_of


class MaskScores:
    def __init__(self, classes: int, stuff: tuple[int, ...]) -> None:
        self.classes, self.stuff = classes, stuff
        self.things = [number for number in range(classes) if number not in stuff]
        # "Nothing" is one more kind of stuff: a segment where nothing is must count as wrong. It is not averaged.
        self.quality = PanopticQuality(
            {*self.things}, {*stuff, classes}, allow_unknown_preds_category=True, return_sq_and_rq=True,
            return_per_class=True,
        )  # fmt: skip
        self.truth: list[dict[str, Any]] = []
        self.guesses: list[dict[str, Any]] = []
        self.sizes: list[tuple[int, int]] = []

    def add(
        self,
        label: Tensor,  # H×W, as labels.py says
        segments: list[Segment],
        instances: list[Segment],
        outlines: Sequence[Outline] | None = None,
    ) -> None:
        """A picture's label and what was found there.

        Of a label every pixel belongs to one thing. COCO's overlap, so where `outlines` are known mask mAP compares
        with those, and with its own rule for crowds.
        """
        numbers, kinds = segments_of(label)
        counted = label != -1
        truth = torch.full((*label.shape, 2), self.classes, dtype=torch.long)
        truth[~counted] = self.classes + 1
        truth[..., 1] = 0
        for number, kind in zip(numbers.tolist(), kinds.tolist(), strict=True):
            truth[label == number] = torch.tensor([kind, number])
        guess = torch.full_like(truth, 0)
        guess[..., 0] = self.classes
        for number, segment in enumerate(segments):
            guess[segment.mask] = torch.tensor([segment.label, number])
        self.quality.update(guess[None], truth[None])

        image = len(self.sizes)
        self.sizes.append((label.shape[0], label.shape[1]))
        if outlines is None:
            pairs = [pair for pair in zip(numbers.tolist(), kinds.tolist(), strict=True) if pair[0] >= EACH]
            there = [Outline(kind, (label == number).numpy(), False) for number, kind in pairs]
        else:
            there, counted = list(outlines), torch.ones_like(counted)
        for thing in there:
            coded = encoded(thing.mask)
            self.truth.append(
                {"id": len(self.truth) + 1, "image_id": image, "category_id": thing.label, "iscrowd": int(thing.crowd),
                 "segmentation": coded, "area": float(thing.mask.sum())}
            )  # fmt: skip
        for segment in instances:
            plane = segment.mask & counted
            if segment.label in self.things and plane.any():
                self.guesses.append(
                    {"image_id": image, "category_id": segment.label, "segmentation": encoded(plane.numpy()),
                     "score": segment.score}
                )  # fmt: skip

    def result(self) -> dict[str, Any]:
        """PQ with its parts, mask mAP, and the PQ of each class (None where it neither is nor was found)."""
        order = [*self.things, *sorted(self.stuff), self.classes]  # as torchmetrics lists them
        rows = dict(zip(order, self.quality.compute().tolist(), strict=True))
        met = self.quality.true_positives + self.quality.false_positives + self.quality.false_negatives
        there = dict(zip(order, (met > 0).tolist(), strict=True))
        known = [rows[number] for number in order[:-1] if there[number]]
        mean = [sum(part) / len(known) for part in zip(*known, strict=True)] if known else [0.0, 0.0, 0.0]
        return {
            "PQ": mean[0],
            "SQ": mean[1],
            "RQ": mean[2],
            **self.mean_precision(),
            "per_class": [rows[number][0] if there[number] else None for number in range(self.classes)],
        }

    def mean_precision(self) -> dict[str, float]:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval

        if not self.truth or not self.guesses:
            return {"mask_mAP": 0.0, "mask_mAP50": 0.0}
        images = [{"id": number, "height": h, "width": w} for number, (h, w) in enumerate(self.sizes)]
        table = {
            "info": {}, "images": images, "annotations": self.truth,
            "categories": [{"id": number, "name": str(number)} for number in self.things],
        }  # fmt: skip
        with contextlib.redirect_stdout(io.StringIO()):  # it tells what it does, line by line
            truth = COCO()
            truth.dataset = table
            truth.createIndex()
            judge = COCOeval(truth, truth.loadRes(self.guesses), "segm")
            judge.evaluate()
            judge.accumulate()
            judge.summarize()
        return {"mask_mAP": float(judge.stats[0]), "mask_mAP50": float(judge.stats[1])}


def encoded(plane: Array) -> Any:  # H×W bool
    """As pycocotools wants a mask."""
    from pycocotools import mask as rle

    return rle.encode(np.asfortranarray(plane.astype(np.uint8)))
