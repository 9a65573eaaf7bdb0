"""Draw the picture of docs/scan.md: a large image, its scan, three looks at different zoom.

    python tools/scan_picture.py

The large image is a wall of photographs that come with scikit-image.
"""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib as mpl
import numpy as np
import skimage.data
from PIL import Image, ImageOps

import veca
from veca.analysis.projection import colours, project, unit

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle

PHOTOS = Path(skimage.data.__file__).parent
NAMES = (
    *("astronaut.png", "hubble_deep_field.jpg", "coffee.png", "retina.jpg"),
    *("chelsea.png", "rocket.jpg", "motorcycle_left.png", "ihc.png"),
)
SIDE = 630
LOOKS = (
    ((0, 0, 1260, 1260), 14, "tab:orange"),
    ((0, 630, 630, 630), 7, "tab:cyan"),
    ((130, 784, 224, 224), 2, "tab:pink"),
)


def wall() -> Image.Image:
    """4×2 photographs, 2520×1260 pixels."""
    whole = Image.new("RGB", (4 * SIDE, 2 * SIDE))
    for index, name in enumerate(NAMES):
        photo = ImageOps.fit(Image.open(PHOTOS / name).convert("RGB"), (SIDE, SIDE), Image.Resampling.BICUBIC)
        whole.paste(photo, (index % 4 * SIDE, index // 4 * SIDE))
    return whole


def main() -> None:
    image, model = wall(), veca.load("veca-s14")
    scan = model.scan(np.asarray(image), cores=64)
    found = [scan.look(box=box, stride=stride) for box, stride, _ in LOOKS]
    maps = [look.features.flatten(0, 1).numpy() for look in found]
    painted = colours(project([unit(rows) for rows in (*maps, scan.cores.numpy())]))
    figure, axes = plt.subplot_mosaic(
        [["image"] * 3, ["scan"] * 3, [0, 1, 2]], figsize=(9, 12.2), height_ratios=[1.5, 1.5, 1]
    )
    axes["image"].imshow(image)
    axes["image"].set_title(f"an image of {image.width}×{image.height} pixels", loc="left")
    axes["scan"].imshow(Image.blend(image.convert("L").convert("RGB"), Image.new("RGB", image.size, "white"), 0.7))
    x, y = ((scan.coords.numpy().T + 1) / 2) * np.array([[image.width], [image.height]])
    axes["scan"].scatter(x, y, c=painted[3].reshape(-1, 3), s=110, edgecolor="black", linewidth=0.6)
    axes["scan"].set_title("its scan: what 64 cores went through, 1.3 MB for any image", loc="left")
    for index, ((box, stride, colour), look) in enumerate(zip(LOOKS, found, strict=True)):
        h, w = look.features.shape[:2]
        axes[index].imshow(painted[index].reshape(h, w, 3), interpolation="nearest")
        axes[index].set_title(f"look at {box[2]}×{box[3]}, stride {stride}:\n{h}×{w} features", loc="left")
        axes["image"].add_patch(Rectangle(box[:2], *box[2:], fill=False, edgecolor=colour, linewidth=4))
        for spine in axes[index].spines.values():
            spine.set(edgecolor=colour, linewidth=4)
    for axis in axes.values():
        axis.set(xticks=[], yticks=[])
    figure.tight_layout()
    out = Path(__file__).parents[1] / "docs/images" / "scan.webp"
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110)
    Image.open(drawn).convert("RGB").save(out, quality=85, method=6)
    print(f"{out}: {out.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
