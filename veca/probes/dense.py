"""What segmentation and depth share: windows over images, training a head on them, predictions for whole images."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from veca.images import image_size, short_side_size
from veca.probes.features import Extractor, Features, LiveFeatures
from veca.probes.heads import Head, NormedLinear, square
from veca.probes.pairs import Array, Pair, trim_box
from veca.probes.progress import progress
from veca.probes.views import View, label_box, windows


class Task(Protocol):
    """What differs between dense tasks."""

    outputs: int  # K
    zoom: float  # the image's short side, in crops
    trim: tuple[int, int] | None

    def read(self, path: Path) -> Array: ...

    def loss(self, maps: Sequence[Tensor], labels: Sequence[Tensor]) -> Tensor:
        """maps: K×h×w each, labels: H×W each → the batch's loss."""
        ...

    def decode(self, maps: Tensor) -> Tensor:
        """K×h×w → what is upsampled and averaged over windows: logits, or metres."""
        ...

    def score(self, predictions: Iterator[tuple[Tensor, Tensor]]) -> dict[str, Any]:
        """Pairs of (K′×H×W, H×W) → the metrics by name."""
        ...


@dataclass(frozen=True)
class Window:
    """A view of an image and the part of the label that it covers."""

    view: View
    pair: Pair
    box: tuple[int, int, int, int]  # left, top, right, bottom in the label


@dataclass(frozen=True)
class Training:
    steps: int
    rate: float
    batch: int = 8
    decay: float = 1e-2
    power: float = 0.9  # of the polynomial


def seen_size(pair: Pair, trim: tuple[int, int] | None) -> tuple[int, int]:
    """(width, height) of an image after its trim."""
    width, height = image_size(pair.image)
    if trim is None:
        return width, height
    left, top, right, bottom = trim_box(width, height, trim, pair.image)
    return right - left, bottom - top


def sliding(pair: Pair, side: int, task: Task) -> list[Window]:
    """The windows that cover an image."""
    size = seen_size(pair, task.trim)
    short = round(side * task.zoom)
    resized = short_side_size(*size, short, str(pair.image))
    return [
        Window(View(pair.image, short, side, at, trim=task.trim), pair, label_box(at, side, resized, size))
        for at in windows(*resized, side)
    ]


def random_window(pair: Pair, side: int, task: Task, draw: random.Random) -> Window:
    """A random crop of an image, mirrored half of the time."""
    size = seen_size(pair, task.trim)
    short = round(side * task.zoom)
    resized = short_side_size(*size, short, str(pair.image))
    at = (draw.randint(0, resized[0] - side), draw.randint(0, resized[1] - side))
    view = View(pair.image, short, side, at, flip=draw.random() < 0.5, trim=task.trim)
    return Window(view, pair, label_box(at, side, resized, size))


def cut(label: Array, window: Window) -> Tensor:
    """The window's part of a label, mirrored as its view is."""
    left, top, right, bottom = window.box
    part = label[top:bottom, left:right]
    return torch.from_numpy(np.ascontiguousarray(part[:, ::-1] if window.view.flip else part))


class CachedBatches:
    """Batches of cached windows and their labels, in a new order each round."""

    def __init__(self, windows: Sequence[Window], features: Features, task: Task) -> None:
        self.windows, self.features, self.task = windows, features, task

    def draw(self, batch: int, order: random.Random) -> Generator[list[tuple[Tensor, Tensor, Tensor]], None, None]:
        """Endless batches of (whole D, patches N×D, label); a thread reads the next one meanwhile."""

        def load(number: int) -> tuple[Tensor, Tensor, Tensor]:
            window = self.windows[number]
            return *self.features.dense(number), cut(self.task.read(window.pair.label), window)

        def numbers() -> Iterator[int]:
            while True:
                rest = list(range(len(self.windows)))
                order.shuffle(rest)
                yield from rest

        coming = numbers()
        with ThreadPoolExecutor(2) as pool:
            following = [pool.submit(load, next(coming)) for _ in range(batch)]
            while True:
                present = following
                following = [pool.submit(load, next(coming)) for _ in range(batch)]
                yield [future.result() for future in present]


class AugmentedBatches:
    """Random crops and flips of random images, through the backbone at every step: the paper's way, for a GPU."""

    def __init__(self, pairs: Sequence[Pair], side: int, extractor: Extractor, task: Task) -> None:
        self.pairs, self.side, self.extractor, self.task = pairs, side, extractor, task

    def draw(self, batch: int, order: random.Random) -> Generator[list[tuple[Tensor, Tensor, Tensor]], None, None]:
        def window() -> Window:
            return random_window(order.choice(self.pairs), self.side, self.task, order)

        def load(window: Window) -> tuple[Tensor, Tensor]:
            return window.view.pixels(), cut(self.task.read(window.pair.label), window)

        with ThreadPoolExecutor(4) as pool:
            following = [pool.submit(load, window()) for _ in range(batch)]
            while True:
                present = [future.result() for future in following]
                following = [pool.submit(load, window()) for _ in range(batch)]
                wholes, patches = self.extractor.compute(torch.stack([pixels for pixels, _ in present]))
                yield list(zip(wholes, patches, (label for _, label in present), strict=True))


def train(
    batches: CachedBatches | AugmentedBatches, task: Task, width: int, device: torch.device, how: Training, seed: int
) -> tuple[Tensor, Tensor]:
    """The folded weight and bias of a head trained by AdamW with polynomial decay; width: D."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = NormedLinear(2 * width, task.outputs)
    layer.to(device).train()
    optimiser = torch.optim.AdamW(layer.parameters(), lr=how.rate, weight_decay=how.decay)
    rate = torch.optim.lr_scheduler.PolynomialLR(optimiser, how.steps, power=how.power)
    drawn = batches.draw(how.batch, random.Random(seed))
    for _, batch in zip(progress(range(how.steps), f"training, seed {seed}", how.steps), drawn, strict=False):
        features = torch.cat([joined(whole.to(device), patches.to(device)) for whole, patches, _ in batch])
        maps = [square(part) for part in torch.split(layer(features), [len(patches) for _, patches, _ in batch])]
        loss = task.loss(maps, [label.to(device) for _, _, label in batch])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        rate.step()
    drawn.close()
    return layer.folded()


def joined(whole: Tensor, patches: Tensor) -> Tensor:
    """whole: D, patches: N×D → N×2D, each patch with the global feature appended."""
    return torch.cat((patches, whole.expand_as(patches)), dim=1)


@torch.inference_mode()
def predictions(
    head: Head, task: Task, images: Sequence[Sequence[Window]], features: Features | LiveFeatures
) -> Iterator[tuple[Tensor, Tensor]]:
    """(K′×H×W, label H×W) of every image; `features` holds the windows of all images in order."""
    number = 0
    for found in progress(images, "scoring", len(images)):
        label = task.read(found[0].pair.label)
        parts = []
        for window in found:
            parts.append((window.box, task.decode(head.on_grid(*features.dense(number)))))
            number += 1
        yield stitch(parts, (label.shape[0], label.shape[1])), torch.from_numpy(label)


def stitch(parts: Sequence[tuple[tuple[int, int, int, int], Tensor]], size: tuple[int, int]) -> Tensor:
    """Windows (box, K×h×w) upsampled to their part of the picture and averaged where they overlap: K×H×W."""
    whole = parts[0][1].new_zeros(parts[0][1].shape[0], *size)
    count = whole.new_zeros(size)
    for (left, top, right, bottom), part in parts:
        whole[:, top:bottom, left:right] += upsample(part, (bottom - top, right - left))
        count[top:bottom, left:right] += 1
    return whole / count


def upsample(part: Tensor, size: tuple[int, int]) -> Tensor:
    """K×h×w → K×H×W: `interpolate(mode="bilinear")` as two matrix products, twice as fast with its gradient."""
    rows, columns = (axis_weights(n, out).to(part) for n, out in zip(part.shape[1:], size, strict=True))
    with torch.autocast(part.device.type, enabled=False):  # logits and metres keep their digits
        return rows @ (part @ columns.T)


@lru_cache(maxsize=4096)
def axis_weights(n: int, out: int) -> Tensor:  # out×n
    """What each of `out` places takes of `n` values along one axis."""
    with torch.inference_mode(False):  # made while scoring, it must serve training too
        eye = torch.eye(n)[None]
        return nn.functional.interpolate(eye, size=out, mode="linear", align_corners=False)[0].T.contiguous()
