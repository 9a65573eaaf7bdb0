"""A small model with a photo it treats unevenly, and a tab of a real Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from veca.analysis.photos import Photo
from veca.backbones import Backbone
from veca.config import VecaConfig
from veca.model import Veca


@pytest.fixture(scope="session")
def backbone() -> Backbone:
    torch.manual_seed(0)
    model = Veca(VecaConfig(depth=4, width=48, heads=3, mlp_ratio=2.0, bank=16)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "proj" in name:
                parameter.normal_(std=2 * parameter[0].numel() ** -0.5)
            if name == "bank.alpha":
                parameter.fill_(0.3)
    return Backbone("small", model)


def shapes(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 60, (160, 240, 3), dtype=np.uint8)
    pixels[:, :120, 0] += 150
    pixels[40:120, 160:220, 2] += 180
    return Image.fromarray(pixels)


@pytest.fixture(scope="session")
def photo() -> Photo:
    return Photo("shapes", shapes(0))


@pytest.fixture(scope="session")
def other() -> Photo:
    return Photo("turned", shapes(1).rotate(90, expand=True))


class Tab:
    """A page in the browser that remembers every complaint and every request."""

    def __init__(self, browser: Any, file: Path, width: int, state: str = "", **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri() + state)
        self.page.wait_for_selector("html[data-ready=yes]")

    def settle(self) -> None:
        """Two frames: what was asked for has been drawn."""
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def pixels(self, pane: int = 0) -> np.ndarray:
        """The colours of the map, h×w×3."""
        self.settle()
        flat = self.page.evaluate(
            """(id) => { const c = document.getElementById(id);
            return [c.height, c.width, Array.from(c.getContext("2d").getImageData(0, 0, c.width, c.height).data)]; }""",
            f"map-{pane}",
        )
        return np.array(flat[2], np.uint8).reshape(flat[0], flat[1], 4)[..., :3]

    def point(self, row: int, column: int, grid: tuple[int, int], pane: int = 0) -> tuple[float, float]:
        """Where a patch is on the screen."""
        stage = self.page.locator(".stage").nth(pane)
        stage.scroll_into_view_if_needed()
        box = stage.bounding_box()
        return box["x"] + (column + 0.5) / grid[1] * box["width"], box["y"] + (row + 0.5) / grid[0] * box["height"]

    def text(self, selector: str) -> str:
        self.settle()
        return str(self.page.locator(selector).inner_text())

    def visible(self, selector: str) -> bool:
        self.settle()
        return bool(self.page.locator(selector).is_visible())

    def slide(self, name: str, value: int) -> None:
        self.page.locator(f"#{name}").fill(str(value))
        self.settle()

    def dot(self, core: int, pane: int = 0) -> Any:
        return self.page.locator(".stage").nth(pane).locator(f'.core[data-core="{core}"]')


@pytest.fixture
def open_tab(chromium: Any) -> Iterator[Any]:
    tabs: list[Tab] = []

    def opened(file: Path, width: int, **options: Any) -> Tab:
        tabs.append(Tab(chromium, file, width, **options))
        return tabs[-1]

    yield opened
    for tab in tabs:
        tab.context.close()
        assert tab.complaints == []
        assert [url for url in tab.requests if not url.startswith(("file:", "data:"))] == []
