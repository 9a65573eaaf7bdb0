"""A small model folder, written by `veca`, and a photograph."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import veca

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here may ask the network

SMALL = {"depth": 3, "bank": 16}


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """In every test here."""


@pytest.fixture(scope="session")
def plain() -> veca.Veca:
    torch.manual_seed(1)
    model = veca.create_model("veca_tiny", **SMALL).eval()
    with torch.no_grad():  # so that cores move and every part matters
        model.bank.alpha.fill_(0.5)
    model.card = {"teacher": "nobody", "licence": "Apache-2.0"}
    return model


@pytest.fixture
def folder(plain: veca.Veca, tmp_path: Path) -> Path:
    plain.save(tmp_path / "plain")
    return tmp_path / "plain"


@pytest.fixture(scope="session")
def images() -> torch.Tensor:
    return torch.randn(2, 3, 48, 64, generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="session")
def photo() -> Image.Image:
    """80 wide, 60 high."""
    y, x = np.mgrid[0:60, 0:80]
    return Image.fromarray(np.stack((3 * x, 4 * y, 2 * (x + y) % 256), axis=-1).astype(np.uint8))
