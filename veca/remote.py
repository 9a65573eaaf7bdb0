"""How transformers finds the package from a model folder alone: `trust_remote_code=True` in place of our import.

`config.json` and `preprocessor_config.json` name classes in a small file beside them, which imports them from veca.
"""

from __future__ import annotations

from pathlib import Path

from veca.files import write_text

CLASSES = {
    "AutoConfig": "VecaConfig",
    "AutoModel": "VecaModel",
    "AutoBackbone": "VecaBackbone",
    "AutoModelForImageClassification": "VecaForImageClassification",
    "AutoModelForSemanticSegmentation": "VecaForSemanticSegmentation",
    "AutoModelForDepthEstimation": "VecaForDepthEstimation",
    "AutoModelForUniversalSegmentation": "VecaForUniversalSegmentation",
    "AutoImageProcessor": "VecaImageProcessor",
}
DETECTOR = {
    "AutoConfig": "VecaDetectorConfig",
    "AutoModelForObjectDetection": "VecaForObjectDetection",
    "AutoImageProcessor": "VecaImageProcessor",
}
AUTO_MAP, DETECTOR_MAP = (
    {auto: f"modeling_veca.{name}" for auto, name in classes.items()} for classes in (CLASSES, DETECTOR)
)
PROCESSOR_MAP = {"AutoImageProcessor": AUTO_MAP["AutoImageProcessor"]}
CODE = f'''"""VECA for transformers with trust_remote_code=True. The code is the package's: pip install veca"""

from veca.integrations.transformers import {", ".join(dict.fromkeys([*CLASSES.values(), *DETECTOR.values()]))}  # noqa
'''


def write_code(folder: str | Path) -> None:
    """The file that the maps name."""
    write_text(Path(folder) / "modeling_veca.py", CODE)
