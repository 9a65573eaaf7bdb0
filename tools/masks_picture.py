"""The picture of docs/masks.md: what a mask head finds in photographs of scikit-image.

python tools/masks_picture.py runs/masks/heads/veca-s14-224px-64cores --out docs/images/masks.webp
"""

from __future__ import annotations

import argparse
from pathlib import Path

import skimage.data
from PIL import Image

from veca.cli import main as veca_command

PHOTOS = ("chelsea.png", "astronaut.png")
HEIGHT = 360


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("head", type=Path)
    options.add_argument("--seen", type=Path, default=Path("seen"), help="folder for what `veca probe predict` writes")
    options.add_argument("--out", type=Path, default=Path("docs/images/masks.webp"))
    chosen = options.parse_args()
    photos = [Path(skimage.data.__file__).parent / name for name in PHOTOS]
    if veca_command(["probe", "predict", str(chosen.head), *map(str, photos), "--out", str(chosen.seen)]):
        raise SystemExit(1)
    drawn = [Image.open(chosen.seen / f"{photo.stem}.overlay.png") for photo in photos]
    parts = [one.resize((round(one.width * HEIGHT / one.height), HEIGHT), Image.Resampling.LANCZOS) for one in drawn]
    strip = Image.new("RGB", (sum(part.width for part in parts) + 8 * (len(parts) - 1), HEIGHT), "white")
    left = 0
    for part in parts:
        strip.paste(part, (left, 0))
        left += part.width + 8
    strip.save(chosen.out, quality=80)


if __name__ == "__main__":
    main()
