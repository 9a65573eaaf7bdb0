"""The upload page and the description in a real headless browser, which may talk to the service and to nobody else."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, expect

from veca import Veca
from veca.serve.settings import ServeSettings

from .process import InThread, Server, picture
from .test_bounds import bomb

SECONDS = 60_000  # of patience, in milliseconds

# A drop as a person makes it: the file lies in the event's data transfer.
DROP = """([name, type, base64]) => {
    const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
    const dataTransfer = new DataTransfer();
    dataTransfer.items.add(new File([bytes], name, { type }));
    for (const kind of ["dragenter", "dragover", "drop"]) {
        document.getElementById("drop").dispatchEvent(
            new DragEvent(kind, { dataTransfer, bubbles: true, cancelable: true }));
    }
}"""


@pytest.fixture(scope="module")
def service(start: Callable[..., Server]) -> Server:
    bounds = ("--size", "64", "--threads", "1", "--max-bytes", "400kB", "--max-pixels", "1000000")
    return start(*bounds, token="open-sesame")


@pytest.fixture(scope="module")
def browser(chromium: Browser) -> Browser:
    return chromium


class Watched:
    """A tab, what its console complained of, and every address it asked for."""

    def __init__(self, context: BrowserContext) -> None:
        self.page: Page = context.new_page()
        self.page.set_default_timeout(SECONDS)
        self.errors: list[str] = []
        self.addresses: list[str] = []
        self.page.on("console", self.listen)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.addresses.append(request.url))

    def listen(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def foreign(self, service: Server) -> list[str]:
        own = (service.url, f"blob:{service.url}", "data:")
        return [address for address in self.addresses if not address.startswith(own)]

    def drop(self, body: bytes, name: str = "photo.png", kind: str = "image/png") -> None:
        self.page.evaluate(DROP, [name, kind, base64.b64encode(body).decode()])

    def status(self, words: str) -> None:
        expect(self.page.locator("#status")).to_have_text(words, timeout=SECONDS)


@pytest.fixture(params=[375, 1600])
def tab(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Watched]:
    context = browser.new_context(viewport={"width": request.param, "height": 800})
    yield Watched(context)
    context.close()


def test_a_dropped_photo_ends_in_the_explorer(service: Server, tab: Watched) -> None:
    tab.page.goto(service.url)
    width = tab.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width[0] <= width[1]  # nothing sticks out sideways
    tab.page.get_by_label("Token of this service").fill("open-sesame")
    tab.drop(picture(1))
    tab.page.wait_for_url("blob:**")
    expect(tab.page).to_have_title("photo · inside VECA", timeout=SECONDS)
    expect(tab.page.locator("canvas").first).to_be_visible(timeout=SECONDS)
    assert tab.page.evaluate("document.querySelector('canvas').getBoundingClientRect().width") > 100
    assert tab.errors == []
    assert tab.foreign(service) == []
    tab.page.go_back()  # and back, for another photo
    expect(tab.page.get_by_text("Drop a photo here")).to_be_visible(timeout=SECONDS)


def test_errors_are_shown_in_words(service: Server, browser: Browser) -> None:
    context = browser.new_context()
    tab = Watched(context)
    tab.page.goto(service.url)
    expect(tab.page.locator("#limits")).to_have_text("up to 0.4 MB and 1 megapixels")
    tab.drop(picture(2))
    tab.status("The token is missing or wrong.")
    tab.page.get_by_label("Token of this service").fill("open-sesame")
    tab.drop(b"just a text", "notes.txt", "text/plain")
    tab.status("This is not an image that can be read here.")
    tab.drop(picture(2)[:-300])
    tab.status("This image is damaged or cut off.")
    tab.drop(bomb(2000))
    tab.status("This photo has too many pixels.")
    tab.drop(bytes(500_000))
    tab.status("This file has 0.5 MB; the limit is 0.4 MB.")
    assert tab.foreign(service) == []
    # Chromium itself notes every answer over 400 in the console; the page adds nothing to that.
    assert all("Failed to load resource" in error for error in tab.errors)
    context.close()


def test_what_took_too_long_can_be_tried_with_less(library: Veca, tab: Watched) -> None:
    service = InThread(library, ServeSettings(size=64, threads=1, timeout=2.0, max_size=512))
    try:
        tab.page.goto(service.url)
        sizes = tab.page.locator("#size option").all_inner_texts()
        assert sizes == ["112 pixels", "224 pixels", "336 pixels", "448 pixels, the usual"]
        budgets = tab.page.locator("#cores option").all_inner_texts()
        assert budgets == ["every budget, with a slider", "only 8", "only 16", "only 32", "only 64"]
        service.service.explorer.submit(service.let_go.wait)  # somebody else's page is being built
        tab.drop(picture(1))
        tab.status("This took too long with 448 pixels and every budget. Less of either takes less time.")
        again = tab.page.get_by_role("button", name="Try again with 448 pixels and 64 cores")
        expect(again).to_be_visible()
        again.click()
        tab.status("This took too long with 448 pixels and 64 cores. Less of either takes less time.")
        service.service.settings.__dict__["timeout"] = 60.0
        service.let_go.set()
        tab.page.get_by_role("button", name="Try again with 336 pixels and 64 cores").click()
        tab.page.wait_for_url("blob:**")
        expect(tab.page.locator(".map figcaption")).to_contain_text("28 × 21 patches", timeout=SECONDS)
        expect(tab.page.locator("#budget")).to_be_hidden()
        asked = [address.split("?")[1] for address in tab.addresses if "/v1/explore" in address]
        assert asked == ["size=448", "size=448&cores=64", "size=336&cores=64"]
        assert all("Failed to load resource" in error for error in tab.errors)  # Chromium's own note of each 504
    finally:
        service.let_go.set()
        service.stop()


def test_the_size_and_the_budget_can_be_chosen(server: Server, browser: Browser) -> None:
    context = browser.new_context()
    tab = Watched(context)
    tab.page.goto(server.url)
    tab.page.get_by_label("Size of the picture the model sees").select_option("112")
    tab.page.get_by_label("Cores").select_option("16")
    tab.drop(picture(5))
    tab.page.wait_for_url("blob:**")
    expect(tab.page.locator(".map figcaption")).to_contain_text("9 × 7 patches", timeout=SECONDS)
    assert [address.split("?")[1] for address in tab.addresses if "/v1/explore" in address] == ["size=112&cores=16"]
    assert tab.errors == []
    context.close()


def test_a_chosen_file_and_the_keyboard(service: Server, browser: Browser, tmp_path: Path) -> None:
    context = browser.new_context()
    tab = Watched(context)
    tab.page.goto(service.url)
    (tmp_path / "photo.jpg").write_bytes(picture(3, kind="JPEG"))
    tab.page.get_by_label("Token of this service").fill("open-sesame")
    tab.page.locator("body").press("Shift+Tab")
    with tab.page.expect_file_chooser() as chooser:
        tab.page.locator("#file").focus()
        tab.page.keyboard.press("Enter")
    chooser.value.set_files(tmp_path / "photo.jpg")
    tab.page.wait_for_url("blob:**")
    expect(tab.page.locator("canvas").first).to_be_visible(timeout=SECONDS)
    assert tab.errors == []
    context.close()


def test_a_service_that_does_not_answer_is_said(server: Server, browser: Browser) -> None:
    context = browser.new_context()
    tab = Watched(context)
    tab.page.goto(server.url)
    expect(tab.page.get_by_label("Token of this service")).to_be_hidden()  # this one asks for none
    context.set_offline(True)
    tab.drop(picture(4))
    tab.status("The service did not answer. Is it still running?")
    context.close()


def test_the_description_works_offline(service: Server, tab: Watched) -> None:
    tab.page.goto(f"{service.url}/docs")
    expect(tab.page.get_by_role("heading", name="POST /v1/features")).to_be_visible(timeout=SECONDS)
    text = tab.page.inner_text("body")
    for words in (
        "integer, 16 to 1024",
        "integer, 1 to 64",
        "curl",
        "$VECA_TOKEN",
        "The upload took too long.",
        "/readyz",
    ):
        assert words in text
    width = tab.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width[0] <= width[1]
    assert tab.errors == []
    assert tab.foreign(service) == []
