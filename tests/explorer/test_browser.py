"""The page in a real Chromium, at the width of a phone and of a large screen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch

from veca.analysis.contributions import contributions
from veca.analysis.photos import Photo, features, photo_tensor
from veca.backbones import Backbone
from veca.explorer import build_page
from veca.teachers import load_teacher

GRID = (10, 15)
WIDTHS = [375, 1600]
VIRIDIS = (matplotlib.colormaps["viridis"](np.arange(256))[:, :3] * 255).round()


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, photo: Photo, backbone: Backbone) -> Path:
    path = tmp_path_factory.mktemp("page") / "one.html"
    path.write_text(build_page([photo], [backbone], size=160, budgets=(4, 8, 16)), "utf-8")
    return path


@pytest.fixture(scope="module")
def two_photos(tmp_path_factory: pytest.TempPathFactory, photo: Photo, other: Photo, backbone: Backbone) -> Path:
    path = tmp_path_factory.mktemp("page") / "photos.html"
    path.write_text(build_page([photo, other], [backbone], size=160, budgets=(4, 16)), "utf-8")
    return path


def levels(pixels: np.ndarray) -> np.ndarray:
    """The place of each colour in viridis, 0…1; every pixel must be one of its colours."""
    distance = np.abs(pixels[..., None, :].astype(float) - VIRIDIS).max(-1)
    assert distance.min(-1).max() <= 1
    return distance.argmin(-1) / 255


def cosines(backbone: Backbone, photo: Photo, row: int, column: int, cores: int = 16) -> np.ndarray:
    patches = torch.nn.functional.normalize(features(backbone, photo, 160, cores).patches, dim=-1)
    return (patches @ patches[row * GRID[1] + column]).reshape(GRID).numpy()


def low(tab: Any) -> float:
    return float(tab.text("#low").split()[-1].replace("−", "-"))


def same(shown: np.ndarray, expected: np.ndarray, low: float, high: float, tolerance: float = 0.06) -> None:
    np.testing.assert_allclose(shown, np.clip((expected - low) / (high - low), 0, 1), atol=tolerance)


@pytest.mark.parametrize("width", WIDTHS)
def test_hovering_shows_the_cosine_of_that_patch(
    width: int, one: Path, open_tab: Any, photo: Photo, backbone: Backbone
) -> None:
    tab = open_tab(one, width)
    for row, column in ((2, 3), (7, 12)):
        tab.page.mouse.move(*tab.point(row, column, GRID))
        shown = levels(tab.pixels())
        assert shown[row, column] == 1
        same(shown, cosines(backbone, photo, row, column), low(tab), 1)
        assert f"column {column + 1}, row {row + 1}" in tab.text("#readout")
    tab.page.mouse.click(*tab.point(7, 12, GRID))  # held: moving away changes nothing
    before = tab.pixels()
    tab.page.mouse.move(*tab.point(1, 1, GRID))
    np.testing.assert_array_equal(tab.pixels(), before)


@pytest.mark.parametrize("width", WIDTHS)
def test_both_sliders_change_map_and_cores(
    width: int, one: Path, open_tab: Any, photo: Photo, backbone: Backbone
) -> None:
    tab = open_tab(one, width)
    tab.page.mouse.move(*tab.point(4, 4, GRID))
    tab.slide("budget", 0)
    assert tab.text("#budget-value") == "4 of 16"
    assert tab.page.locator(".core:visible").count() == 4
    same(levels(tab.pixels()), cosines(backbone, photo, 4, 4, cores=4), low(tab), 1)
    last = tab.dot(2).evaluate("(dot) => dot.style.transform")
    tab.slide("layer", 0)
    assert tab.text("#layer-value") == "1 of 4"
    assert tab.dot(2).evaluate("(dot) => dot.style.transform") != last
    images, _ = photo_tensor(photo, backbone.model, 160, torch.device("cpu"))
    with torch.no_grad():
        x, y = ((backbone.veca.forward_layers(images, 4).coords[0][0, 2] + 1) / 2).tolist()
    tab.page.wait_for_timeout(600)  # the dot glides there
    dot, stage = tab.dot(2).bounding_box(), tab.page.locator(".stage").bounding_box()
    assert dot["x"] + dot["width"] / 2 - stage["x"] == pytest.approx(x * stage["width"], abs=1.5)
    assert dot["y"] + dot["height"] / 2 - stage["y"] == pytest.approx(y * stage["height"], abs=1.5)
    assert tab.page.locator("polyline").first.get_attribute("points").count(",") == 1
    tab.slide("layer", 3)
    assert tab.page.locator("polyline").first.get_attribute("points").count(",") == 4  # a trail through four layers


@pytest.mark.parametrize("width", WIDTHS)
@torch.no_grad()
def test_clicking_a_core_shows_what_it_reads_and_who_reads_it(
    width: int, one: Path, open_tab: Any, photo: Photo, backbone: Backbone
) -> None:
    tab = open_tab(one, width)
    tab.dot(3).click()
    assert tab.text("#core-name") == "Core 3"
    assert tab.dot(3).get_attribute("aria-pressed") == "true"
    images, _ = photo_tensor(photo, backbone.model, 160, torch.device("cpu"))
    layer = list(contributions(backbone.veca, images, backbone.veca.forward_layers(images, 16)))[-1]
    reads, read_by = (maps[0, 3].reshape(GRID).numpy() for maps in (layer.reads, layer.read_by))
    assert "reads" in tab.text("#legend-title")
    same(levels(tab.pixels()), reads, 0, reads.max(), 0.1)
    tab.page.get_by_text("is read by").click()
    assert tab.text("#legend-title") == "Who reads this core"
    same(levels(tab.pixels()), read_by, 0, read_by.max(), 0.1)
    tab.page.get_by_text("Let go of this core").click()
    assert not tab.visible("#core-box")
    tab.slide("budget", 0)  # core 3 exists; at the smallest budget a core beyond it lets go
    tab.slide("budget", 2)
    tab.dot(9).click()
    tab.slide("budget", 0)
    assert not tab.visible("#core-box")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_tab_fits_and_says_what_it_shows(width: int, scheme: str, one: Path, open_tab: Any) -> None:
    tab = open_tab(one, width, color_scheme=scheme)
    assert tab.page.locator("html").get_attribute("data-theme") == scheme
    seen = set()
    for name in ("similarity", "colours", "contributions", "global"):
        tab.page.click(f"[data-tab={name}]")
        seen.add((tab.text("#legend-title"), tab.text("#legend-words"), tab.pixels().tobytes()))
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.page.locator("[role=tab][aria-selected=true]").inner_text().lower() == name
    assert len(seen) == 4
    assert len({words for _, words, _ in seen}) == 4
    ink, paper = tab.page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    brightness = [sum(map(int, colour[4:-1].split(","))) / 765 for colour in (ink, paper)]
    assert abs(brightness[0] - brightness[1]) > 0.7
    tab.page.click("#theme")
    assert tab.page.locator("html").get_attribute("data-theme") != scheme


def test_the_profile_of_a_patch_is_read_out(one: Path, open_tab: Any, photo: Photo, backbone: Backbone) -> None:
    tab = open_tab(one, 1600)
    tab.page.click("[data-tab=contributions]")
    tab.page.mouse.move(*tab.point(5, 9, GRID))
    images, _ = photo_tensor(photo, backbone.model, 160, torch.device("cpu"))
    with torch.no_grad():
        layer = list(contributions(backbone.veca, images, backbone.veca.forward_layers(images, 16)))[-1]
    profile = layer.patches[0, 5 * GRID[1] + 9]
    assert f"takes most from core {int(profile.argmax())} (" in tab.text("#readout")


def test_the_keyboard_is_enough(one: Path, open_tab: Any, photo: Photo, backbone: Backbone) -> None:
    tab = open_tab(one, 1600)
    press = tab.page.keyboard.press
    tab.page.locator("[role=tab][aria-selected=true]").focus()
    press("ArrowRight")
    assert tab.text("#legend-title") == "Features as colours"
    press("ArrowLeft")
    press("Tab")
    assert tab.page.evaluate("document.activeElement.className") == "stage"
    press("ArrowUp")
    press("ArrowRight")
    assert "column 9, row 5" in tab.text("#readout")  # from the middle, column 8 and row 6
    same(levels(tab.pixels()), cosines(backbone, photo, 4, 8), low(tab), 1)
    press("Shift+ArrowLeft")
    assert "column 4, row 5" in tab.text("#readout")
    press("Enter")
    assert "held" in tab.text("#readout")
    press("Escape")
    assert "held" not in tab.text("#readout")
    press("Tab")  # the cores are one stop
    press("ArrowRight")
    press("ArrowRight")
    press("Enter")
    assert tab.text("#core-name") == "Core 2"
    press("Escape")
    assert not tab.visible("#core-box")
    tab.page.locator("#layer").focus()
    press("ArrowLeft")
    assert tab.text("#layer-value") == "3 of 4"
    tab.page.locator("#budget").focus()
    press("Home")
    assert tab.text("#budget-value") == "4 of 16"


def test_a_tap_chooses_a_patch(one: Path, open_tab: Any, photo: Photo, backbone: Backbone) -> None:
    tab = open_tab(one, 375, has_touch=True, is_mobile=True)
    tab.page.click("[data-tab=similarity]")
    tab.page.uncheck("#show-cores")  # so that no dot is in the way
    tab.page.touchscreen.tap(*tab.point(8, 2, GRID))
    same(levels(tab.pixels()), cosines(backbone, photo, 8, 2), low(tab), 1)
    tab.page.touchscreen.tap(*tab.point(1, 13, GRID))
    assert levels(tab.pixels())[1, 13] == 1


def test_resizing_keeps_dots_on_their_places(one: Path, open_tab: Any) -> None:
    tab = open_tab(one, 1600)

    def place() -> tuple[float, float]:
        tab.settle()
        tab.page.wait_for_timeout(600)
        dot, stage = tab.dot(1).bounding_box(), tab.page.locator(".stage").bounding_box()
        x, y = dot["x"] + dot["width"] / 2, dot["y"] + dot["height"] / 2
        return (x - stage["x"]) / stage["width"], (y - stage["y"]) / stage["height"]

    before, pixels = place(), tab.pixels()
    for width in (375, 820, 1600):
        tab.page.set_viewport_size({"width": width, "height": 800})
        assert place() == pytest.approx(before, abs=0.006)
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
    np.testing.assert_array_equal(tab.pixels(), pixels)


@pytest.mark.parametrize("width", WIDTHS)
def test_two_photos_are_linked(
    width: int, two_photos: Path, open_tab: Any, photo: Photo, other: Photo, backbone: Backbone
) -> None:
    tab = open_tab(two_photos, width)
    tab.page.mouse.move(*tab.point(3, 11, GRID))
    own, there = (torch.nn.functional.normalize(features(backbone, p, 160).patches, dim=-1) for p in (photo, other))
    expected = (there @ own[3 * 15 + 11]).reshape(15, 10).numpy()
    shown = levels(tab.pixels(1))
    brightest = max(expected.max(), (low(tab) + 1) / 2)
    same(shown, expected, low(tab), brightest, 0.08)
    ring = tab.page.locator(".ring.match")
    assert ring.is_visible()
    stage, box = tab.page.locator(".stage").nth(1).bounding_box(), ring.bounding_box()
    row = int((box["y"] + box["height"] / 2 - stage["y"]) / stage["height"] * 15)
    column = int((box["x"] + box["width"] / 2 - stage["x"]) / stage["width"] * 10)
    assert expected[row, column] > expected.max() - 0.04
    tab.page.mouse.move(*tab.point(6, 5, (15, 10), pane=1))  # and the other way round
    assert levels(tab.pixels(1))[6, 5] == 1
    assert tab.page.locator(".ring.match").count() == 1


def test_two_models_are_asked_about_the_same_place(
    tmp_path: Path, open_tab: Any, photo: Photo, backbone: Backbone, shared: Path
) -> None:
    teacher = Backbone("teacher", load_teacher(shared / "teacher" / "dav2-small-encoder"))
    path = tmp_path / "models.html"
    path.write_text(build_page([photo], [backbone, teacher], size=160, budgets=(4, 16)), "utf-8")
    tab = open_tab(path, 1600)
    tab.page.mouse.move(*tab.point(5, 7, GRID))
    seen = features(teacher, photo, 160)
    at = int(5.5 / 10 * seen.grid[0]) * seen.grid[1] + int(7.5 / 15 * seen.grid[1])
    assert levels(tab.pixels(1)).ravel()[at] == 1
    tab.page.click("[data-tab=contributions]")
    assert "This model has no cores." in tab.text("#panes")


def test_a_teacher_alone_has_no_sliders_and_no_cores(tmp_path: Path, open_tab: Any, photo: Photo, shared: Path) -> None:
    path = tmp_path / "teacher.html"
    path.write_text(build_page([photo], [load_teacher(shared / "teacher" / "dav2-small-encoder")], size=140), "utf-8")
    tab = open_tab(path, 375)
    for control in ("#budget", "#layer", "#show-cores"):
        assert not tab.visible(control)
    tab.page.click("[data-tab=global]")
    assert "class token" in tab.text("#legend-words")
    assert len(np.unique(tab.pixels().reshape(-1, 3), axis=0)) > 20
