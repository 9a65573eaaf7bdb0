"""The mask head of `veca probe masks` and `veca finetune masks` as a `transformers` model.

model, processor = from_probe("voc/heads/veca-s14-336px-64cores")
pipeline("image-segmentation", model=model, image_processor=processor, threshold=0.5)("photo.jpg")
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from transformers.utils import ModelOutput, can_return_tuple

from veca.integrations.transformers.configuration import VecaConfig
from veca.integrations.transformers.modeling import VecaPreTrainedModel
from veca.scan import scanned
from veca.tasks.base.heads import ModuleHead
from veca.tasks.masks.head import MaskHead
from veca.tasks.masks.loss import lattice_of, loss_to, target_from


@dataclass
class UniversalSegmentationOutput(ModelOutput):  # type: ignore[misc]
    """The names that MaskFormer's outputs have."""

    loss: Tensor | None = None
    class_queries_logits: Tensor | None = None  # B×Q×(K+1)
    masks_queries_logits: Tensor | None = None  # B×Q×h×w
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class VecaForUniversalSegmentation(VecaPreTrainedModel):
    """Instance, semantic and panoptic masks; the last of the config's labels is "nothing"."""

    task: ClassVar[str] = "masks"

    def __init__(self, config: VecaConfig) -> None:
        super().__init__(config)
        width = self.veca.config.feature_width
        self.head = MaskHead(width, config.num_labels - 1, config.mask_queries, config.mask_layers)
        self.post_init()

    @classmethod
    def settings_of(cls, head: ModuleHead) -> dict[str, Any]:
        """What the model's config takes from a saved head, beside its budget."""
        names = [*head.about["classes"], "nothing"]
        labels = {"id2label": dict(enumerate(names)), "label2id": {name: place for place, name in enumerate(names)}}
        shape = {f"mask_{name}": head.about[name] for name in ("queries", "layers")}
        return {**labels, **shape, "mask_fine": head.about.get("fine")}

    @classmethod
    def images_of(cls, head: ModuleHead) -> dict[str, Any]:
        """The whole photo, squeezed into the square that the head was trained on; and which classes are stuff."""
        side = head.about["size"]
        return {"size": {"height": side, "width": side}, "label_ids_to_fuse": head.about["stuff"]}

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        pixel_values: Tensor,  # B×3×H×W
        mask_labels: Sequence[Tensor] | None = None,  # n×H×W for each photo
        class_labels: Sequence[Tensor] | None = None,  # n for each photo
        cores: int | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> UniversalSegmentationOutput:
        seen = self.see(pixel_values, cores, output_hidden_states, output_attentions)
        finer = None
        if self.config.mask_fine is not None and not self.training:
            found = scanned(self.veca, pixel_values, seen.cores, stride=self.config.mask_fine)
            finer = found.patches.to(seen.tokens.dtype).clone(), found.grid
        outputs = self.head(seen.tokens[:, : seen.cores], seen.patches, seen.grid, finer)
        loss = None
        if mask_labels is not None and class_labels is not None:
            pairs = zip(mask_labels, class_labels, strict=True)
            loss = loss_to(outputs, [target_from(masks, kinds, lattice_of(outputs)) for masks, kinds in pairs])
        return UniversalSegmentationOutput(
            loss=loss,
            class_queries_logits=outputs[-1].classes,
            masks_queries_logits=outputs[-1].masks,
            hidden_states=seen.hidden_states,
            attentions=seen.attentions,
        )
