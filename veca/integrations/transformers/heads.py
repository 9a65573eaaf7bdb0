"""Linear heads: the ones that `veca probe` and `veca finetune` train, as `transformers` models.

model, processor = from_probe("pets/heads/veca-s14-256px-64cores")
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import DepthEstimatorOutput, ImageClassifierOutput, SemanticSegmenterOutput
from transformers.utils import can_return_tuple

from veca.integrations.transformers.configuration import VecaConfig
from veca.integrations.transformers.modeling import Seen, VecaPreTrainedModel
from veca.tasks.base.dense import upsample
from veca.tasks.base.heads import Head
from veca.tasks.base.views import RESIZE
from veca.tasks.depth import depth_loss, metres
from veca.tasks.segment import pixel_loss


def on_grid(head: nn.Module, seen: Seen) -> Tensor:
    """B×K×h×w: a linear layer on each patch with the global feature appended. Called, for it may be an adapter."""
    patches = seen.patches
    logits = head(torch.cat((patches, seen.tokens[:, :1].expand_as(patches)), dim=-1))
    on_map: Tensor = logits.transpose(1, 2).unflatten(-1, seen.grid)
    return on_map


class Probed(VecaPreTrainedModel):
    """A model that carries the head of one task."""

    task: ClassVar[str]
    layer: ClassVar[str] = "classifier"  # which of its modules is the head

    @property
    def linear(self) -> nn.Linear:
        found: nn.Linear = getattr(self, self.layer)
        return found

    @classmethod
    def settings_of(cls, head: Head) -> dict[str, Any]:
        """What the model's config takes from a head of `veca probe`, beside its classes and budget."""
        return {}

    @classmethod
    def images_of(cls, head: Head) -> dict[str, Any]:
        """How the image processor prepares what such a head was trained on."""
        return {"size": round(head.about["size"] * head.about.get("zoom", 1))}


class VecaForImageClassification(Probed):
    """A linear layer on the global feature (the first core)."""

    task = "classify"

    def __init__(self, config: VecaConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        width = self.veca.config.feature_width
        self.classifier = nn.Linear(width, config.num_labels) if config.num_labels else nn.Identity()
        self.post_init()

    @classmethod
    def settings_of(cls, head: Head) -> dict[str, Any]:
        several = head.about["several"]
        return {"problem_type": "multi_label_classification" if several else "single_label_classification"}

    @classmethod
    def images_of(cls, head: Head) -> dict[str, Any]:
        side = head.about["size"]
        return {"size": round(side * RESIZE), "do_center_crop": True, "crop_size": side}

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        pixel_values: Tensor,  # B×3×H×W
        labels: Tensor | None = None,  # B, or B×K for several labels an image
        cores: int | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> ImageClassifierOutput:
        seen = self.see(pixel_values, cores, output_hidden_states, output_attentions)
        logits = self.classifier(seen.tokens[:, 0])
        # transformers' own loss: that of the task for one label or several, and of `problem_type="regression"`
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        return ImageClassifierOutput(
            loss=loss, logits=logits, hidden_states=seen.hidden_states, attentions=seen.attentions
        )


class VecaForSemanticSegmentation(Probed):
    """A linear layer on each patch with the global feature appended; `logits` are on the patch grid."""

    task = "segment"

    def __init__(self, config: VecaConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.classifier = nn.Linear(2 * self.veca.config.feature_width, config.num_labels)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        pixel_values: Tensor,  # B×3×H×W
        labels: Tensor | None = None,  # B×H×W
        cores: int | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> SemanticSegmenterOutput:
        seen = self.see(pixel_values, cores, output_hidden_states, output_attentions)
        logits = on_grid(self.classifier, seen)
        loss = None
        if labels is not None:
            loss = pixel_loss(logits.float().unbind(), labels.unbind(), self.config.semantic_loss_ignore_index)
        return SemanticSegmenterOutput(
            loss=loss, logits=logits, hidden_states=seen.hidden_states, attentions=seen.attentions
        )


class VecaForDepthEstimation(Probed):
    """A linear layer on each patch with the global feature appended; `predicted_depth` is in metres, B×H×W."""

    task, layer = "depth", "head"

    def __init__(self, config: VecaConfig) -> None:
        super().__init__(config)
        outputs = config.depth_bins if config.depth_head == "bins" else 1
        self.head = nn.Linear(2 * self.veca.config.feature_width, outputs)
        self.post_init()

    @classmethod
    def settings_of(cls, head: Head) -> dict[str, Any]:
        about = head.about
        shape = {"depth_bins": len(head.weight), "depth_head": about["kind"]}
        return {**shape, "min_depth": about["nearest"], "max_depth": about["farthest"]}

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        pixel_values: Tensor,  # B×3×H×W
        labels: Tensor | None = None,  # B×H×W in metres, 0 where unknown
        cores: int | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> DepthEstimatorOutput:
        seen = self.see(pixel_values, cores, output_hidden_states, output_attentions)
        config = self.config
        maps = on_grid(self.head, seen).float()
        guess = torch.stack([metres(one, config.depth_head, config.min_depth, config.max_depth) for one in maps])
        loss = None if labels is None else depth_loss(guess.unbind(), labels.unbind())
        size = (pixel_values.shape[-2], pixel_values.shape[-1])
        return DepthEstimatorOutput(
            loss=loss,
            predicted_depth=torch.stack([upsample(one, size)[0] for one in guess]),
            hidden_states=seen.hidden_states,
            attentions=seen.attentions,
        )
