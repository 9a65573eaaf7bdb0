"""From a head of `veca probe` or `veca finetune` to a `transformers` model with its processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from veca.errors import InputError
from veca.integrations.transformers.detection import build_detector, detector_processor
from veca.integrations.transformers.heads import (
    VecaForDepthEstimation,
    VecaForImageClassification,
    VecaForSemanticSegmentation,
)
from veca.integrations.transformers.masks import VecaForUniversalSegmentation
from veca.integrations.transformers.processing import VecaImageProcessor
from veca.model import Veca
from veca.tasks.base.heads import Head, ModuleHead, load_head
from veca.tasks.detect.task import Detect

MODELS: dict[str, Any] = {
    model.task: model
    for model in (
        VecaForImageClassification,
        VecaForSemanticSegmentation,
        VecaForDepthEstimation,
        VecaForUniversalSegmentation,
    )
}


def from_probe(folder: str | Path, model: str | None = None) -> tuple[Any, VecaImageProcessor]:
    """A model and its image processor from a head's folder; `model` says where the backbone is, if it moved."""
    head = load_head(folder)
    known = (*MODELS, "detect")
    if head.task not in known:
        raise InputError(f"{folder}: transformers models carry heads of {', '.join(known)}, not of {head.task}")
    backbone = head.backbone(model, torch.device("cpu"))
    plain = backbone.model
    if not isinstance(plain, Veca):
        raise InputError(f"{folder}: this head belongs to {backbone.source}, which is not a VECA model")
    plain.float().requires_grad_(True)
    if isinstance(head, ModuleHead) and head.task == "detect":
        return detector(head, plain)
    settings: dict[str, Any] = {"cores": head.about["cores"]}
    if isinstance(head, Head) and "classes" in head.about:
        settings["id2label"] = dict(enumerate(head.about["classes"]))
        settings["label2id"] = {name: number for number, name in enumerate(head.about["classes"])}
    kind = MODELS[head.task]
    wrapped = kind.from_plain(plain, **settings, **kind.settings_of(head))
    if isinstance(head, Head):
        with torch.no_grad():
            wrapped.linear.weight.copy_(head.weight)
            wrapped.linear.bias.copy_(head.bias)
    else:
        head.fill(wrapped.head)
    return wrapped.eval(), VecaImageProcessor(patch_size=plain.patch_size, **kind.images_of(head))


def detector(head: ModuleHead, plain: Veca) -> tuple[Any, VecaImageProcessor]:
    """A whole RF-DETR: the head's tensors have the same names in it."""
    module, about = Detect.module(head), head.about  # which checks them
    shape = {name: about[name] for name in ("queries", "groups", "layers")}
    built = build_detector(plain, about["classes"], cores=about["cores"], size=about["size"], **shape)
    built.load_state_dict({**built.state_dict(), **module.state_dict()})
    return built.eval(), detector_processor(plain.patch_size, about["size"])
