"""The picture of docs/detect.md: what a trained detector draws on two photographs of scikit-image.

python tools/detect_picture.py HEAD --out docs/images/detect.webp
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import skimage.data
from PIL import Image

from veca.cli import main as veca_command

PHOTOS = ("camera.png", "motorcycle_left.png")
HEIGHT = 420


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("head", type=Path, help="the folder of a head that knows people and motorcycles")
    options.add_argument("--model", help="where its backbone is now")
    options.add_argument("--out", type=Path, default=Path("docs/images/detect.webp"))
    chosen = options.parse_args()
    photos = [str(Path(skimage.data.__file__).parent / name) for name in PHOTOS]
    with tempfile.TemporaryDirectory() as folder:
        moved = ["--model", chosen.model] if chosen.model else []
        if veca_command(["probe", "predict", str(chosen.head), *photos, *moved, "--out", folder]):
            raise SystemExit(1)
        drawn = [Image.open(Path(folder) / f"{Path(photo).stem}.boxes.png") for photo in photos]
        drawn = [one.resize((round(one.width * HEIGHT / one.height), HEIGHT)) for one in drawn]
    strip = Image.new("RGB", (sum(one.width for one in drawn) + 8 * (len(drawn) - 1), HEIGHT), "white")
    left = 0
    for one in drawn:
        strip.paste(one, (left, 0))
        left += one.width + 8
    strip.thumbnail((1200, 1200))
    strip.save(chosen.out, quality=82)


if __name__ == "__main__":
    main()
