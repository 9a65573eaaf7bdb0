"""What `--where auto` saves on a slide of which half is blank glass (docs/huge.md).

    python tools/blank_slide.py --side 16384 --out DIR

writes a tiled pyramid of scikit-image's stained tissue beside glass, and streams it through a model, with and without
the mask, each in a process of its own. DIR gets blank.json. A name of `veca.list_models()` is that size with random
weights, which do not change the cost.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import skimage.data
import tifffile

from veca import create_model, list_models
from veca.files import write_json
from veca.images import open_image

TILE = 512


def tiles(side: int) -> Iterator[np.ndarray]:
    """Rows of tiles: tissue on the left, nearly white glass on the right."""
    tissue = np.asarray(open_image(Path(skimage.data.__file__).parent / "ihc.png").resize((TILE, TILE)))
    glass = np.random.default_rng(0).integers(236, 246, (TILE, TILE, 3), dtype=np.uint8)
    for _ in range(side // TILE):
        yield from (tissue if 2 * column < side // TILE else glass for column in range(side // TILE))


def streamed(slide: Path, model: str, out: Path, *more: str) -> dict[str, str | float]:
    """Seconds, and the process's largest memory."""
    command = [sys.executable, "-m", "veca.cli", "features", "--stream", slide, "--model", model, "--out", out]
    began = time.monotonic()
    process = subprocess.Popen([*map(str, command), "--tokens", "float16", *more], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)  # of this process alone
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed")
    row: dict[str, str | float] = {"read": " ".join(more) or "everything"}
    row |= {"seconds": round(time.monotonic() - began, 1), "peak_gb": round(used.ru_maxrss * 1024 / 1e9, 2)}
    print(f"| {row['read']} | {row['seconds']} s | {row['peak_gb']} GB |", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=16384)
    parser.add_argument("--model", default="veca-s14")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    side, model = given.side, given.model
    with tempfile.TemporaryDirectory() as folder:
        slide = Path(folder) / "slide.tif"
        if model in list_models():
            create_model(model).save(Path(folder) / "model")
            model = str(Path(folder) / "model")
        with tifffile.TiffWriter(slide, bigtiff=True) as file:
            for step in (1, 8):
                shape = {"shape": (side // step, side // step, 3), "dtype": np.uint8}
                some = tiles(side) if step == 1 else (np.asarray(tile) for tile in reduced(side))
                file.write(some, **shape, tile=(TILE, TILE), photometric="rgb", compression="deflate",
                           subfiletype=int(step > 1))  # fmt: skip
        same = {"model": Path(given.model).name, "pixels": side}
        rows = [{**same, **streamed(slide, model, Path(folder) / "masked", "--where", "auto")}]
        rows += [{**same, **streamed(slide, model, Path(folder) / "whole")}]
    write_json(given.out / "blank.json", rows)


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
