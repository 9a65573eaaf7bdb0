"""The look of every figure: one sheet with words above the columns and beside the rows, and one colour bar."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from veca.errors import require
from veca.files import whole_file

INK, QUIET, PAPER = "#1c2024", "#667079", "#ffffff"
MAP = "viridis"  # perceptual, and readable without colour vision; the explorer uses the same
FONTS = ("Helvetica Neue", "Helvetica", "Arial", "Liberation Sans", "DejaVu Sans")
GAP, MARGIN, LABEL, HEAD = 0.07, 0.2, 0.38, 0.26  # inches
WIDEST = 9.2  # inches: words of 9 points are still read where a page shows the sheet 720 pixels wide


class Picture(NamedTuple):
    """A figure and the arrays it shows."""

    sheet: Sheet
    arrays: dict[str, np.ndarray]

    def write(self, folder: Path, name: str) -> list[Path]:
        """NAME.png and NAME.npz, each whole or not at all."""
        paths = [folder / f"{name}.png", folder / f"{name}.npz"]
        with whole_file(paths[0]) as temporary:
            self.sheet.figure.savefig(temporary, dpi=200, facecolor=PAPER)
        with whole_file(paths[1]) as temporary, open(temporary, "wb") as file:
            np.savez_compressed(file, **self.arrays)  # type: ignore[arg-type]
        return paths


class Sheet:
    """Panels of one width in rows of their own heights, placed by hand so that nothing ever overlaps."""

    def __init__(
        self,
        title: str,
        note: str,  # what is shown, in words
        columns: Sequence[str],
        rows: Sequence[tuple[str, str, float]],  # two labels, height ÷ width
        panel: float = 2.2,  # inches; less where so many would make the sheet too wide
        bar: bool = True,  # leave room for a colour bar below
    ) -> None:
        self.figure = require("matplotlib.figure", "explore").Figure()
        left = MARGIN + (LABEL if any(label for label, _, _ in rows) else 0)
        panel = min(panel, (WIDEST - left - MARGIN + GAP) / len(columns) - GAP)
        self.width = max(left + len(columns) * (panel + GAP) - GAP + MARGIN, 5.2)
        note = "\n".join(textwrap.wrap(note, int((self.width - 2 * MARGIN) * 15.3)))
        top = MARGIN + 0.34 + 0.175 * (note.count("\n") + 1) + HEAD
        heights = [ratio * panel for _, _, ratio in rows]
        self.height = top + sum(heights) + GAP * (len(rows) - 1) + MARGIN + (0.45 if bar else 0)
        self.left, self.panel, self.heights, self.top = left, panel, heights, top
        self.figure.set_size_inches(self.width, self.height)
        self.text(MARGIN, MARGIN, title, size=13, weight="bold", va="top")
        self.text(MARGIN, MARGIN + 0.32, note, size=9, color=QUIET, va="top", linespacing=1.35)
        for index, label in enumerate(columns):
            self.text(left + index * (panel + GAP), top - 0.06, label, size=9, va="baseline")
        for index, (label, second, _) in enumerate(rows):
            middle = top + sum(heights[:index]) + GAP * index + heights[index] / 2
            room = max(4, int(heights[index] * 13.5))
            for words, away, colour in ((label, 0.25 if second else 0.09, INK), (second, 0.09, QUIET)):
                style = {"rotation": 90, "ha": "right", "va": "center", "color": colour}
                self.text(left - away, middle, shortened(words, room), size=8.5, **style)

    def text(self, x: float, y: float, words: str, **style: Any) -> None:
        """Words at (x, y) inches from the top left."""
        style = {"color": INK, "family": fonts(), **style}
        self.figure.text(x / self.width, 1 - y / self.height, words, **style)

    def axes(self, row: int, column: int, span: int = 1) -> Any:
        """The panel at a row and column, `span` columns wide, without ticks."""
        width = span * (self.panel + GAP) - GAP
        x, y = self.left + column * (self.panel + GAP), self.top + sum(self.heights[:row]) + GAP * row
        axes = self.figure.add_axes(
            (
                x / self.width,
                1 - (y + self.heights[row]) / self.height,
                width / self.width,
                self.heights[row] / self.height,
            )
        )
        axes.set_xticks([])
        axes.set_yticks([])
        for spine in axes.spines.values():
            spine.set_visible(False)
        return axes

    def picture(self, row: int, column: int, pixels: np.ndarray, **how: Any) -> Any:
        """An image that fills its panel: its coordinates run from (0, 0) at the top left to (1, 1)."""
        axes = self.axes(row, column)
        axes.imshow(
            pixels, extent=(0, 1, 1, 0), aspect="auto", interpolation=how.pop("interpolation", "nearest"), **how
        )
        axes.set_xlim(0, 1)
        axes.set_ylim(1, 0)
        return axes

    def bar(self, low: float, high: float, words: tuple[str, str], unit: str) -> None:
        """The colour bar of the whole sheet: numbers and what they mean at both ends."""
        y, height, width = self.height - MARGIN - 0.3, 0.09, 2.2
        axes = self.figure.add_axes(
            (self.left / self.width, 1 - (y + height) / self.height, width / self.width, height / self.height)
        )
        axes.imshow(np.linspace(0, 1, 256)[None], cmap=MAP, aspect="auto")
        axes.set_axis_off()
        self.text(self.left, y + 0.27, f"{low:.2f}  {words[0]}", size=8.5, va="baseline")
        self.text(self.left + width, y + 0.27, f"{words[1]}  {high:.2f}", size=8.5, va="baseline", ha="right")
        self.text(self.left + width + 0.15, y + 0.085, unit, size=8.5, va="baseline", color=QUIET)

    def line_axes(self, row: int, column: int, height: float = 1.7) -> Any:
        """A panel for curves, at most `height` inches, drawn inside its place so that its ticks have room."""
        axes = self.axes(row, column)
        box = axes.get_position()
        height = min(height, self.heights[row]) - 0.4
        axes.set_position(
            (
                box.x0 + 0.42 / self.width,
                box.y1 - (height + 0.04) / self.height,
                box.width - 0.5 / self.width,
                height / self.height,
            )
        )
        ticker = require("matplotlib.ticker", "explore")
        axes.yaxis.set_major_locator(ticker.MaxNLocator(4))
        for side in ("left", "bottom"):
            axes.spines[side].set(visible=True, color="#c9ced3", linewidth=0.8)
        axes.tick_params(labelsize=8, colors=QUIET, length=0)
        axes.grid(color="#e7eaed", linewidth=0.7)
        axes.set_axisbelow(True)
        return axes


def shortened(words: str, room: int) -> str:
    return words if len(words) <= room else words[: room - 1] + "…"


def mark(axes: Any, x: float, y: float, label: str = "") -> None:
    """A ring at (x, y) in 0…1 that is seen on dark and on light."""
    axes.plot(x, y, "o", ms=9, mfc="none", mec="#000000", mew=2.6, clip_on=False)
    axes.plot(x, y, "o", ms=9, mfc="none", mec="#ffffff", mew=1.4, clip_on=False)
    if label:
        box = {"boxstyle": "round,pad=0.18", "fc": "#000000b0", "ec": "none"}
        offset = (8 if x < 0.85 else -8, 7 if y > 0.15 else -7)
        align = {"ha": "left" if x < 0.85 else "right", "va": "center"}
        axes.annotate(label, (x, y), offset, textcoords="offset points", size=7, color="white", bbox=box, **align)


def overlay(photo: np.ndarray, colours: np.ndarray, strength: float = 0.6) -> np.ndarray:
    """Colours of a grid (h×w×3 in 0…1) laid smoothly over the grey photo (H×W×3 uint8)."""
    from PIL import Image

    grey = np.asarray(Image.fromarray(photo).convert("L"), dtype=np.float32)[..., None] / 255
    size = (photo.shape[1], photo.shape[0])
    smooth = Image.fromarray((colours * 255).astype(np.uint8)).resize(size, Image.Resampling.BICUBIC)
    mixed = (1 - strength) * grey + strength * np.asarray(smooth, dtype=np.float32) / 255
    return (np.clip(mixed, 0, 1) * 255).astype(np.uint8)


@functools.cache
def fonts() -> list[str]:
    """Only what is installed: matplotlib warns about every other name, at every word."""
    names = {font.name for font in require("matplotlib.font_manager", "explore").fontManager.ttflist}
    return [name for name in FONTS if name in names]
