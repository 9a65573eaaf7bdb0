"""Make the picture of docs/view.md in a real Chromium, and time the first answers: `python tools/view_picture.py`.

The image is the wall of photographs of tools/scan_picture.py, in a window of 1600×900. Printed is, at four zooms: how
long the viewer looked at the screen (its Server-Timing), how long the page waited for that after the image had come to
rest, and how long a click then took until the map was drawn. A click that comes before the screen waits for both.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from PIL import Image
from playwright.sync_api import Page, sync_playwright
from scan_picture import wall

from veca.caches import cache_folder

OUT = Path(__file__).parents[1] / "docs/images/view.webp"
STILL = """() => { const now = JSON.stringify(visible()), old = window.still; window.still = now;
    return now === old && seen && JSON.stringify(seen.screen) === now && !image.doing; }"""
GO = """(zoom) => { const { viewport } = viewer, middle = viewport.imageToViewportCoordinates(190, 790);
    viewport.zoomTo(viewport.getHomeZoom() * zoom, null, true); viewport.panTo(middle, true); }"""
AT = """([x, y]) => { const frame = document.getElementById("stage").getBoundingClientRect(),
    at = viewer.viewport.imageToViewerElementCoordinates(new OpenSeadragon.Point(x, y));
    return [frame.left + at.x, frame.top + at.y]; }"""


def settled(page: Page) -> None:
    page.wait_for_function(STILL, polling=100, timeout=600_000)


def times(page: Page, zoom: float) -> str:
    """Of one screen that was not looked at before, and of a click on it."""
    page.evaluate("window.still = null; seen = null; clearTimeout(timer)")
    with page.expect_response(lambda answer: "/look?" in answer.url, timeout=120_000) as answer:
        page.evaluate(GO, zoom)
        page.evaluate("lookSoon()")  # also where the zoom is the same
    settled(page)
    page.mouse.click(
        *page.evaluate(AT, page.evaluate("[visible()[0] + visible()[2] / 2, visible()[1] + visible()[3] / 2]"))
    )
    page.wait_for_selector("#ring:visible")
    looked = float(answer.value.headers["server-timing"].partition("dur=")[2])
    waited, patches, factor, click = page.evaluate(
        "[seen.milliseconds, seen.inside.length, seen.factor, Number(document.documentElement.dataset.answered)]"
    )
    page.keyboard.press("Escape")
    return f"{zoom:4g} {f'1:{factor}':>6} {patches:8,} {looked:8.0f} {waited:10.0f} {click:9.1f}"


def main() -> None:
    file = cache_folder("view") / "wall.png"
    if not file.exists():  # the same file every time: its scans are kept
        file.parent.mkdir(parents=True, exist_ok=True)
        wall().save(file)
    command = [sys.executable, "-m", "veca.cli", "view", str(file), "--no-open"]
    began = time.monotonic()
    viewer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert viewer.stdout is not None
        address = viewer.stdout.readline().rsplit(" at ", 1)[1].strip()
        with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1600, "height": 900}, color_scheme="dark")
            page.goto(address)
            settled(page)
            print(f"every scan ready {time.monotonic() - began:.1f} s after the start")
            print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; times in ms")
            print("zoom  level  patches     look     waited     click")
            for zoom in (1, 2, 4, 8):
                print(times(page, zoom), flush=True)
            page.evaluate("viewer.viewport.goHome(true)")
            settled(page)
            page.mouse.click(*page.evaluate(AT, [250, 850]))
            page.locator("#cores").check()
            page.mouse.move(1, 1)
            page.wait_for_timeout(500)
            page.screenshot(path=Path(folder) / "view.png")
            Image.open(Path(folder) / "view.png").convert("RGB").save(OUT, quality=80, method=6)
            print(f"{OUT}: {OUT.stat().st_size / 1000:.0f} kB")
            browser.close()
    finally:
        viewer.terminate()
        viewer.wait(timeout=60)


if __name__ == "__main__":
    main()
