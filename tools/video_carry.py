"""What carrying cores from frame to frame costs and keeps (docs/video.md), as CSV: a row for every way.

    python tools/video_carry.py DAVIS/ --sequences dog breakdance --size 336 --frames 16

| way | the cores of a frame |
| --- | --- |
| whole | read every patch of it |
| share | read a share of its patches, and know nothing of other frames |
| carry | read the next share of its patches, and keep what they read of the others before |
| restart | read every patch, but begin as the final cores of the frame before instead of as the bank |

J, F and J&F as in `veca probe video`; milliseconds of CPU time, median, for all features of a frame and for the global
one alone; mean cosine of the patches to the whole pass. The first frame of a sequence is not counted in the last three.
"""

from __future__ import annotations

import csv
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from PIL import Image
from torch import Tensor, nn

import veca
from veca.errors import InputError
from veca.images import open_image
from veca.model import Veca, VecaOutput
from veca.probes.video import follow
from veca.tasks.video.data import Sequence, find_sequences
from veca.video import Frames

See = Callable[[Tensor], VecaOutput]


def main(
    data: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DATA")],
    sequences: tuple[str, ...] = (),
    model: str = "veca-s14",
    cores: int = 64,
    share: float = 0.25,
    size: int = 336,
    frames: int = 0,
) -> None:
    """All sequences, or those named; `frames` of each, 0 for all."""
    net = veca.load(model)
    chosen = [one for one in find_sequences(data, frames) if not sequences or one.name in sequences]
    if not chosen:
        raise InputError(f"{data}: none of the sequences {', '.join(sequences)}")
    ways: dict[str, Callable[[], Any]] = {
        "whole": lambda: Frames(net, cores),
        "share": lambda: Frames(net, cores, share),
        "carry": lambda: Frames(net, cores, share, carry=True),
        "restart": lambda: Restarted(net, cores),
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    for one in chosen:
        right: list[Tensor] = []
        for name, way in ways.items():
            found[name].append(measured(net, one, way(), right, size))
            if name != "restart":
                found[name][-1]["global_ms"] = global_times(net, one, way(), size)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["way", "share", "sequences", "J&F", "J", "F", "map_ms", "global_ms", "cosine"])
    for name, each in found.items():
        j, f = (statistics.fmean(row[kind] for part in each for row in part["objects"]) for kind in ("J", "F"))
        times = [
            f"{1000 * statistics.median(values):.0f}" if values else ""
            for values in ([value for part in each for value in part.get(kind, ())] for kind in ("map_ms", "global_ms"))
        ]
        cosine = statistics.fmean(value for part in each for value in part["cosine"])
        read = share if name in ("share", "carry") else 1
        scores = [f"{value:.4f}" for value in ((j + f) / 2, j, f)]
        writer.writerow([name, read, len(chosen), *scores, *times, f"{cosine:.4f}"])


def measured(net: Veca, one: Sequence, way: See, right: list[Tensor], size: int) -> dict[str, Any]:
    """What one sequence scores, with times and cosines; `right` is what the whole pass, the first way, found."""
    seconds: list[float] = []
    cosines: list[float] = []

    def see(image: Image.Image) -> Tensor:
        pixels = net.preprocess(image, size)
        began = time.process_time()
        out = way(pixels)
        seconds.append(time.process_time() - began)
        patches = out.patches[0].float()
        if len(right) < len(seconds):
            right.append(patches)
        cosines.append(float(nn.functional.cosine_similarity(patches, right[len(seconds) - 1], dim=-1).mean()))
        return patches.reshape(*out.grid, -1)

    return {**follow(one, see, None), "map_ms": seconds[1:], "cosine": cosines[1:]}


def global_times(net: Veca, one: Sequence, way: Frames, size: int) -> list[float]:
    seconds = []
    for path in one.frames:
        pixels = net.preprocess(open_image(path), size)
        began = time.process_time()
        way.scan(pixels)
        seconds.append(time.process_time() - began)
    return seconds[1:]


class Restarted:
    """Whole passes of which each begins with the final cores of the one before."""

    def __init__(self, net: Veca, cores: int) -> None:
        self.net, self.cores, self.last = net, cores, None

    @torch.no_grad()
    def __call__(self, images: Tensor) -> VecaOutput:
        bank, own = self.net.bank.tokens, self.net.bank.tokens.clone()
        if self.last is not None:
            bank[: self.cores].copy_(self.last)
        layers = self.net.forward_layers(images, self.cores, last_only=True)
        bank.copy_(own)
        self.last = layers.tokens[-1][0, : self.cores].clone()
        features = self.net.output(layers.tokens[-1])
        cores, patches = features[:, : self.cores], features[:, self.cores :]
        return VecaOutput(cores[:, 0], patches, cores, layers.coords[-1], layers.grid)


if __name__ == "__main__":
    tyro.cli(main)
