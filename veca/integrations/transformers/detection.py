"""Detection: RF-DETR of `transformers` with VECA as its backbone.

model = build_detector("veca-s14", classes=["cat", "dog"])          # or from_probe(folder) of a trained one
loss = model(pixel_values, labels=[{"class_labels": …, "boxes": …}]).loss
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import RfDetrConfig, RfDetrForObjectDetection

from veca.errors import InputError
from veca.integrations.transformers.configuration import VecaConfig
from veca.integrations.transformers.modeling import VecaBackbone
from veca.integrations.transformers.processing import VecaImageProcessor
from veca.model import Veca
from veca.remote import DETECTOR_MAP, write_code
from veca.tasks.detect import head as rf_detr
from veca.weights import load, processor_fits

QUERIES, GROUPS, LAYERS = 100, 1, 3  # what `veca finetune detect` takes, too; a GPU has room for 300 and 13


class VecaDetectorConfig(RfDetrConfig):  # type: ignore[misc]
    """RF-DETR's own settings; `backbone_config` is a `VecaConfig`, whose `cores` is the budget."""

    model_type = "veca_rf_detr"
    backbone_config: Any = None
    auto_map: dict[str, str] = field(default_factory=lambda: dict(DETECTOR_MAP))

    def __post_init__(self, **kwargs: Any) -> None:
        if self.backbone_config is None:
            self.backbone_config = VecaConfig()
        elif isinstance(self.backbone_config, dict):
            self.backbone_config = VecaConfig(**self.backbone_config)
        super().__post_init__(**kwargs)

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """As in `transformers`, with the file that lets the folder be loaded by `trust_remote_code=True`."""
        self.auto_map = dict(DETECTOR_MAP)  # a model from the hub names the file there
        super().save_pretrained(save_directory, **kwargs)
        write_code(save_directory)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing: it would make `save_pretrained` copy the package's files into each folder."""


class VecaForObjectDetection(RfDetrForObjectDetection):  # type: ignore[misc]
    """`RfDetrForObjectDetection` on the feature maps of a `VecaBackbone`; images of any size in whole patches."""

    config_class = VecaDetectorConfig
    config: VecaDetectorConfig

    def __init__(self, config: VecaDetectorConfig) -> None:
        backbone = config.backbone_config
        super().__init__(rf_detr.stand_in(config, backbone.width, len(backbone.out_indices)))
        self.config = self.model.config = config
        self.loss_type = "RfDetrForObjectDetection"  # else transformers picks one by the name of this class
        projector = self.model.backbone.projector
        self.model.backbone = rf_detr.Encoder(VecaBackbone(backbone), projector, config.num_queries)
        self.post_init()

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModelForObjectDetection") -> None:
        """Nothing, as for its config."""

    @property
    def backbone(self) -> VecaBackbone:
        """Call `.requires_grad_(False)` on it to train the detector alone."""
        inside: VecaBackbone = self.model.backbone.backbone
        return inside

    def forward(
        self,
        pixel_values: Tensor,  # B×3×H×W
        pixel_mask: Tensor | None = None,  # B×H×W, 1 where there is no padding
        labels: Sequence[dict[str, Tensor]] | None = None,  # class_labels M, boxes M×4: centre and size as shares
        cores: int | None = None,
        **kwargs: Any,
    ) -> Any:
        self.model.backbone.cores = cores
        return super().forward(pixel_values, pixel_mask=pixel_mask, labels=labels, **kwargs)

    def save_pretrained(self, save_directory: str | Path, is_main_process: bool = True, **kwargs: Any) -> None:
        """As in `transformers`, with the settings of the image processor."""
        super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        backbone = self.config.backbone_config
        if is_main_process and not processor_fits(Path(save_directory), backbone.patch_size):
            detector_processor(backbone.patch_size, backbone.image_size).save_pretrained(save_directory)


def build_detector(
    model: str | Veca,
    classes: Sequence[str],
    *,
    cores: int | None = None,
    size: int = 448,
    out_indices: Sequence[int] | None = None,
    queries: int = QUERIES,
    groups: int = GROUPS,
    layers: int = LAYERS,
    **settings: Any,
) -> VecaForObjectDetection:
    """A fresh detector on trained features: a name or folder as `veca.load` takes it, or a model (shared, not copied).

    `cores` is its budget, `size` the side that its image processor resizes to. It reads the last layer, or the layers
    `out_indices` (1 to the depth). `settings` are `RfDetrConfig`'s.
    """
    plain = load(model) if isinstance(model, str) else model
    if plain.config.out_width is not None:
        raise InputError("a detector cannot read a model that ends with a projection (out_width)")
    if not classes:
        raise InputError("name the classes: build_detector(model, classes=['cat', 'dog'])")
    side = max(1, round(size / plain.patch_size)) * plain.patch_size
    maps = list(out_indices) if out_indices is not None else [plain.config.depth]
    backbone = VecaConfig.from_plain(
        plain, out_indices=maps, image_size=side, **({} if cores is None else {"cores": cores})
    )
    shape = {**rf_detr.settings(classes, queries, groups, layers), **settings}
    built = VecaForObjectDetection(VecaDetectorConfig(backbone_config=backbone, **shape))
    built.backbone.veca = plain
    return built


def detector_processor(patch_size: int, side: int) -> VecaImageProcessor:
    """Photos are squeezed into a square, as RF-DETR does."""
    return VecaImageProcessor(patch_size=patch_size, size={"height": side, "width": side})
