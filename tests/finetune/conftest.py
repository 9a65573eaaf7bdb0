"""Data that a tiny model can learn in seconds: coloured squares with class folders, masks and depth."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

COLOURS = {"red": (200, 40, 40), "blue": (40, 40, 200), "green": (40, 180, 40)}
SIDE = 40


def picture(draw: np.random.Generator, colour: tuple[int, ...]) -> tuple[Image.Image, np.ndarray]:
    """A coloured square on a grey ground with noise, and where it is."""
    pixels = draw.integers(90, 160, (SIDE, SIDE, 3))
    where = np.zeros((SIDE, SIDE), bool)
    top, left = draw.integers(0, 16, 2)
    where[top : top + 24, left : left + 24] = True
    pixels[where] = np.array(colour) + draw.integers(-20, 20, (where.sum(), 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)), where


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """In every test here."""


@pytest.fixture(scope="session")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, draw = tmp_path_factory.mktemp("classes"), np.random.default_rng(0)
    for part, count in (("train", 16), ("val", 4), ("test", 8)):
        for name, colour in COLOURS.items():
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                picture(draw, colour)[0].save(folder / part / name / f"{number}.png")
    return folder


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Masks (0 ground, 1 red, 2 blue) and depth (1 m for squares, 4 m behind them) of the same pictures."""
    folder, draw = tmp_path_factory.mktemp("pairs"), np.random.default_rng(1)
    for part, count in (("train", 32), ("test", 8)):
        for kind in ("images", "masks", "depth"):
            (folder / part / kind).mkdir(parents=True)
        for number in range(count):
            which = number % 2
            image, where = picture(draw, list(COLOURS.values())[which])
            image.save(folder / part / "images" / f"{number}.png")
            mask = np.where(where, which + 1, 0).astype(np.uint8)
            Image.fromarray(mask).save(folder / part / "masks" / f"{number}.png")
            depth = np.where(where, 1000, 4000).astype(np.uint16)
            Image.fromarray(depth).save(folder / part / "depth" / f"{number}.png")
    return folder
