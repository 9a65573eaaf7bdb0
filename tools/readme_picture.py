"""Draw the picture at the top of README.md: a photo and its features, and what an image costs over its size.

    python tools/readme_picture.py

The photo comes with scikit-image; the times are the rows of docs/numbers/small.csv.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import skimage.data
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from plots import DENSE, LOOK, OURS, column, ticks
from steps import read_csv

import veca
from veca.analysis.projection import colours, project, unit
from veca.images import open_image

DOCS = Path(__file__).parents[1] / "docs"
PHOTO, STRIDE = Path(skimage.data.__file__).parent / "motorcycle_left.png", 4
LARGEST = 300_000  # bytes


def main() -> None:
    image, model = open_image(PHOTO), veca.load("veca-s14")
    found = model.scan(np.asarray(image), cores=64).look(stride=STRIDE).features  # h×w×D
    (painted,) = colours(project([unit(found.flatten(0, 1).numpy())]))
    with rc_context(LOOK):
        figure = Figure(figsize=(11.2, 6.1), layout="constrained")
        axes = figure.subplot_mosaic([["image", "cost"], ["features", "cost"]], width_ratios=[1, 1.35])
        axes["image"].imshow(image)
        axes["image"].set_title(f"A photo of {image.width}×{image.height} pixels")
        axes["features"].imshow(painted.reshape(*found.shape[:2], 3), interpolation="nearest")
        axes["features"].set_title(
            f"{found.shape[0] * found.shape[1]:,} features of it, one for every {STRIDE}×{STRIDE} pixels"
        )
        for name in ("image", "features"):
            axes[name].set(xticks=[], yticks=[])
            axes[name].spines[:].set_visible(False)
        draw_cost(axes["cost"])
        drawn = io.BytesIO()
        figure.savefig(drawn, dpi=115, format="png")
    path, picture = DOCS / "images/veca.webp", Image.open(drawn).convert("RGB")
    for quality in range(90, 20, -8):
        picture.save(path, quality=quality, method=6)
        if path.stat().st_size < LARGEST:
            break
    print(f"{path}: {picture.width}×{picture.height}, {path.stat().st_size / 1e3:.0f} kB")


def draw_cost(axes: Axes) -> None:
    rows = read_csv(DOCS / "numbers/small.csv")
    for arm, label, colour, marker in (
        ("dinov3", "DINOv3-S: every patch reads every patch", DENSE, "^"),
        ("veca, 64 cores", "VECA-S: through 64 cores", OURS, "o"),
    ):
        sizes, seconds = column(rows, "size", arm=arm), [ms / 1000 for ms in column(rows, "best_ms", arm=arm)]
        axes.plot(sizes, seconds, color=colour, marker=marker, label=label, lw=2.6, ms=8)
        last = f"{seconds[-1]:.0f} s" if seconds[-1] > 10 else f"{seconds[-1]:.1f} s"
        axes.annotate(last, (sizes[-1], seconds[-1]), (-12, 0), textcoords="offset points", color=colour,
                      ha="right", va="center", fontsize=14, fontweight="bold")  # fmt: skip
    axes.set(xscale="log", yscale="log", title="Seconds an image, on two CPU cores")
    axes.set_xlabel("side of the image, pixels")
    ticks(axes.xaxis, (224, 512, 1024, 2048))
    ticks(axes.yaxis, (0.1, 1, 10))
    axes.legend(loc="upper left", fontsize=11)


if __name__ == "__main__":
    main()
