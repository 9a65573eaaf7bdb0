"""VECA as a `transformers` model: importing this module registers everything with the Auto classes.

    import veca.integrations.transformers                       # or simply touch `veca.transformers`
    from transformers import AutoImageProcessor, AutoModel

    model = AutoModel.from_pretrained("models/mine")            # the folder that `model.save` writes, or a hub id
    inputs = AutoImageProcessor.from_pretrained("models/mine")(photo, return_tensors="pt")
    out = model(**inputs, cores=16)                             # pooler_output, last_hidden_state: cores, then patches

`model.veca` is the plain `veca.Veca` inside.
"""

from __future__ import annotations

try:
    from transformers import __version__ as _version
except ImportError as error:
    raise ImportError(
        f"veca.integrations.transformers needs transformers 5: pip install 'veca[transformers]' ({error})"
    ) from error
if int(_version.split(".")[0]) < 5:
    raise ImportError(
        f"veca.integrations.transformers needs transformers 5, not {_version}: pip install -U transformers"
    )

from transformers import (
    AutoBackbone,
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForDepthEstimation,
    AutoModelForImageClassification,
    AutoModelForObjectDetection,
    AutoModelForSemanticSegmentation,
    AutoModelForUniversalSegmentation,
)

from veca.integrations.transformers.configuration import VecaConfig
from veca.integrations.transformers.detection import VecaDetectorConfig, VecaForObjectDetection, build_detector
from veca.integrations.transformers.heads import (
    VecaForDepthEstimation,
    VecaForImageClassification,
    VecaForSemanticSegmentation,
)
from veca.integrations.transformers.masks import VecaForUniversalSegmentation
from veca.integrations.transformers.modeling import VecaBackbone, VecaModel, VecaPreTrainedModel
from veca.integrations.transformers.probed import from_probe
from veca.integrations.transformers.processing import VecaImageProcessor

__all__ = [
    "VecaBackbone",
    "VecaConfig",
    "VecaDetectorConfig",
    "VecaForDepthEstimation",
    "VecaForImageClassification",
    "VecaForObjectDetection",
    "VecaForSemanticSegmentation",
    "VecaForUniversalSegmentation",
    "VecaImageProcessor",
    "VecaModel",
    "VecaPreTrainedModel",
    "build_detector",
    "from_probe",
]

AutoConfig.register("veca", VecaConfig, exist_ok=True)
AutoImageProcessor.register(VecaConfig, image_processor_classes={"pil": VecaImageProcessor}, exist_ok=True)
for _auto, _model in (
    (AutoModel, VecaModel),
    (AutoBackbone, VecaBackbone),
    (AutoModelForImageClassification, VecaForImageClassification),
    (AutoModelForSemanticSegmentation, VecaForSemanticSegmentation),
    (AutoModelForDepthEstimation, VecaForDepthEstimation),
    (AutoModelForUniversalSegmentation, VecaForUniversalSegmentation),
):
    _auto.register(VecaConfig, _model, exist_ok=True)

AutoConfig.register("veca_rf_detr", VecaDetectorConfig, exist_ok=True)
AutoImageProcessor.register(VecaDetectorConfig, image_processor_classes={"pil": VecaImageProcessor}, exist_ok=True)
AutoModelForObjectDetection.register(VecaDetectorConfig, VecaForObjectDetection, exist_ok=True)
