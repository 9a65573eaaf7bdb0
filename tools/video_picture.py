"""The picture of docs/video.md: a camera moves over a photograph of scikit-image; the mask of its first frame follows.

python tools/video_picture.py --film film --out docs/images/video.webp
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import skimage.data
from PIL import Image, ImageDraw

from veca.cli import main as veca_command

FRAMES, SIZE = 16, (448, 336)
SHOWN = (0, 5, 10, 15)


def film(folder: Path) -> None:
    """`folder/frames/coffee` and `folder/masks/coffee`: the saucer is object 1, the cup object 2."""
    photo = Image.open(Path(skimage.data.__file__).parent / "coffee.png").convert("RGB")
    mask = Image.new("L", photo.size)
    draw = ImageDraw.Draw(mask)
    draw.ellipse((79, 79, 480, 386), fill=1)
    draw.ellipse((172, 19, 412, 206), fill=2)
    draw.polygon([(172, 110), (200, 225), (260, 262), (320, 262), (380, 215), (412, 110)], fill=2)
    for kind, source in (("frames", photo), ("masks", mask)):
        (folder / kind / "coffee").mkdir(parents=True, exist_ok=True)
        for number in range(FRAMES):
            at = number / (FRAMES - 1)
            turn, zoom = math.radians(-6 + 22 * at), 0.95 - 0.22 * at  # the camera turns and comes nearer
            x, y = 315 - 40 * at, 205 - 25 * at
            a, b = zoom * math.cos(turn), -zoom * math.sin(turn)
            way = (a, b, x - a * SIZE[0] / 2 - b * SIZE[1] / 2, -b, a, y + b * SIZE[0] / 2 - a * SIZE[1] / 2)
            how = Image.Resampling.BICUBIC if kind == "frames" else Image.Resampling.NEAREST
            view = source.transform(SIZE, Image.Transform.AFFINE, way, how)
            view.save(folder / kind / "coffee" / f"{number:05d}.png")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--film", type=Path, default=Path("film"))
    options.add_argument("--model", default="veca-s14")
    options.add_argument("--size", default="336")
    options.add_argument("--out", type=Path, default=Path("docs/images/video.webp"))
    chosen = options.parse_args()
    film(chosen.film)
    found = chosen.film / "probe"
    words = ["--data", str(chosen.film), "--model", chosen.model, "--size", chosen.size, "--cores", "64"]
    if veca_command(["probe", "video", *words, "--draw", "--out", str(found)]):
        raise SystemExit(1)
    (drawn,) = (found / "drawn").iterdir()
    strip = Image.new("RGB", (len(SHOWN) * SIZE[0] + 8 * (len(SHOWN) - 1), SIZE[1]), "white")
    for place, number in enumerate(SHOWN):
        strip.paste(Image.open(drawn / "coffee" / f"{number:05d}.jpg"), (place * (SIZE[0] + 8), 0))
    strip.thumbnail((1200, 1200))
    strip.save(chosen.out, quality=80)


if __name__ == "__main__":
    main()
