"""VECA through torch.hub: one entry per size, one per trained model that comes with the package.

    model = torch.hub.load("path/to/clone", "veca_tiny", source="local")             # a size, with fresh weights
    model = torch.hub.load("path/to/clone", "load", "models/mine", source="local")   # what veca.load takes

A trained model that comes with the package has its own name, with _ for -: `veca_s14` for veca-s14.
"""

from functools import partial as _partial

import veca as _veca

dependencies = ["torch", "numpy", "PIL", "safetensors", "huggingface_hub", "tyro", "rich"]


def _fresh(name: str, **overrides):
    """A model of this size with fresh weights; settings of `veca.VecaConfig` may be given by name."""
    return _veca.create_model(name, **overrides)


def _trained(name: str, cores: int | None = None, device: str = "cpu"):
    """The trained model that comes with the package; `cores` is the budget of calls that do not name one."""
    return _veca.load(name, cores=cores, device=device)


for _make, _names in ((_fresh, _veca.list_models()), (_trained, _veca.bundled_models())):
    for _name in _names:
        _entry = _partial(_make, _name)
        _entry.__doc__ = f"{_name}: {_make.__doc__}"
        globals()[_name.replace("-", "_")] = _entry


def load(source: str, cores: int | None = None, device: str = "cpu"):
    """Whatever `veca.load` takes: a folder, a .safetensors, an authors' .pt, a hub id."""
    return _veca.load(source, cores=cores, device=device)
