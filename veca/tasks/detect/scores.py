"""Average precision as COCO defines it, by pycocotools."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from veca.tasks.base.coco import Picture

Found = tuple[Tensor, Tensor, Tensor]  # scores M, classes M, corners M×4 as shares of the photo


def average_precision(found: Sequence[Found], pictures: Sequence[Picture], classes: int) -> dict[str, Any]:
    """mAP (over IoU 0.5 … 0.95), mAP50, mAP75 and the AP of each class (None: not in these photos)."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    images = [{"id": number, "width": one.width, "height": one.height} for number, one in enumerate(pictures)]
    truth: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []
    for number, (picture, (scores, labels, boxes)) in enumerate(zip(pictures, found, strict=True)):
        for thing in picture.things:
            left, top, right, bottom = thing.box
            box = [left, top, right - left, bottom - top]
            truth.append({"image_id": number, "category_id": thing.label, "bbox": box, "area": box[2] * box[3],
                          "iscrowd": int(thing.crowd), "id": len(truth) + 1})  # fmt: skip
        sides = boxes.new_tensor([picture.width, picture.height] * 2)
        for score, label, corners in zip(scores.tolist(), labels.tolist(), (boxes * sides).tolist(), strict=True):
            left, top, right, bottom = corners
            answers.append(
                {"image_id": number, "category_id": label, "bbox": [left, top, right - left, bottom - top],
                 "score": score}
            )  # fmt: skip
    categories = [{"id": number, "name": str(number)} for number in range(classes)]
    with contextlib.redirect_stdout(io.StringIO()):  # it tells of its progress
        known = COCO()
        known.dataset = {"info": {}, "images": images, "annotations": truth, "categories": categories}
        known.createIndex()
        guessed = known.loadRes(answers) if answers else COCO()
        judge = COCOeval(known, guessed, "bbox")
        if not answers:
            judge.params.imgIds, judge.params.catIds = sorted(known.imgs), sorted(known.cats)
        judge.evaluate()
        judge.accumulate()
    precision = judge.eval["precision"][:, :, :, 0, -1]  # IoU×recall×class, all sizes, the 100 best of a photo

    def mean(values: np.ndarray[Any, Any]) -> float | None:
        there = values[values > -1]
        return float(there.mean()) if there.size else None

    return {
        "mAP": mean(precision) or 0.0,
        "mAP50": mean(precision[0]) or 0.0,
        "mAP75": mean(precision[5]) or 0.0,
        "per_class": [mean(precision[:, :, number]) for number in range(classes)],
    }
