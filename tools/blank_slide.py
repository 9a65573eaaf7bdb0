"""What `--where auto` saves on a slide of which half is blank glass (docs/huge.md).

    python tools/blank_slide.py --side 16384

writes a tiled pyramid of scikit-image's stained tissue beside glass, and streams it through random weights of veca_tiny
(they do not change the cost), with and without the mask, each in a process of its own.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import skimage.data
import tifffile

from veca import create_model
from veca.images import open_image

TILE = 512


def tiles(side: int) -> Iterator[np.ndarray]:
    """Rows of tiles: tissue on the left, nearly white glass on the right."""
    tissue = np.asarray(open_image(Path(skimage.data.__file__).parent / "ihc.png").resize((TILE, TILE)))
    glass = np.random.default_rng(0).integers(236, 246, (TILE, TILE, 3), dtype=np.uint8)
    for _ in range(side // TILE):
        yield from (tissue if 2 * column < side // TILE else glass for column in range(side // TILE))


def streamed(slide: Path, model: Path, out: Path, *more: str) -> None:
    """Prints a row: seconds, and the process's largest memory."""
    command = [sys.executable, "-m", "veca.cli", "features", "--stream", slide, "--model", model, "--out", out]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, time.monotonic()
    subprocess.run([*map(str, command), "--tokens", "float16", *more], check=True, stdout=subprocess.DEVNULL)
    seconds, peak = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    size = f"{peak / 2**20:.2f} GB" if peak > before else f"under {before / 2**20:.2f} GB"
    print(f"| {' '.join(more) or 'everything'} | {seconds:.0f} s | {size} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=16384)
    side = parser.parse_args().side
    with tempfile.TemporaryDirectory() as folder:
        slide, model = Path(folder) / "slide.tif", Path(folder) / "model"
        create_model("veca_tiny").save(model)
        with tifffile.TiffWriter(slide, bigtiff=True) as file:
            for step in (1, 8):
                shape = {"shape": (side // step, side // step, 3), "dtype": np.uint8}
                some = tiles(side) if step == 1 else (np.asarray(tile) for tile in reduced(side))
                file.write(some, **shape, tile=(TILE, TILE), photometric="rgb", compression="deflate",
                           subfiletype=int(step > 1))  # fmt: skip
        streamed(slide, model, Path(folder) / "masked", "--where", "auto")  # first: a child's peak only ever rises
        streamed(slide, model, Path(folder) / "whole")


def reduced(side: int) -> Iterator[np.ndarray]:
    """The level of an eighth, tile by tile."""
    row = np.concatenate([tile[::8, ::8] for tile, _ in zip(tiles(side), range(side // TILE), strict=False)], axis=1)
    whole = np.concatenate([row] * (side // TILE))
    for top in range(0, len(whole), TILE):
        for left in range(0, len(whole), TILE):
            tile = np.zeros((TILE, TILE, 3), np.uint8)
            part = whole[top : top + TILE, left : left + TILE]
            tile[: part.shape[0], : part.shape[1]] = part
            yield tile


if __name__ == "__main__":
    main()
