"""From a head of `veca probe` or `veca finetune` to a `transformers` model with its processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from veca.backbones import load_backbone
from veca.devices import pick_dtype
from veca.errors import InputError
from veca.integrations.transformers.heads import (
    VecaForDepthEstimation,
    VecaForImageClassification,
    VecaForSemanticSegmentation,
)
from veca.integrations.transformers.processing import VecaImageProcessor
from veca.model import Veca
from veca.tasks.base.heads import Head
from veca.tasks.base.views import RESIZE


def from_probe(folder: str | Path, model: str | None = None) -> tuple[Any, VecaImageProcessor]:
    """A model and its image processor from a head's folder; `model` says where the backbone is, if it moved."""
    head = Head.load(folder)
    about = head.about
    dtype = pick_dtype(about.get("dtype", "float32"), torch.device("cpu"))
    backbone = load_backbone(model or about["model"], dtype=dtype)
    plain = backbone.model
    if not isinstance(plain, Veca):
        raise InputError(f"{folder}: this head belongs to {backbone.source}, which is not a VECA model")
    if backbone.digest != about["weights"]:
        raise InputError(f"{backbone.source}: not the weights this head was trained on ({about['model']})")
    plain.float().requires_grad_(True)
    more: dict[str, Any] = {"cores": about["cores"]}
    if "classes" in about:
        more["id2label"] = dict(enumerate(about["classes"]))
        more["label2id"] = {name: number for number, name in enumerate(about["classes"])}
    size = about["size"]
    processor = VecaImageProcessor(size=round(size * about.get("zoom", 1)), patch_size=plain.patch_size)
    if head.task == "classify":
        kind = "multi_label_classification" if about["several"] else "single_label_classification"
        wrapped = VecaForImageClassification.from_plain(plain, problem_type=kind, **more)
        linear = wrapped.classifier
        processor = VecaImageProcessor(
            size=round(size * RESIZE), do_center_crop=True, crop_size=size, patch_size=plain.patch_size
        )
    elif head.task == "segment":
        wrapped = VecaForSemanticSegmentation.from_plain(plain, **more)
        linear = wrapped.classifier
    else:
        bins = {"depth_head": about["kind"], "min_depth": about["nearest"], "max_depth": about["farthest"]}
        wrapped = VecaForDepthEstimation.from_plain(plain, depth_bins=len(head.weight), **bins, **more)
        linear = wrapped.head
    with torch.no_grad():
        linear.weight.copy_(head.weight)
        linear.bias.copy_(head.bias)
    return wrapped.eval(), processor
