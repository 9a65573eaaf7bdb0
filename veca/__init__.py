"""VECA: a vision backbone whose patches talk only through a few learned cores (arXiv 2605.12491).

    import veca
    model = veca.load("veca-s14")
    out = model(veca.preprocess("photo.jpg", size=512, patch_size=model.patch_size), cores=16)
"""

from veca._version import __version__
from veca.config import VecaConfig, list_models
from veca.errors import InputError
from veca.images import preprocess
from veca.model import Veca, VecaOutput, create_model
from veca.weights import bundled_models, load


__all__ = [
    "InputError",
    "Veca",
    "VecaConfig",
    "VecaOutput",
    "__version__",
    "bundled_models",
    "create_model",
    "list_models",
    "load",
    "preprocess",
]
