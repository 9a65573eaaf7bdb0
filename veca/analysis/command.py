"""`veca explore`: the paper's figures, numbers about the cores, or an interactive page."""

from __future__ import annotations

import os
import re
import sys
import time
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from veca.analysis.drawing import Picture
from veca.analysis.photos import Photo, open_photo
from veca.backbones import Backbone, load_backbone
from veca.cli import parse
from veca.devices import pick_device
from veca.errors import InputError
from veca.files import refuse_file, whole_file, write_json, write_text
from veca.images import SIZE

Figure = Literal["features", "similarity", "cores", "layers", "positions", "budgets"]


@dataclass
class Explore:
    """Look inside a model: an interactive page by default, a figure with --figure, numbers with --metrics.

    Without --figure one self-contained HTML file is written and opened. With --figure NAME, DIR gets NAME.png and
    NAME.npz with the arrays behind it. docs/inside.md explains each.

    Examples:
      veca explore photo.jpg
      veca explore cat.jpg dog.jpg                           # find the same part in the other photo
      veca explore photo.jpg --model models/a --model models/b
      veca explore photo.jpg --stride 7                      # maps twice as fine
      veca explore photo.jpg --figure features --sizes 256 512 1024 --method umap
      veca explore photo.jpg --figure similarity --at 120,80 --at 300,210
      veca explore photo.jpg --figure cores --core 0 --core 5
      veca explore photo.jpg --figure layers --budgets 8 16 32 64
      veca explore --metrics ../shared/data/voc-seg --model models/a --model models/dense-control
    """

    photos: tyro.conf.Positional[tuple[Path, ...]] = ()
    """one or more photos"""
    figure: Figure | None = None
    """which figure to draw; without it the interactive page is written"""
    metrics: Annotated[Path | None, tyro.conf.arg(metavar="DATA")] = None
    """a folder of photos, or of images/ and masks/: write metrics.json instead of pictures"""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("explore")
    """folder to write to"""
    model: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """what veca.load takes, or a folder of a transformers vision model; twice to compare (default: veca-s14)"""
    cores: int | None = None
    """the budget of features, similarity, cores, positions and metrics (default: all cores)"""
    budgets: tuple[int, ...] = (8, 16, 32, 64)
    """the budgets of the page, layers and budgets"""
    size: int | None = None
    """the shorter side in pixels (default: 448; a page of two panes 336)"""
    sizes: tuple[int, ...] = (256, 512, 1024)
    """the sizes of features"""
    method: Literal["pca", "umap"] | None = None
    """how features become colours (default: pca; layers umap)"""
    at: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """x,y in pixels of the first photo: a patch whose similarity is shown; may be repeated"""
    core: tyro.conf.UseAppendAction[tuple[int, ...]] = ()
    """a core that the figure `cores` shows; may be repeated (default: the first six)"""
    limit: int = 32
    """how many photos of DATA are measured"""
    stride: int | None = None
    """page: pixels from one feature of the last layer to the next, for finer maps (default: the patch size)"""
    url: str = ""
    """page: the address of the folder in which it will be published, so that links to it show its picture"""
    open: bool = True
    """open the page in a browser"""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1, mps"""


def main(arguments: list[str]) -> None:
    settings = parse(Explore, arguments, "veca explore")
    check(settings)
    backbones = [load_backbone(name, pick_device(settings.device)) for name in settings.model or ("veca-s14",)]
    if settings.metrics is not None:
        write_metrics(settings, backbones)
        return
    photos = [open_photo(path) for path in settings.photos]
    started = time.perf_counter()
    if settings.figure is None:
        write_page(settings, photos, backbones)
        return
    paths = picture(settings, photos, backbones).write(settings.out, settings.figure)
    print(f"{' and '.join(map(str, paths))} ({time.perf_counter() - started:.1f} s)")


def check(settings: Explore) -> None:
    """What can be refused before a model is loaded."""
    if settings.metrics is not None and (settings.photos or settings.figure):
        raise InputError("--metrics takes its photos from DATA: give no photos and no --figure with it")
    if settings.metrics is None and not settings.photos:
        raise InputError("give at least one photo, or --metrics DATA")
    if settings.limit < 1:
        raise InputError(f"--limit must be at least 1, not {settings.limit}")
    if not settings.sizes or not settings.budgets:
        raise InputError("--sizes and --budgets need at least one number")
    if (settings.stride or settings.url) and (settings.figure or settings.metrics):
        raise InputError("--stride and --url belong to the page: leave out --figure and --metrics")
    if settings.url and re.fullmatch(r"https?://[^\s\"'<>]+", settings.url) is None:
        raise InputError(f"--url is an address such as https://example.org/pages, not {settings.url!r}")
    refuse_file(settings.out)
    points(settings.at)
    pick_device(settings.device)


def points(texts: Sequence[str]) -> list[tuple[float, float]]:
    """Pixels from x,y."""
    found = []
    for text in texts:
        try:
            x, y = (float(part) for part in text.split(","))
        except ValueError:
            raise InputError(f"--at takes x,y in pixels, such as --at 120,80, not {text!r}") from None
        found.append((x, y))
    return found


def picture(settings: Explore, photos: Sequence[Photo], backbones: Sequence[Backbone]) -> Picture:
    from veca.analysis import core_figures, figures

    size = settings.size or SIZE
    if settings.figure == "features":
        method = settings.method or "pca"
        return figures.features_figure(photos, backbones, settings.sizes, method, settings.cores)
    if settings.figure == "similarity":
        return figures.similarity_figure(photos, backbones, points(settings.at), size, settings.cores)
    if settings.figure == "cores":
        return figures.cores_figure(photos, backbones, settings.core, size, settings.cores)
    if settings.figure == "positions":
        return core_figures.positions_figure(photos, backbones, size, settings.cores)
    if settings.figure == "budgets":
        return core_figures.budgets_figure(photos, backbones, settings.budgets, size)
    method = settings.method or "umap"
    return core_figures.layers_figure(photos, backbones, settings.budgets, method, size)


def write_metrics(settings: Explore, backbones: Sequence[Backbone]) -> None:
    from veca.analysis.metrics import measure_models, summary

    assert settings.metrics is not None
    results = measure_models(backbones, settings.metrics, settings.size or SIZE, settings.cores, settings.limit)
    path = settings.out / "metrics.json"
    write_json(path, results)
    for result in results:
        print(f"{result['model']} on {result['photos']} photos of {result['data']}")
        for name, words in summary(result):
            print(f"  {name:<28} {words}")
    print(path)


def write_page(settings: Explore, photos: Sequence[Photo], backbones: Sequence[Backbone]) -> None:
    from veca.explorer.page import make_page

    started = time.perf_counter()
    path = settings.out / f"{'-'.join(photo.name for photo in photos)}.html"
    picture = path.with_suffix(".jpg")
    page = make_page(
        photos,
        backbones,
        size=settings.size,
        budgets=settings.budgets,
        stride=settings.stride,
        picture=picture.name,
        url=settings.url,
    )
    with whole_file(picture) as temporary:
        temporary.write_bytes(page.picture)
    write_text(path, page.html)
    print(f"{path}: {len(page.html.encode()) / 1e6:.1f} MB, in {time.perf_counter() - started:.1f} s")
    if settings.open and has_screen() and not webbrowser.open(path.resolve().as_uri()):
        print("no browser could be started: open the file yourself", file=sys.stderr)


def has_screen() -> bool:
    """Without one, Python would start a text browser in this terminal and wait for it."""
    return sys.platform != "linux" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
