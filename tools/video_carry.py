"""What carrying cores from frame to frame costs and keeps (docs/video.md): CPU time, and cosine to the whole pass.

python tools/video_carry.py DAVIS/JPEGImages/480p/{dog,camel} --size 336 --frames 16
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import tyro
from torch import Tensor, nn

import veca
from veca.video import Frames, read_frames


def main(
    folders: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="FRAMES…")],
    model: str = "veca-s14",
    cores: int = 64,
    share: float = 0.25,
    size: int = 336,
    frames: int = 16,
) -> None:
    """Every way sees the same frame in turn; the first frame of each folder, which is read whole, is not counted."""
    net = veca.load(model)
    ways = {"whole": Frames(net, cores), "share": Frames(net, cores, share), "carry": Frames(net, cores, share, True)}
    alone = Frames(net, cores, share, carry=True)  # the same, for the global feature without the map
    seconds, near = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for folder in folders:
        ways["carry"].reset()
        alone.reset()
        for number, (_, image) in zip(range(frames), read_frames(folder), strict=False):
            pixels = net.preprocess(image, size)
            found, spent = {}, {}
            for name, way in ways.items():
                began = time.process_time()
                found[name] = way(pixels)
                spent[name] = time.process_time() - began
            began = time.process_time()
            alone.scan(pixels)
            spent["carry, global feature only"] = time.process_time() - began
            began = time.process_time()
            net.scan(pixels, cores)
            spent["whole, global feature only"] = time.process_time() - began
            if number:
                for name in spent:
                    seconds[name].append(spent[name])
                for name in ("share", "carry"):
                    near[f"{name}, patches"].append(cosine(found[name].patches, found["whole"].patches))
                    near[f"{name}, global"].append(cosine(found[name].cls, found["whole"].cls))
    for name, values in seconds.items():
        print(f"{name:<28} {1000 * statistics.median(values):7.0f} ms of one CPU, median of {len(values)} frames")
    for name, values in near.items():
        print(f"{name:<28} {statistics.fmean(values):.4f} mean cosine to the whole pass")


def cosine(ours: Tensor, whole: Tensor) -> float:
    return float(nn.functional.cosine_similarity(ours.float(), whole.float(), dim=-1).mean())


if __name__ == "__main__":
    tyro.cli(main)
