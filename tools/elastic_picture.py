"""Draw the picture of docs/elastic.md: a photograph and the cells that stand for its patches at three shares.

    python tools/elastic_picture.py

The photograph comes with scikit-image.
"""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib as mpl
import skimage.data
import tyro
from PIL import Image

from veca.images import preprocess, resize_to_patches
from veca.mixed import choose_cells

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.collections import PatchCollection
from matplotlib.patches import Rectangle

PHOTO = Path(skimage.data.__file__).parent / "rocket.jpg"
SHARES = (0.5, 0.35, 0.2)
SIZE, PATCH = 420, 14
EDGES = {1: "#ffffff", 2: "#ffd166", 4: "#ef476f"}  # by the side of a cell in patches


def main(images: Path = Path(__file__).parents[1] / "docs/images") -> None:
    photo = resize_to_patches(Image.open(PHOTO).convert("RGB"), SIZE, PATCH)
    pixels = preprocess(photo, SIZE, PATCH)
    figure, axes = plt.subplots(2, 2, figsize=(12, 8.3))
    for axis, share in zip(axes.flat, (1.0, *SHARES), strict=True):
        axis.imshow(photo)
        axis.set(xticks=[], yticks=[])
        for spine in axis.spines.values():
            spine.set_visible(False)
        count = (photo.width // PATCH) * (photo.height // PATCH)
        if share == 1:
            axis.set_title(f"{photo.width}×{photo.height} pixels: {count} patches of {PATCH}×{PATCH}", loc="left")
            continue
        places = choose_cells(pixels, PATCH, share).places[0].tolist()
        for side, colour in reversed(EDGES.items()):
            squares = [
                Rectangle((x * PATCH - 0.5, y * PATCH - 0.5), s * PATCH, s * PATCH) for x, y, s in places if s == side
            ]
            axis.add_collection(PatchCollection(squares, facecolor="none", edgecolor=colour, linewidth=0.8, alpha=0.9))
        axis.set_title(f"patches={share:g}: {len(places)} tokens", loc="left")
    figure.tight_layout()
    out = images / "elastic.webp"
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=100)
    Image.open(drawn).convert("RGB").save(out, quality=85, method=6)
    print(f"{out}: {out.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    tyro.cli(main)
