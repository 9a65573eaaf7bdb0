"""An image that does not fit: what `veca features --stream` needs for it, and how near float16 tokens stay to the pass.

    python tools/huge_image.py --out results/huge

makes a tiled TIFF of scikit-image's photographs side by side and random weights of veca_small (they do not change the
cost), streams the one through the other in a process of its own, and writes what that took to huge.json.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import skimage.data
import tifffile
import torch
import tyro
from PIL import Image
from torch.nn.functional import cosine_similarity

from veca import create_model, load
from veca.files import write_json
from veca.images import open_image, to_tensor
from veca.model import Veca

TILE = 512
PHOTOS = ("astronaut.png", "brick.png", "chelsea.png", "coffee.png", "grass.png", "gravel.png", "ihc.png", "rocket.jpg")


@dataclass
class Settings:
    """Stream an image that does not fit in memory, and measure it."""

    out: Path = Path("results/huge")
    """where huge.json goes; the image and the features are removed again"""
    side: int = 16384
    """the image's sides, in pixels: a multiple of 512"""
    part: int = 2048
    """side of the corner on which the ordinary pass is compared"""


def rows(side: int) -> Iterator[list[np.ndarray]]:
    """The image, `side` pixels square, as rows of squares of 512 pixels from scikit-image's photographs."""
    folder, count = Path(skimage.data.__file__).parent, side // TILE
    squares = [np.asarray(open_image(folder / name).resize((TILE, TILE))) for name in PHOTOS]
    for row in range(count):
        yield [squares[(column + row) % len(squares)] for column in range(count)]


def agreement(model: Veca, part: np.ndarray, tokens: str) -> float:
    """The smallest cosine of a patch that was streamed to the same patch of the ordinary pass."""
    with torch.inference_mode():
        whole = model(to_tensor(Image.fromarray(part))[None]).patches[0]
    with tempfile.TemporaryDirectory() as folder:
        model.stream(part, tokens=tokens, out=Path(folder) / "dense.npy")  # type: ignore[arg-type]
        dense = torch.from_numpy(np.load(Path(folder) / "dense.npy")).float().flatten(0, 1)
    return float(cosine_similarity(whole, dense, dim=-1).min())


def main() -> None:
    settings = tyro.cli(Settings)
    if settings.side % TILE or settings.part % TILE or not 0 < settings.part <= settings.side:
        raise SystemExit(f"--side and --part are multiples of {TILE}, and the part is not the larger one")
    settings.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=settings.out) as folder:
        image, weights = Path(folder) / "big.tif", Path(folder) / "small"
        shape = (settings.side, settings.side, 3)
        tiles = chain.from_iterable(rows(settings.side))
        tifffile.imwrite(image, tiles, shape=shape, dtype="uint8", tile=(TILE, TILE), photometric="rgb")
        torch.manual_seed(0)
        create_model("veca_small").save(weights)
        command = ["features", "--stream", image, "--model", weights, "--tokens", "float16", "--out", Path(folder)]
        done = subprocess.run(
            [sys.executable, "-m", "veca.cli", *map(str, command)], check=True, stdout=subprocess.PIPE, text=True
        )
        print(done.stdout, end="")
        figures = {
            "pixels": settings.side,
            "patches": (settings.side // 16) ** 2,
            "seconds": float(done.stdout.split(" in ")[-1].split(" s")[0]),
            "peak_gb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9,
            "features_gb": Path(folder, "big.tif.npy").stat().st_size / 1e9,
            "part": settings.part,
        }
        model, part = load(weights), np.vstack([np.hstack(row) for row in rows(settings.part)])
        for tokens in ("float32", "float16"):
            figures[f"cosine_{tokens}"] = agreement(model, part, tokens)
    write_json(settings.out / "huge.json", figures)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
