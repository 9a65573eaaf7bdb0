"""VECA for transformers with trust_remote_code=True. The code is the package's: pip install veca"""

from veca.integrations.transformers import VecaConfig, VecaModel, VecaBackbone, VecaForImageClassification, VecaForSemanticSegmentation, VecaForDepthEstimation, VecaForUniversalSegmentation, VecaImageProcessor, VecaDetectorConfig, VecaForObjectDetection  # noqa
