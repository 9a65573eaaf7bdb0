"""The page in a real Chromium, at the width of a phone and of a large screen."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image

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
    ring = tab.page.locator(".stage .ring.match")
    assert ring.is_visible()
    stage, box = tab.page.locator(".stage").nth(1).bounding_box(), ring.bounding_box()
    row = int((box["y"] + box["height"] / 2 - stage["y"]) / stage["height"] * 15)
    column = int((box["x"] + box["width"] / 2 - stage["x"]) / stage["width"] * 10)
    assert expected[row, column] > expected.max() - 0.04
    tab.page.mouse.move(*tab.point(6, 5, (15, 10), pane=1))  # and the other way round
    assert levels(tab.pixels(1))[6, 5] == 1
    assert tab.page.locator(".stage .ring.match").count() == 1


@pytest.fixture(scope="module")
def teacher(shared: Path) -> Backbone:
    return Backbone("teacher", load_teacher(shared / "teacher" / "dav2-small-encoder"))


@pytest.fixture(scope="module")
def two_models(tmp_path_factory: pytest.TempPathFactory, photo: Photo, backbone: Backbone, teacher: Backbone) -> Path:
    path = tmp_path_factory.mktemp("page") / "models.html"
    path.write_text(build_page([photo], [backbone, teacher], size=160, budgets=(4, 16)), "utf-8")
    return path


def test_two_models_are_asked_about_the_same_place(
    two_models: Path, open_tab: Any, photo: Photo, teacher: Backbone
) -> None:
    tab = open_tab(two_models, 1600)
    tab.page.mouse.move(*tab.point(5, 7, GRID))
    seen = features(teacher, photo, 160)
    at = int(5.5 / 10 * seen.grid[0]) * seen.grid[1] + int(7.5 / 15 * seen.grid[1])
    assert levels(tab.pixels(1)).ravel()[at] == 1
    tab.page.click("[data-tab=contributions]")
    assert "This model has no cores." in tab.text("#panes")


@pytest.mark.parametrize("width", WIDTHS)
def test_the_other_model_is_one_click_away(width: int, two_models: Path, open_tab: Any) -> None:
    tab = open_tab(two_models, width)

    def shown() -> list[bool]:
        tab.settle()
        return [tab.page.locator("figure.map").nth(pane).is_visible() for pane in (0, 1)]

    assert shown() == [True, width == 1600]
    tab.page.locator("#models").get_by_text("teacher").click()
    assert shown() == [False, True]
    assert tab.page.locator("[role=radiogroup] input:checked").first.get_attribute("value") == "1"
    tab.page.mouse.move(*tab.point(5, 7, (11, 17), pane=1))
    assert "column 8, row 6" in tab.text("#readout")
    tab.page.locator("#models").get_by_text("small").click()
    assert shown() == [True, False]
    tab.page.locator("#models").get_by_text("both").click()
    assert shown() == [True, True]
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", WIDTHS)
def test_the_plain_photo_stands_beside_the_map(width: int, one: Path, open_tab: Any) -> None:
    tab = open_tab(one, width)
    assert tab.visible(".plain") == (width == 1600)  # a phone has no room for it until it is asked for
    if width == 375:
        tab.page.check("#show-photo")
    tab.settle()
    plain, stage = tab.page.locator(".plain").bounding_box(), tab.page.locator(".stage").bounding_box()
    assert plain["height"] == pytest.approx(stage["height"], abs=1.5)
    assert (plain["x"] + plain["width"] < stage["x"]) == (width == 1600)
    tab.page.mouse.move(plain["x"] + 12.5 / 15 * plain["width"], plain["y"] + 7.5 / 10 * plain["height"])
    assert levels(tab.pixels())[7, 12] == 1  # it can be pointed at, too
    assert tab.page.locator(".plain .ring").is_visible()
    tab.page.uncheck("#show-photo")
    assert not tab.visible(".plain")
    assert tab.page.locator(".stage").bounding_box()["width"] >= stage["width"]


@pytest.mark.parametrize(("turn", "stacked"), [(False, True), (True, False)])
def test_a_wide_photo_stands_above_its_map(
    turn: bool, stacked: bool, tmp_path: Path, open_tab: Any, photo: Photo, backbone: Backbone
) -> None:
    """Whatever its shape, photo and map fill a wide screen as far as their height allows."""
    image = photo.image.resize((480, 160))
    path = tmp_path / "page.html"
    image = image.rotate(90, expand=True) if turn else image
    path.write_text(build_page([Photo("long", image)], [backbone], size=96, budgets=(4,)), "utf-8")
    tab = open_tab(path, 1600)
    tab.settle()
    plain, stage = tab.page.locator(".plain").bounding_box(), tab.page.locator(".stage").bounding_box()
    assert (plain["y"] + plain["height"] <= stage["y"]) == stacked
    assert stage["y"] + stage["height"] <= 900
    assert max(stage["width"] / 1180, stage["height"] / 730) > 0.75


def test_a_link_keeps_what_is_shown(one: Path, open_tab: Any) -> None:
    tab = open_tab(one, 1600)
    tab.slide("budget", 1)
    tab.slide("layer", 2)
    tab.page.mouse.click(*tab.point(3, 11, GRID))
    tab.page.wait_for_url(re.compile(r"held=1"))
    first = tab.page.url
    assert "#tab=similarity&layer=3&cores=8&at=" in first
    before = tab.pixels()
    assert tab.page.locator("#link").get_attribute("href") == first[first.index("#") :]
    again = open_tab(one, 1600, state=first[first.index("#") :])
    np.testing.assert_array_equal(again.pixels(), before)
    assert "column 12, row 4, held" in again.text("#readout")
    assert again.text("#layer-value") == "3 of 4"
    assert again.text("#budget-value") == "8 of 16"
    tab.dot(5).click()
    tab.page.get_by_text("is read by").click()
    tab.page.wait_for_url(re.compile(r"kind=readBy"))
    again.page.evaluate("(hash) => { location.hash = hash; }", tab.page.url.split("#")[1])  # a link inside the same tab
    again.page.locator(
        "#core-name", has_text=re.compile("^Core 5$")
    ).wait_for()  # no script as text: the page forbids it
    np.testing.assert_array_equal(again.pixels(), tab.pixels())
    nonsense = open_tab(one, 375, state="#tab=elsewhere&layer=99&cores=7&at=2,x&core=400&kind=no&pane=8&model=3")
    assert nonsense.text("#legend-title") == "Similarity of one patch to all"
    assert nonsense.text("#layer-value") == "4 of 4"


def test_the_picture_can_be_saved(one: Path, open_tab: Any, photo: Photo, tmp_path: Path) -> None:
    tab = open_tab(one, 1600)
    tab.page.uncheck("#show-cores")
    tab.slide("blend", 100)
    tab.page.mouse.move(*tab.point(4, 4, GRID))
    shown = tab.pixels()
    with tab.page.expect_download() as download:
        tab.page.click("#save")
    assert download.value.suggested_filename == "shapes-similarity.png"
    download.value.save_as(tmp_path / "saved.png")
    saved = np.asarray(Image.open(tmp_path / "saved.png").convert("RGB"), dtype=float)
    plain, map_ = saved[28:188, 28:268], saved[28:188, 288:528]  # both 240×160, with a gap of 20
    assert np.abs(plain - np.asarray(photo.image, dtype=float)).mean() < 12  # it went through WebP
    cells = map_.reshape(10, 16, 15, 16, 3)[:, 8, :, 8]
    away = np.ones(GRID, bool)
    away[4, 4] = False  # the ring
    np.testing.assert_allclose(cells[away], shown[away], atol=2)
    assert saved[190:].std() > 5  # something is written below
    tab.page.uncheck("#show-photo")
    tab.page.click("[data-tab=colours]")
    with tab.page.expect_download() as download:
        tab.page.click("#save")
    assert download.value.suggested_filename == "shapes-colours.png"


def test_trails_are_offered_only_where_cores_move(
    one: Path, tmp_path: Path, open_tab: Any, photo: Photo, backbone: Backbone
) -> None:
    assert open_tab(one, 1600).visible("#trails-switch")
    still = Backbone("still", copy.deepcopy(backbone.model))
    with torch.no_grad():
        still.veca.bank.alpha.zero_()
    path = tmp_path / "still.html"
    path.write_text(build_page([photo], [still], size=160, budgets=(4, 16)), "utf-8")
    tab = open_tab(path, 1600)
    assert tab.visible("#cores-switch")
    assert not tab.visible("#trails-switch")
    assert tab.page.locator("polyline").count() == 0


def cells_in(tab: Any, parent: str) -> set[tuple[int, int, int]]:
    """Left, top and width of the drawn cells, in patches, from where they are on the screen."""
    tab.settle()
    box = tab.page.locator(parent).bounding_box()
    path = tab.page.locator(f"{parent} .cells path").last
    assert path.bounding_box() == pytest.approx(box, abs=6)  # they cover the photo, and half a line around it
    return {tuple(map(int, cell)) for cell in re.findall(r"M(\d+) (\d+)h(\d+)v\3h-\3z", path.get_attribute("d"))}


@pytest.mark.parametrize("width", WIDTHS)
def test_the_cells_of_half_the_patches_lie_over_the_photo(
    width: int, tmp_path: Path, open_tab: Any, photo: Photo, backbone: Backbone
) -> None:
    pixels = np.asarray(photo.image).copy()
    pixels[:, 120:] = 90  # nothing to see there
    path = tmp_path / "page.html"
    path.write_text(build_page([Photo("half", Image.fromarray(pixels))], [backbone], size=160, budgets=(4,)), "utf-8")
    tab = open_tab(path, width)
    assert not tab.visible(".stage .cells")
    before = tab.pixels()
    tab.page.check("#show-photo")
    tab.page.check("#show-cells")
    images, _ = photo_tensor(Photo("half", Image.fromarray(pixels)), backbone.model, 160, torch.device("cpu"))
    out = backbone.veca(images, cores=4, patches=0.5)
    expected = {tuple(place) for place in out.cells.places[0].tolist()}  # type: ignore[union-attr]
    assert {side for _, _, side in expected} >= {1, 4}
    for parent in (".stage", ".plain"):
        assert cells_in(tab, parent) == expected
    covered = sum(side**2 for _, _, side in expected)
    assert covered == GRID[0] * GRID[1]
    np.testing.assert_array_equal(tab.pixels(), before)
    tab.page.mouse.move(*tab.point(2, 3, GRID))  # they are not in the way
    assert "column 4, row 3" in tab.text("#readout")
    with tab.page.expect_download() as download:
        tab.page.click("#save")
    download.value.save_as(tmp_path / "with.png")
    tab.page.uncheck("#show-cells")
    assert not tab.visible(".stage .cells")
    with tab.page.expect_download() as download:
        tab.page.click("#save")
    download.value.save_as(tmp_path / "without.png")
    drawn, plain = (
        np.asarray(Image.open(tmp_path / f"{name}.png").convert("L"), float) for name in ("with", "without")
    )
    assert np.abs(drawn - plain)[28:188, 28:268].mean() > 5


def test_a_smaller_stride_makes_finer_maps_of_the_last_layer(
    tmp_path: Path, open_tab: Any, photo: Photo, backbone: Backbone
) -> None:
    path = tmp_path / "fine.html"
    path.write_text(build_page([photo], [backbone], size=160, budgets=(4, 16), stride=8), "utf-8")
    tab = open_tab(path, 1600)
    tab.page.mouse.move(*tab.point(9, 21, (20, 30)))
    found = backbone.veca.scan(np.asarray(photo.image), cores=16).look(stride=8).features
    rows = torch.nn.functional.normalize(found, dim=-1)
    shown = levels(tab.pixels())
    assert shown.shape == (20, 30)
    assert shown[9, 21] == 1
    same(shown, (rows @ rows[9, 21]).numpy(), low(tab), 1)
    assert "column 22, row 10" in tab.text("#readout")
    assert "30 × 20 patches" in tab.text("figcaption >> nth=1")
    tab.page.locator(".stage").focus()
    tab.page.keyboard.press("ArrowRight")
    assert "column 23, row 10" in tab.text("#readout")
    tab.page.click("[data-tab=colours]")
    assert tab.pixels().shape == (20, 30, 3)
    tab.page.click("[data-tab=contributions]")  # what cores read are the model's own patches
    assert tab.pixels().shape == (10, 15, 3)
    tab.page.click("[data-tab=similarity]")
    tab.slide("layer", 2)
    assert tab.pixels().shape == (10, 15, 3)
    assert "column 12, row 5" in tab.text("#readout")


def test_likeness_is_said_in_words(two_photos: Path, open_tab: Any, photo: Photo, backbone: Backbone) -> None:
    tab = open_tab(two_photos, 1600)
    tab.page.mouse.move(*tab.point(3, 11, GRID))
    values, begin = cosines(backbone, photo, 3, 11), low(tab)
    share = ((values - begin) / (1 - begin) >= 0.5).mean()
    said = re.search(r": ([\d.]+) % of the photo is much like it", tab.text("#readout"))
    assert said is not None
    assert float(said[1]) == pytest.approx(100 * share, abs=3)
    caption = tab.page.locator("figure.map figcaption").nth(1).inner_text()
    words = r"closest patch: (hardly alike|somewhat alike|much alike|nearly the same) \(−?0\.\d\d of 1\)"
    assert re.search(words, caption), caption


def test_a_teacher_alone_has_no_sliders_and_no_cores(tmp_path: Path, open_tab: Any, photo: Photo, shared: Path) -> None:
    path = tmp_path / "teacher.html"
    path.write_text(build_page([photo], [load_teacher(shared / "teacher" / "dav2-small-encoder")], size=140), "utf-8")
    tab = open_tab(path, 375)
    for control in ("#budget", "#layer", "#show-cores", "#show-trails", "#models"):
        assert not tab.visible(control)
    tab.page.click("[data-tab=global]")
    assert "class token" in tab.text("#legend-words")
    assert len(np.unique(tab.pixels().reshape(-1, 3), axis=0)) > 20
