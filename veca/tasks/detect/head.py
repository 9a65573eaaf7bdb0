"""RF-DETR of `transformers` without its backbone: a detector that is given feature maps instead of pixels.

The same tensors, under the same names, make a whole detector with a `VecaBackbone` below them
(`veca.integrations.transformers.build_detector`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from veca.errors import InputError, require


class Through(nn.Module):
    """In the place of a backbone, where the maps are there already."""

    def forward(self, maps: Tensor) -> SimpleNamespace:  # B×D×h×w
        return SimpleNamespace(feature_maps=(maps,))


class Encoder(nn.Module):
    """In the place of RF-DETR's encoder, which knows no backbone but its own."""

    def __init__(self, backbone: nn.Module, projector: nn.Module, queries: int) -> None:
        super().__init__()
        self.backbone, self.projector, self.queries = backbone, projector, queries
        self.cores: int | None = None  # the budget of this call, for a backbone that has one

    def forward(self, pixel_values: Tensor, pixel_mask: Tensor) -> tuple[Tensor, Tensor]:
        chosen = {} if self.cores is None else {"cores": self.cores}
        maps = self.projector(self.backbone(pixel_values, **chosen).feature_maps).float()  # boxes need their digits
        if maps.shape[-2] * maps.shape[-1] < self.queries:
            raise InputError(
                f"{self.queries} queries need as many patches, not {maps.shape[-2]}×{maps.shape[-1]}: "
                "take larger images or fewer queries"
            )
        mask = nn.functional.interpolate(pixel_mask[None].float(), size=maps.shape[-2:])[0].bool()
        return maps, mask


def stand_in(config: Any, width: int, maps: int) -> Any:
    """The config with the smallest backbone that RF-DETR itself can build; it is replaced at once."""
    from transformers.models.rf_detr.configuration_rf_detr import RfDetrDinov2Config

    small = {"num_attention_heads": 1, "mlp_ratio": 1, "image_size": 1, "patch_size": 1, "num_windows": 1}
    standing = copy.deepcopy(config)
    standing.backbone_config = RfDetrDinov2Config(
        hidden_size=width, num_hidden_layers=maps, out_indices=list(range(1, maps + 1)), **small
    )
    return standing


def new_head(width: int, classes: Sequence[str], queries: int, groups: int, layers: int) -> Any:
    """A fresh detector for maps of width D."""
    require_rf_detr()
    from transformers import RfDetrConfig, RfDetrForObjectDetection

    config = stand_in(RfDetrConfig(**settings(classes, queries, groups, layers)), width, 1)
    head = RfDetrForObjectDetection(config)
    head.model.backbone = Encoder(Through(), head.model.backbone.projector, queries)
    return head


def settings(classes: Sequence[str], queries: int, groups: int, layers: int) -> dict[str, Any]:
    """What differs from RF-DETR's own settings; a decoder this small learns from thousands of photos, not millions."""
    return {
        "num_queries": queries,
        "group_detr": groups,
        "decoder_layers": layers,
        "decoder_ffn_dim": 1024,
        "dropout": 0.0,
        "id2label": dict(enumerate(classes)),
        "label2id": {name: number for number, name in enumerate(classes)},
    }


def require_rf_detr() -> None:
    """RF-DETR came with transformers 5; its matching is scipy's."""
    require("scipy", "probe")
    found = require("transformers", "transformers")
    if not hasattr(found, "RfDetrForObjectDetection"):
        raise InputError("detection needs RF-DETR, which transformers has from 5 on: pip install -U transformers")


def on_map(patches: Tensor) -> Tensor:
    """B×N×D of a square view, row by row → B×D×h×w."""
    side = round(patches.shape[1] ** 0.5)
    maps: Tensor = patches.transpose(1, 2).unflatten(-1, (side, side))
    return maps


def loss(head: Any, maps: Tensor, labels: Sequence[Tensor]) -> Tensor:
    """RF-DETR's own; labels: M×5 each, the class and the box (centre and size as shares of the view)."""
    out = head.model(maps)
    with torch.autocast(maps.device.type, enabled=False):
        targets = [{"class_labels": one[:, 0].long(), "boxes": one[:, 1:].float()} for one in labels]
        classes, boxes = head.predict_class_and_boxes(
            out.intermediate_hidden_states.float(), out.intermediate_reference_points.float()
        )  # of every layer; the last counts as the answer
        proposed = head.predict_encoder_class_logits(out.enc_outputs_class.float())
        total: Tensor = head.loss_function(
            classes[-1], targets, maps.device, boxes[-1], head.config, classes, boxes, proposed,
            out.enc_outputs_coord_logits.float(),
        )[0]  # fmt: skip
    return total


def decode(logits: Tensor, boxes: Tensor, most: int = 100) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(scores M, classes M, corners M×4 as shares) of each image, best first. logits: B×Q×K; boxes: B×Q×4."""
    classes = logits.shape[-1]
    scores, places = logits.float().sigmoid().flatten(1).topk(min(most, logits[0].numel()))
    centre, half = boxes.float()[..., :2], boxes.float()[..., 2:] / 2
    corners = torch.cat((centre - half, centre + half), dim=-1).clamp(0, 1)
    chosen = [one[place // classes] for one, place in zip(corners, places, strict=True)]
    return list(zip(scores, places % classes, chosen, strict=True))
