"""How much of the model's own speed `veca features` keeps, in one run, the two interleaved.

    python tools/throughput.py photos/ --images 48                       # photographs at the default size
    python tools/throughput.py --small 2000 --size 56                    # files per second with many small images

Per round: the model alone on batches that are ready (the images decoded, prepared and stacked before the clock
starts), then the whole command on the files. Printed: images per second of each, and the ratio of every round; the
median of the ratios is the answer, because a busy machine slows both arms of a round alike.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from PIL import Image

from veca.extract.command import main as features
from veca.extract.decoding import batches, decode
from veca.extract.extractor import Extractor
from veca.extract.sources import Entry, find_entries


@dataclass
class Settings:
    photos: tyro.conf.Positional[tuple[Path, ...]] = ()
    """images, and folders of images"""
    small: int = 0
    """instead of photos: so many files of 64×64 pixels"""
    images: int = 64
    size: int = 448
    batch: int = 16
    workers: int = 1
    rounds: int = 3
    cores: int = 64
    model: str = "veca-s14"
    dense: bool = False


def main() -> None:
    settings = tyro.cli(Settings)
    with tempfile.TemporaryDirectory() as work:
        paths = make_small(Path(work) / "small", settings.small) if settings.small else find_entries(settings.photos)
        paths = paths[: settings.small or settings.images]
        extractor = Extractor(settings.model, cores=settings.cores, dense=settings.dense)
        decoded = decode(paths, settings.size, extractor.patch_size, 0)
        ready = [np.stack([one.pixels for one in group]) for group in batches(decoded, settings.batch)]
        extractor(ready[0])  # warm
        ratios = []
        for number in range(settings.rounds):
            began = time.perf_counter()
            for batch in ready:
                extractor(batch)
            alone = time.perf_counter() - began
            out = Path(work) / f"out{number}"
            words = [
                *(entry.file for entry in paths),
                "--out",
                str(out),
                "--model",
                settings.model,
                "--size",
                str(settings.size),
            ]
            words += [
                "--batch",
                str(settings.batch),
                "--workers",
                str(settings.workers),
                "--cores",
                str(settings.cores),
            ]
            began = time.perf_counter()
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                features([*words, "--dense"] if settings.dense else words)
            whole = time.perf_counter() - began
            ratios.append(alone / whole)
            count = len(paths)
            print(
                f"model alone {count / alone:.1f} images/s, veca features {count / whole:.1f}, ratio {ratios[-1]:.2f}"
            )
        print(f"median ratio {statistics.median(ratios):.2f}")


def make_small(folder: Path, count: int) -> list[Entry]:
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(count):
        pixels = random.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((64, 64)).save(folder / f"{number:06d}.jpg")
    return find_entries((folder,))


if __name__ == "__main__":
    main()
