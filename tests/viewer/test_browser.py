"""The page in a real Chromium, at the width of a phone and of a large screen, which may talk to its viewer only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import matplotlib
import numpy as np
import pytest

from veca import Veca

from .conftest import SIDE, SQUARES, View, halves

VIRIDIS = (matplotlib.colormaps["viridis"](np.arange(256))[:, :3] * 255).round()
WIDTHS = [375, 1600]
PATIENCE = 60_000  # milliseconds
SIZE = (1604, 1206)


class Tab:
    """A page that remembers every complaint and every request."""

    def __init__(self, browser: Any, view: View, width: int, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE)
        self.view = view
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(view.url)
        self.looked(0)

    def looks(self) -> int:
        return int(self.page.evaluate("document.documentElement.dataset.looks ?? 0"))

    def looked(self, before: int) -> None:
        """Once the page has shown what is on the screen now."""
        self.page.wait_for_function(f"() => (document.documentElement.dataset.looks ?? 0) > {before}")
        still = """() => { const now = JSON.stringify(visible()); const old = window.still; window.still = now;
            return now === old && seen && JSON.stringify(seen.screen) === now; }"""
        self.page.wait_for_function(still, polling=200)

    def seen(self) -> dict[str, Any]:
        return dict(self.page.evaluate("({...seen, rows: 0, coreRows: 0, query: 0, colours: 0, inside: 0, asked: 0})"))

    def screen(self, x: float, y: float) -> tuple[float, float]:
        """Where a pixel of the image is in the window."""
        self.page.locator("#view").scroll_into_view_if_needed()
        return tuple(
            self.page.evaluate(
                """([x, y]) => { const frame = document.getElementById("stage").getBoundingClientRect();
                const at = viewer.viewport.imageToViewerElementCoordinates(new OpenSeadragon.Point(x, y));
                return [frame.left + at.x, frame.top + at.y]; }""",
                [x, y],
            )
        )

    def map(self) -> np.ndarray:
        """The colours of the map, h×w×4."""
        high, wide, flat = self.page.evaluate(
            """() => { const c = document.getElementById("map"); const all = c.getContext("2d")
            .getImageData(0, 0, c.width, c.height).data; return [c.height, c.width, Array.from(all)]; }"""
        )
        return np.array(flat, np.uint8).reshape(high, wide, 4)

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).inner_text())

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        mouse = self.page.mouse
        mouse.move(*start)
        mouse.down()
        for share in (0.3, 0.6, 1.0):
            mouse.move(*(a + share * (b - a) for a, b in zip(start, end, strict=True)))
        mouse.up()


@pytest.fixture
def open_tab(chromium: Any, view: View) -> Iterator[Any]:
    tabs: list[Tab] = []

    def opened(width: int, **options: Any) -> Tab:
        tabs.append(Tab(chromium, view, width, **options))
        return tabs[-1]

    yield opened
    for tab in tabs:
        tab.context.close()
        assert tab.complaints == []
        foreign = [url for url in tab.requests if not url.startswith((view.url, f"blob:{view.url[:20]}", "data:"))]
        assert foreign == []


def levels(pixels: np.ndarray) -> np.ndarray:
    """The place of each colour in viridis, 0…1; every pixel must be one of its colours."""
    distance = np.abs(pixels[..., None, :3].astype(float) - VIRIDIS).max(-1)
    assert distance.min(-1).max() <= 1
    return distance.argmin(-1) / 255


def expected(library: Veca, pixels: np.ndarray, seen: dict[str, Any], x: float, y: float) -> np.ndarray:
    """Cosines of the patch at a place to all of a screen, by the library."""
    factor, (left, top, wide, high) = seen["factor"], seen["box"]
    scan = library.scan(halves(pixels, seen["level"]))
    box = left // factor, top // factor, wide // factor, high // factor
    rows = scan.look(box=box, stride=seen["stride"]).features
    rows = rows / rows.norm(dim=-1, keepdim=True)
    query = scan.look(points=[(x / factor, y / factor)]).features[0]
    return (rows @ (query / query.norm())).numpy()


def check_map(tab: Tab, library: Veca, pixels: np.ndarray, x: float, y: float) -> np.ndarray:
    seen = tab.seen()
    values = expected(library, pixels, seen, x, y)
    shown = levels(tab.map())
    assert shown.shape == values.shape == tuple(seen["grid"])
    np.testing.assert_allclose(shown, np.clip((values - seen["low"]) / (1 - seen["low"]), 0, 1), atol=0.03)
    return shown


@pytest.mark.parametrize("width", WIDTHS)
def test_a_click_shows_what_resembles_it_at_every_zoom(
    width: int, open_tab: Any, library: Veca, pixels: np.ndarray
) -> None:
    tab = open_tab(width)
    assert "squares.png" in tab.text("header")
    assert "Click or tap a place" in tab.text("#words")
    x, y = SQUARES[0][0] + SIDE / 2, SQUARES[0][1] + SIDE / 2
    tab.page.mouse.click(*tab.screen(x, y))
    tab.page.wait_for_selector("#ring:visible")
    coarse = tab.seen()
    side = coarse["stride"] * coarse["factor"]
    asked = tab.page.evaluate("state.at")  # the middle of the cell
    assert asked == pytest.approx([x, y], abs=side / 2 + 1)
    shown = check_map(tab, library, pixels, *asked)
    for left, top in SQUARES:  # all squares light up, the noise around them does not
        row, column = int((top + SIDE / 2) // side), int((left + SIDE / 2) // side)
        assert shown[row, column] > shown.mean() + 0.2
    before = tab.looks()
    tab.page.mouse.move(*tab.screen(x, y))
    for _ in range(9):
        tab.page.mouse.wheel(0, -100)
        tab.page.wait_for_timeout(80)  # OpenSeadragon takes wheels one by one
    tab.looked(before)
    fine = tab.seen()
    assert fine["level"] < coarse["level"]
    asked = tab.page.evaluate("state.at")
    check_map(tab, library, pixels, *asked)
    assert f"{16 * fine['factor']}" in tab.text("#patch-words")
    ring = tab.page.locator("#ring").bounding_box()
    place = tab.screen(*asked)
    assert ring["x"] + ring["width"] / 2 == pytest.approx(place[0], abs=2)
    assert ring["y"] + ring["height"] / 2 == pytest.approx(place[1], abs=2)


def test_a_click_while_the_screen_is_looked_at_is_kept(open_tab: Any) -> None:
    tab = open_tab(1600)
    held: list[Any] = []
    tab.page.route("**/look?*", lambda route: held.append(route))
    tab.page.locator("#nearer").click()
    tab.page.wait_for_timeout(200)
    for _ in range(PATIENCE // 100):
        if held:
            break
        tab.page.wait_for_timeout(100)
    tab.page.mouse.click(*tab.screen(800, 600))  # answered by the patches of the screen before
    first = tab.page.evaluate("state.at")
    before = tab.looks()
    held[0].continue_()
    tab.page.wait_for_function(f"() => document.documentElement.dataset.looks > {before}")
    assert tab.page.locator("#map").is_visible()
    assert tab.page.locator("#ring").is_visible()
    assert tab.page.evaluate("state.at") == first
    assert levels(tab.map()).max() > 0.97  # the place itself


def test_tiles_show_the_image(open_tab: Any) -> None:
    tab = open_tab(1600)
    tab.page.wait_for_function("viewer.world.getItemAt(0).getFullyLoaded()")
    places = [*SQUARES, (40, 900)]
    colours = tab.page.evaluate(
        """(places) => { const canvas = viewer.drawer.canvas, frame = canvas.getBoundingClientRect();
        const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        const scale = canvas.width / frame.width, at = (value) => Math.round(value * scale);
        return places.map(([x, y]) => Array.from(data.slice(4 * (at(y - frame.top) * canvas.width + at(x - frame.left)))
            .slice(0, 3))); }""",
        [tab.screen(x + SIDE / 2, y + SIDE / 2) for x, y in places],
    )
    for place, (red, _, blue) in zip(places, colours, strict=True):
        assert (blue > red + 80) == (place in SQUARES)


def test_the_map_stays_on_the_image(open_tab: Any) -> None:
    tab = open_tab(1600)
    tab.page.locator("text=Colours").first.click()
    before = tab.looks()
    tab.drag(tab.screen(800, 600), tab.screen(560, 500))
    tab.looked(before)
    seen, box = tab.seen(), tab.page.locator("#map").bounding_box()
    corner = tab.screen(seen["box"][0], seen["box"][1])
    assert (box["x"], box["y"]) == pytest.approx(corner, abs=1.5)
    end = tab.screen(seen["box"][0] + seen["grid"][1] * seen["side"], seen["box"][1])
    assert box["x"] + box["width"] == pytest.approx(end[0], abs=1.5)
    assert tab.page.evaluate("state.at") is None  # a drag is no click


@pytest.mark.parametrize("width", WIDTHS)
def test_a_box_gives_features_and_its_like(
    width: int, open_tab: Any, library: Veca, pixels: np.ndarray, tmp_path: Any
) -> None:
    tab = open_tab(width)
    x, y = SQUARES[2]  # where the buttons are not in the way on a phone
    tab.page.locator("#draw").click()
    tab.drag(tab.screen(x, y), tab.screen(x + SIDE, y + SIDE))
    assert tab.page.locator("#draw").get_attribute("aria-pressed") == "false"
    box = tab.page.evaluate("state.box")
    assert box == pytest.approx([x, y, SIDE, SIDE], abs=8)
    seen = tab.seen()
    with tab.page.expect_download() as download:
        tab.page.locator("#download").click()
    download.value.save_as(tmp_path / "box.npy")
    factor = seen["factor"]
    scan = library.scan(halves(pixels, seen["level"]))
    inner = box[0] // factor, box[1] // factor, -(-(box[0] + box[2]) // factor), -(-(box[1] + box[3]) // factor)
    found = scan.look(box=(inner[0], inner[1], inner[2] - inner[0], inner[3] - inner[1])).features
    np.testing.assert_allclose(np.load(tmp_path / "box.npy"), found.numpy(), atol=2e-5)
    tab.page.locator("#find").click()
    tab.page.wait_for_selector("#found li:nth-child(3)")
    first = tab.page.evaluate("state.places.slice(0, 2).map((place) => place.box)")
    for (left, top), place in zip(sorted(SQUARES[:2]), sorted(first), strict=True):
        across = min(left + SIDE, place[0] + place[2]) - max(left, place[0])
        down = min(top + SIDE, place[1] + place[3]) - max(top, place[1])
        assert min(across, down) > SIDE / 2
    before = tab.looks()
    tab.page.locator("#found button").first.click()
    tab.looked(before)
    left, top, wide, high = tab.page.evaluate("visible()")
    assert left <= first[0][0]
    assert left + wide >= first[0][0] + first[0][2]
    assert top <= first[0][1]
    assert top + high >= first[0][1] + first[0][3]
    tab.page.locator("#drop").click()
    assert tab.page.locator(".place").count() == 0
    assert not tab.page.locator("#box").is_visible()


def test_shift_draws_a_box_and_only_that(open_tab: Any) -> None:
    tab = open_tab(1600)
    before = tab.page.evaluate("visible()")
    tab.page.keyboard.down("Shift")
    tab.drag(tab.screen(300, 300), tab.screen(700, 500))
    tab.page.keyboard.up("Shift")
    assert tab.page.evaluate("state.box") == pytest.approx([300, 300, 400, 200], abs=6)
    assert tab.page.evaluate("visible()") == before
    assert tab.page.evaluate("state.at") is None


def test_cores_are_dots_that_can_be_asked(open_tab: Any, library: Veca, pixels: np.ndarray) -> None:
    tab = open_tab(1600)
    tab.page.locator("#cores").check()
    assert tab.page.locator(".dot").count() == 16
    seen = tab.seen()
    scan = library.scan(halves(pixels, seen["level"]))
    dot = tab.page.locator(".dot").nth(3)
    box = dot.bounding_box()
    x, y = ((scan.coords[3] + 1) / 2).tolist()
    width, height = (side // seen["factor"] // 16 * 16 * seen["factor"] for side in SIZE)
    assert (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2) == pytest.approx(
        tab.screen(x * width, y * height), abs=2
    )
    dot.click()
    assert "core 3" in tab.text("#words")
    left, top, wide, high = (value // seen["factor"] for value in seen["box"])
    rows = scan.look(box=(left, top, wide, high), stride=seen["stride"]).features
    values = (rows / rows.norm(dim=-1, keepdim=True)) @ (scan.cores[3] / scan.cores[3].norm())
    shown = levels(tab.map())
    assert np.corrcoef(shown.flatten(), values.flatten().numpy())[0, 1] > 0.98


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_tab_fits_and_says_what_it_shows(width: int, scheme: str, open_tab: Any) -> None:
    tab = open_tab(width, color_scheme=scheme)
    assert tab.page.locator("html").get_attribute("data-theme") == scheme
    x, y = SQUARES[0][0] + SIDE / 2, SQUARES[0][1] + SIDE / 2
    tab.page.mouse.click(*tab.screen(x, y))
    seen = set()
    for name in ("Similar", "Colours", "Global"):
        tab.page.locator(f"#tabs >> text={name}").click()
        seen.add((tab.text("#title"), tab.text("#words"), tab.map().tobytes()))
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
    assert len(seen) == 3
    ink, paper = tab.page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    brightness = [sum(map(int, colour[4:-1].split(","))) / 765 for colour in (ink, paper)]
    assert abs(brightness[0] - brightness[1]) > 0.7
    tab.page.click("#theme")
    assert tab.page.locator("html").get_attribute("data-theme") != scheme


def test_the_keyboard_is_enough(open_tab: Any, library: Veca, pixels: np.ndarray) -> None:
    tab = open_tab(1600)
    press = tab.page.keyboard.press
    for _ in range(4):
        press("Tab")
        if tab.page.evaluate("document.activeElement === viewer.canvas"):
            break
    else:
        raise AssertionError("Tab does not reach the image")
    assert tab.page.locator("#cross").is_visible()
    start, before = tab.page.evaluate("visible()"), tab.looks()
    press("+")
    press("+")
    tab.looked(before)
    near = tab.page.evaluate("visible()")
    assert near[2] < 0.6 * start[2]
    before = tab.looks()
    press("ArrowRight")
    press("ArrowUp")
    tab.looked(before)
    moved = tab.page.evaluate("visible()")
    assert moved[0] > near[0]
    assert moved[1] < near[1]
    press("Enter")
    middle = moved[0] + moved[2] / 2, moved[1] + moved[3] / 2
    asked, seen = tab.page.evaluate("state.at"), tab.seen()
    assert asked == pytest.approx(middle, abs=seen["side"])
    check_map(tab, library, pixels, *asked)
    press("2")
    assert tab.text("#title") == "Features as colours"
    tab.page.evaluate("setDrawing(true)")
    press("b")
    assert tab.page.locator("#box").is_visible()
    assert tab.page.locator("#draw").get_attribute("aria-pressed") == "false"
    press("c")
    assert tab.page.locator(".dot").count() == 16
    press("Escape")
    assert tab.page.evaluate("[state.at, state.box]") == [None, None]
    before = tab.looks()
    press("0")
    tab.looked(before)
    assert tab.page.evaluate("visible()") == start


def test_a_tap_asks_and_a_finger_draws(open_tab: Any, library: Veca, pixels: np.ndarray) -> None:
    tab = open_tab(375, has_touch=True, is_mobile=True)
    tools = tab.page.locator("#tools").bounding_box()
    assert tools["width"] > 3 * tools["height"]  # a column of them hid a third of a wide image
    x, y = SQUARES[1][0] + SIDE / 2, SQUARES[1][1] + SIDE / 2
    tab.page.touchscreen.tap(*tab.screen(x, y))
    tab.page.wait_for_selector("#ring:visible")
    asked = tab.page.evaluate("state.at")
    assert asked == pytest.approx([x, y], abs=tab.seen()["side"] / 2 + 5)
    check_map(tab, library, pixels, *asked)
    tab.page.locator("#draw").tap()
    session = tab.context.new_cdp_session(tab.page)
    start, end = tab.screen(500, 200), tab.screen(1200, 700)

    def touch(kind: str, *points: tuple[float, float]) -> None:
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [{"x": a, "y": b} for a, b in points]})

    touch("touchStart", start)
    for share in (0.25, 0.5, 0.75, 1):
        touch("touchMove", tuple(a + share * (b - a) for a, b in zip(start, end, strict=True)))
    touch("touchEnd")
    tab.page.wait_for_selector("#drawn:visible")
    assert tab.page.evaluate("state.box") == pytest.approx([500, 200, 700, 500], abs=20)
    before, wide = tab.looks(), tab.page.evaluate("visible()[2]")
    touch("touchStart", (150, 250), (220, 300))
    for step in range(1, 6):
        touch("touchMove", (150 - 12 * step, 250 - 9 * step), (220 + 12 * step, 300 + 9 * step))
    touch("touchEnd")
    tab.looked(before)
    assert tab.page.evaluate("visible()[2]") < 0.8 * wide  # two fingers apart: nearer
