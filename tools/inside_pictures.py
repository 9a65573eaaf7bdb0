"""Draw every picture of docs/inside.md again, from photographs that come with scikit-image.

    python tools/inside_pictures.py --model veca-s14
    python tools/inside_pictures.py --model models/my-model --teacher ../shared/teacher/dav2-small-encoder

Each is a `veca explore` command, printed as it runs; the PNG becomes a WebP small enough for the repository. The
screenshots of the page need playwright and a chromium. `--only NAME` draws one.
"""

from __future__ import annotations

import shlex
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import skimage.data
import tyro
from PIL import Image

from veca.cli import main as veca

PHOTOS = Path(skimage.data.__file__).parent
IMAGES = Path(__file__).parents[1] / "docs/images"
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
WIDEST, LARGEST = 1600, 300_000  # pixels, bytes


@dataclass
class Settings:
    """Draw the pictures of docs/inside.md."""

    model: str = "veca-s14"
    """whose pictures to draw"""
    teacher: str | None = None
    """a transformers folder to stand beside it in `features` and on the page of two models"""
    only: str | None = None
    """one picture, such as layers or page"""
    images: Path = IMAGES
    """where the pictures go"""


def figures(settings: Settings) -> Iterator[tuple[str, list[str]]]:
    """Name and arguments of each figure's command."""
    cat, astronaut, coffee = (str(PHOTOS / f"{name}.png") for name in ("chelsea", "astronaut", "coffee"))
    own = ["--model", settings.model]
    both = [*own, "--model", settings.teacher] if settings.teacher else own
    yield "features", [astronaut, coffee, "--figure", "features", "--sizes", "252", "504", "1008", *both]
    yield "similarity", [cat, "--figure", "similarity", "--at", "150,112", "--at", "260,235", "--at", "20,150", *own]
    yield "cores", [cat, astronaut, "--figure", "cores", *own]
    yield "layers", [astronaut, "--figure", "layers", "--size", "336", *own]
    yield "positions", [coffee, "--figure", "positions", *own]
    yield "budgets", [coffee, astronaut, "--figure", "budgets", *own]


def main() -> None:
    settings = tyro.cli(Settings)
    with tempfile.TemporaryDirectory() as folder:
        for name, arguments in figures(settings):
            if settings.only in (None, name):
                run([*arguments, "--out", folder])
                shrink(Path(folder) / f"{name}.png", settings.images / f"inside-{name}.webp")
        if settings.only in (None, "page"):
            take_screenshots(settings, Path(folder))


def run(arguments: list[str]) -> None:
    print("veca explore", shlex.join(arguments), flush=True)
    if veca(["explore", *arguments]):
        raise SystemExit(1)


def shrink(source: Path, target: Path) -> None:
    """As WebP, as fine as the limit on its size allows."""
    with Image.open(source) as opened:
        image = opened.convert("RGB")
    if image.width > WIDEST:
        image = image.resize((WIDEST, round(image.height * WIDEST / image.width)), Image.Resampling.LANCZOS)
    target.parent.mkdir(parents=True, exist_ok=True)
    for quality in range(88, 20, -8):
        image.save(target, quality=quality, method=6)
        if target.stat().st_size < LARGEST:
            break
    print(f"  {target}: {image.width}×{image.height}, {target.stat().st_size // 1000} KB")


def take_screenshots(settings: Settings, folder: Path) -> None:
    """The page, following a core, and with two panes."""
    from playwright.sync_api import sync_playwright

    cat, astronaut = str(PHOTOS / "chelsea.png"), str(PHOTOS / "astronaut.png")
    options = ["--no-open", "--out", str(folder)]
    run([cat, "--model", settings.model, *options])
    if settings.teacher:
        two = [astronaut, "--model", settings.model, "--model", settings.teacher]
    else:
        two = [cat, astronaut, "--model", settings.model]
    run([*two, *options])
    second = "astronaut" if settings.teacher else "chelsea-astronaut"
    with sync_playwright() as playwright:
        path = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        shots = (  # narrow, so that their words are read in a column of the docs
            ("page", "chelsea", 900, 840, "light", "similarity", 0.375, 0.42),
            ("page-core", "chelsea", 900, 860, "dark", "core", 0.6, 0.6),
            ("page-two", second, 900, 620, "light", "similarity", 0.46, 0.28),
        )
        for name, page, width, height, scheme, tab, x, y in shots:
            view = browser.new_page(
                viewport={"width": width, "height": height}, color_scheme=scheme, device_scale_factor=1.78
            )
            view.goto((folder / f"{page}.html").as_uri())
            view.wait_for_selector("html[data-ready=yes]")
            view.click(f"[data-tab={'contributions' if tab == 'core' else tab}]")
            if name == "page-two" and settings.teacher:  # on so narrow a page one of two models is shown
                view.get_by_text("both", exact=True).click()
            if tab == "core":
                view.locator('.core[data-core="5"]').click()
            box = view.locator(".stage").first.bounding_box()
            view.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])
            view.wait_for_timeout(800)
            view.screenshot(path=folder / f"{name}.png")
            shrink(folder / f"{name}.png", settings.images / f"inside-{name}.webp")
            view.close()
        browser.close()


if __name__ == "__main__":
    main()
