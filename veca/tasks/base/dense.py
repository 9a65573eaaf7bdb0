"""What segmentation and depth share: windows over images, training a head on them, predictions for whole images."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from veca.backbones import Backbone
from veca.extract.extractor import Extractor
from veca.images import image_size, short_side_size
from veca.progress import progress
from veca.tasks.base.batches import endless_batches
from veca.tasks.base.contract import Fitted, Look, Scores, Seen, Task
from veca.tasks.base.features import CachedExtractor, Features, LiveFeatures
from veca.tasks.base.heads import Head, NormedLinear, square
from veca.tasks.base.pairs import Array, Pair, PairData, open_trimmed, trim_box
from veca.tasks.base.views import View, label_box, windows

Decode = Callable[[Tensor], Tensor]  # K×h×w → what is upsampled and averaged


class Kind(Protocol):
    """What differs between dense tasks: the labels, their loss, decoding and score."""

    main: str
    better: str
    rate: float  # of a probe's head
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

    def about(self) -> dict[str, Any]:
        """What head.json keeps for `predict`."""
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


def sliding(pair: Pair, side: int, kind: Kind) -> list[Window]:
    """The windows that cover an image."""
    size = seen_size(pair, kind.trim)
    short = round(side * kind.zoom)
    resized = short_side_size(*size, short, str(pair.image))
    return [
        Window(View(pair.image, short, side, at, trim=kind.trim), pair, label_box(at, side, resized, size))
        for at in windows(*resized, side)
    ]


def random_window(pair: Pair, side: int, kind: Kind, rng: random.Random) -> Window:
    """A random crop of an image, mirrored half of the time."""
    size = seen_size(pair, kind.trim)
    short = round(side * kind.zoom)
    resized = short_side_size(*size, short, str(pair.image))
    at = (rng.randint(0, resized[0] - side), rng.randint(0, resized[1] - side))
    view = View(pair.image, short, side, at, flip=rng.random() < 0.5, trim=kind.trim)
    return Window(view, pair, label_box(at, side, resized, size))


def cut(label: Array, window: Window) -> Tensor:
    """The window's part of a label, mirrored as its view is."""
    left, top, right, bottom = window.box
    part = label[top:bottom, left:right]
    return torch.from_numpy(np.ascontiguousarray(part[:, ::-1] if window.view.flip else part))


class CachedBatches:
    """Batches of cached windows and their labels, in a new order each round."""

    def __init__(self, windows: Sequence[Window], features: Features, kind: Kind) -> None:
        self.windows, self.features, self.kind = windows, features, kind

    def endless(self, batch: int, order: random.Random) -> Generator[list[tuple[Tensor, Tensor, Tensor]], None, None]:
        """Endless batches of (whole D, patches N×D, label); a thread reads the next one meanwhile."""

        def load(number: int) -> tuple[Tensor, Tensor, Tensor]:
            window = self.windows[number]
            return *self.features.dense(number), cut(self.kind.read(window.pair.label), window)

        return endless_batches(len(self.windows), batch, order, load)


class AugmentedBatches:
    """Random crops and flips of random images, through the backbone at every step: the paper's way, for a GPU."""

    def __init__(self, pairs: Sequence[Pair], side: int, extractor: CachedExtractor, kind: Kind) -> None:
        self.pairs, self.side, self.extractor, self.kind = pairs, side, extractor, kind

    def endless(self, batch: int, order: random.Random) -> Generator[list[tuple[Tensor, Tensor, Tensor]], None, None]:
        def window() -> Window:
            return random_window(order.choice(self.pairs), self.side, self.kind, order)

        def load(window: Window) -> tuple[Tensor, Tensor]:
            return window.view.pixels(), cut(self.kind.read(window.pair.label), window)

        with ThreadPoolExecutor(4) as pool:
            following = [pool.submit(load, window()) for _ in range(batch)]
            while True:
                present = [future.result() for future in following]
                following = [pool.submit(load, window()) for _ in range(batch)]
                found = self.extractor.compute(torch.stack([pixels for pixels, _ in present]))
                yield list(zip(found.cls, found.patches, (label for _, label in present), strict=True))


def train(
    batches: CachedBatches | AugmentedBatches, kind: Kind, width: int, device: torch.device, how: Training, seed: int
) -> tuple[Tensor, Tensor]:
    """The folded weight and bias of a head trained by AdamW with polynomial decay; width: D."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = NormedLinear(2 * width, kind.outputs)
    layer.to(device).train()
    optimiser = torch.optim.AdamW(layer.parameters(), lr=how.rate, weight_decay=how.decay)
    rate = torch.optim.lr_scheduler.PolynomialLR(optimiser, how.steps, power=how.power)
    drawn = batches.endless(how.batch, random.Random(seed))
    for _, batch in zip(progress(range(how.steps), f"training, seed {seed}", how.steps), drawn, strict=False):
        features = torch.cat([joined(whole.to(device), patches.to(device)) for whole, patches, _ in batch])
        maps = [square(part) for part in torch.split(layer(features), [len(patches) for _, patches, _ in batch])]
        loss = kind.loss(maps, [label.to(device) for _, _, label in batch])
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
    head: Head, kind: Kind, images: Sequence[Sequence[Window]], features: Features | LiveFeatures
) -> Iterator[tuple[Tensor, Tensor]]:
    """(K′×H×W, label H×W) of every image; `features` holds the windows of all images in order."""
    number = 0
    for found in progress(images, "scoring", len(images)):
        label = kind.read(found[0].pair.label)
        parts = []
        for window in found:
            parts.append((window.box, kind.decode(head.on_grid(*features.dense(number)))))
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


class Pixels(Task):
    """A task with a label for every pixel: a linear head on each patch with the global feature appended."""

    def __init__(self, kind: Kind, data: PairData, classes: Sequence[str] = ()) -> None:
        self.kind, self.main, self.better, self.classes = kind, kind.main, kind.better, list(classes)
        self.parts: dict[str, Sequence[Pair]] = {
            "train": data.train,
            "validation": (),
            "test": data.test,
        }

    def files(self, part: str) -> Iterator[Path]:
        return (path for pair in self.parts[part] for path in (pair.image, pair.label))

    def load(self, number: int, side: int, rng: random.Random) -> tuple[Tensor, Tensor]:
        window = random_window(self.parts["train"][number], side, self.kind, rng)
        return window.view.pixels(), cut(self.kind.read(window.pair.label), window)

    def new_head(self, width: int) -> nn.Module:
        return NormedLinear(2 * width, self.kind.outputs)

    def loss(self, head: nn.Module, seen: Seen, labels: Sequence[Tensor]) -> Tensor:
        features = torch.cat([joined(*pair) for pair in zip(seen.cls, seen.patches, strict=True)])
        maps = [square(part) for part in head(features).float().split(seen.patches.shape[1])]
        return self.kind.loss(maps, [label.to(features.device) for label in labels])

    def saved_head(self, head: Any) -> Head:
        parts = head.folded() if isinstance(head, NormedLinear) else (head.weight, head.bias)
        weight, bias = (part.detach().cpu() for part in parts)
        return Head(self.name, weight, bias, self.about())

    def about(self) -> dict[str, Any]:
        return {"feature": "patches+global", **self.kind.about()}

    @torch.inference_mode()
    def score(self, head: nn.Module, look: Look, part: str, side: int) -> Scores:
        device, linear = next(head.parameters()).device, self.saved_head(head)
        linear.weight, linear.bias = linear.weight.to(device), linear.bias.to(device)

        def found() -> Iterator[tuple[Tensor, Tensor]]:
            pairs = self.parts[part]
            for pair in progress(pairs, "scoring", len(pairs)):
                windows = sliding(pair, side, self.kind)
                seen = look(torch.stack([window.view.pixels() for window in windows]).to(device))
                maps = [
                    self.kind.decode(linear.on_grid(whole.float(), patches.float()))
                    for whole, patches in zip(seen.cls, seen.patches, strict=True)
                ]
                label = self.kind.read(pair.label)
                boxes = [window.box for window in windows]
                size = (label.shape[0], label.shape[1])
                yield stitch(list(zip(boxes, maps, strict=True)), size).cpu(), torch.from_numpy(label)

        return self.kind.score(found())

    def fit(self, extractor: CachedExtractor, side: int, options: Any, seeds: int) -> Fitted:
        """On the cached features of the windows that cover each image, or with --augment as the paper does."""
        kind, backbone, train_pairs = self.kind, extractor.backbone, self.parts["train"]
        batches: CachedBatches | AugmentedBatches
        if options.augment:
            batches = AugmentedBatches(train_pairs, side, extractor, kind)
        else:
            windows = [window for pair in train_pairs for window in sliding(pair, side, kind)]
            cached = extractor.dense([window.view for window in windows], f"train, {backbone.name}")
            batches = CachedBatches(windows, cached, kind)
        images = [sliding(pair, side, kind) for pair in self.parts["test"]]
        features = seen_windows(images, extractor)
        scores, first, how = [], None, Training(options.steps, kind.rate)
        for seed in range(seeds):
            weight, bias = train(batches, kind, backbone.width, backbone.device, how, seed)
            head = Head(self.name, weight.cpu(), bias.cpu(), self.about())
            scores.append(kind.score(predictions(head, kind, images, features)))
            first = first or head
        assert first is not None
        return Fitted(scores, first, {})


def seen_windows(images: Sequence[Sequence[Window]], extractor: CachedExtractor) -> Features | LiveFeatures:
    """The features of the windows of test images, cached where they fit."""
    views = [window.view for image in images for window in image]
    if extractor.fits(views):
        return extractor.dense(views, f"test, {extractor.backbone.name}")
    return LiveFeatures(extractor, views)


def whole_image(head: Head, backbone: Backbone, path: Path, decode: Decode) -> tuple[Image.Image, Tensor]:
    """The upright image and the head's answer at its size (K′×H×W), windows averaged where they overlap."""
    about = head.about
    trim = tuple(about["trim"]) if about.get("trim") else None
    image = open_trimmed(path, trim)
    side, short = about["size"], round(about["size"] * about["zoom"])
    resized = short_side_size(*image.size, short, str(path))
    extractor, parts = Extractor(backbone, cores=about["cores"]), []
    for at in windows(*resized, side):
        found = extractor.compute(View(path, short, side, at, trim=trim).pixels()[None])
        maps = decode(head.on_grid(found.cls[0].cpu(), found.patches[0].cpu()))
        parts.append((label_box(at, side, resized, image.size), maps))
    with torch.inference_mode():
        return image, stitch(parts, (image.height, image.width))
