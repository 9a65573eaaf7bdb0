"""A small model whose attention is far from uniform, and photos made of plain shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from veca.analysis.photos import Photo
from veca.backbones import Backbone
from veca.config import VecaConfig
from veca.model import Veca

SMALL = VecaConfig(depth=3, width=32, heads=2, mlp_ratio=2.0, bank=16)


def lively(config: VecaConfig = SMALL, seed: int = 0) -> Veca:
    """Fresh weights are so small that every patch reads every core alike; these differ."""
    torch.manual_seed(seed)
    model = Veca(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "proj" in name:
                parameter.normal_(std=0.5 * parameter[0].numel() ** -0.5 * 4)
            if name == "bank.alpha":
                parameter.fill_(0.3)
    return model


@pytest.fixture(scope="session")
def backbone() -> Backbone:
    return Backbone("small", lively())


@pytest.fixture(scope="session")
def photo() -> Photo:
    """96×64: the left half red, a blue square on the right, some noise."""
    pixels = np.random.default_rng(0).integers(0, 40, (64, 96, 3), dtype=np.uint8)
    pixels[:, :48, 0] += 180
    pixels[16:48, 64:88, 2] += 200
    return Photo("shapes", Image.fromarray(pixels))
