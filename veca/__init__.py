"""VECA: a vision backbone whose patches talk only through a few learned cores (arXiv 2605.12491).

import veca
model = veca.load("veca-s14")
out = model(model.preprocess("photo.jpg"), cores=16)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from veca._version import __version__

if TYPE_CHECKING:
    from veca.config import VecaConfig, list_models
    from veca.errors import InputError
    from veca.extract.extractor import Extractor
    from veca.images import preprocess
    from veca.large.picture import open_source
    from veca.model import Veca, VecaOutput, create_model
    from veca.scan import Look, Scan
    from veca.scan_file import open_scan
    from veca.weights import bundled_models, load

# Where each public name lives. They are imported at first use: `veca --help` need not wait seconds for PyTorch.
_PUBLIC = {
    "Extractor": "veca.extract.extractor",
    "InputError": "veca.errors",
    "Look": "veca.scan",
    "Scan": "veca.scan",
    "Veca": "veca.model",
    "VecaConfig": "veca.config",
    "VecaOutput": "veca.model",
    "bundled_models": "veca.weights",
    "create_model": "veca.model",
    "list_models": "veca.config",
    "load": "veca.weights",
    "open_scan": "veca.scan_file",
    "open_source": "veca.large.picture",
    "preprocess": "veca.images",
}

__all__ = [
    "Extractor",
    "InputError",
    "Look",
    "Scan",
    "Veca",
    "VecaConfig",
    "VecaOutput",
    "__version__",
    "bundled_models",
    "create_model",
    "list_models",
    "load",
    "open_scan",
    "open_source",
    "preprocess",
]


def __getattr__(name: str) -> Any:
    if name == "transformers":  # registers with the Auto classes, where transformers is installed
        return importlib.import_module("veca.integrations.transformers")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'veca' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
