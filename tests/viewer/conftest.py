"""A real `veca view` process on a free loopback port, with a small model of fresh weights and a picture of squares."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from listening import Listening
from PIL import Image

import veca
from veca import Veca, VecaConfig

SIZE = (1604, 1206)  # 3 levels of patches of 16, none of which they divide
SQUARES = ((200, 160), (1160, 240), (680, 840))  # (x, y) of blue squares of SIDE pixels
SIDE = 160
HTTP = httpx.Client(timeout=60)


class View(Listening):
    def __init__(self, *arguments: str, cache: Path) -> None:
        words = ["view", *arguments, "--no-open", "--dtype", "float32"]
        super().__init__(words, {**os.environ, "VECA_CACHE": str(cache), "OMP_NUM_THREADS": "1"})
        self.secret = self.url.split("/")[3]

    def get(self, path: str, **options: object) -> httpx.Response:
        return HTTP.get(self.url + path, **options)  # type: ignore[arg-type]

    def state(self) -> dict:
        return dict(self.get("state").json())

    def scanned(self) -> View:
        """Once all levels are."""
        for _ in range(600):
            state = self.state()
            assert not state["problem"], state
            if not state["doing"]:
                return self
            time.sleep(0.1)
        raise AssertionError(f"not scanned after a minute: {state}")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("model") / "little"
    model = Veca(VecaConfig(depth=2, width=64, heads=2, patch_size=16, bank=16))
    with torch.no_grad():  # fresh weights are so small that all patches look alike; these tell them apart
        for parameter in model.parameters():
            parameter.mul_(2)
    model.save(folder)
    return folder


@pytest.fixture(scope="session")
def library(model_folder: Path) -> Veca:
    return veca.load(model_folder)


@pytest.fixture(scope="session")
def pixels() -> np.ndarray:
    """Red noise that grows darker to the right, with three blue squares."""
    source = np.random.default_rng(0)
    values = source.integers(0, 50, (SIZE[1], SIZE[0], 3), dtype=np.uint8)
    values[..., 0] += np.linspace(190, 90, SIZE[0]).astype(np.uint8)
    for x, y in SQUARES:
        values[y : y + SIDE, x : x + SIDE] = source.integers(0, 40, (SIDE, SIDE, 3), dtype=np.uint8)
        values[y : y + SIDE, x : x + SIDE, 2] += 200
    return values


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory, pixels: np.ndarray) -> Path:
    path = tmp_path_factory.mktemp("image") / "squares.png"
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Callable[..., View]]:
    views: list[View] = []
    own = tmp_path_factory.mktemp("cache")

    def starter(*arguments: object, cache: Path = own) -> View:
        views.append(View(*map(str, arguments), "--model", str(model_folder), cache=cache))
        return views[-1]

    yield starter
    for view in views:
        view.end()


@pytest.fixture(scope="session")
def view(start: Callable[..., View], image: Path) -> View:
    return start(image).scanned()


def halves(values: np.ndarray, times: int) -> np.ndarray:
    """The image reduced so many times, computed in another way than the viewer's."""
    for _ in range(times):
        values = np.pad(values, ((0, len(values) % 2), (0, values.shape[1] % 2), (0, 0)), "edge")
        high, wide = values.shape[0] // 2, values.shape[1] // 2
        mean = values.reshape(high, 2, wide, 2, 3).astype(float).mean((1, 3))
        values = np.floor(mean + 0.5).astype(np.uint8)
    return values
