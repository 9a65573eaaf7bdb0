"""The sizes and the bundled weights as timm models: importing this module registers them.

    import timm, veca.integrations.timm
    model = timm.create_model("veca_s14", pretrained=True, num_classes=37, cores=16)  # the bundled weights
    model = timm.create_model("veca_small", pretrained=True, pretrained_cfg_overlay={"file": "small/model.safetensors"})

timm needs torchvision, which does not fit beside our CPU build of PyTorch. So what the models do is tested without it
(`veca/integrations/timm_model.py`), and tools/timm_tests.py runs timm's own tests in an environment that has it.
"""

from __future__ import annotations

from typing import Any

try:
    from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
except ImportError as error:
    raise ImportError(f"veca.integrations.timm needs timm: pip install timm ({error})") from error

from veca.config import MODELS, VecaConfig
from veca.integrations.timm_model import TimmVeca, backbone_tensors, pretrained_cfg
from veca.weights import BUNDLED, CONFIG, WEIGHTS, bundled_models, read_config

_configs: dict[str, VecaConfig] = dict(MODELS)
_files: dict[str, str] = {}
for _bundled in bundled_models():
    _configs[_bundled.replace("-", "_")] = read_config(BUNDLED / _bundled / CONFIG)[0]
    _files[_bundled.replace("-", "_")] = str(BUNDLED / _bundled / WEIGHTS)

__all__ = ["TimmVeca"]  # timm appends the models
default_cfgs = generate_default_cfgs(
    {name: pretrained_cfg(config, _files.get(name, "")) for name, config in _configs.items()}
)


def _register(name: str, config: VecaConfig) -> None:
    def build(pretrained: bool = False, **kwargs: Any) -> Any:
        return build_model_with_cfg(
            TimmVeca,
            name,
            pretrained,
            feature_cfg={"out_indices": 4, "feature_cls": "getter"},
            pretrained_filter_fn=backbone_tensors,
            config=config,
            **kwargs,
        )

    build.__name__ = build.__qualname__ = name
    globals()[name] = register_model(build)


for _name, _config in _configs.items():
    _register(_name, _config)
