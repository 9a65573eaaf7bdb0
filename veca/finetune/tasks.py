"""What differs between classes, masks and depth: the views of a step, the loss, the scores, the head that is saved."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from veca.images import image_size, short_side_size
from veca.model import Veca
from veca.probes import classify, dense
from veca.probes.data import ClassData, Example
from veca.probes.depth import Depth
from veca.probes.heads import Head, NormedLinear, square
from veca.probes.pairs import Pair, PairData
from veca.probes.progress import progress
from veca.probes.segment import Segmentation
from veca.probes.views import RESIZE, View, centre_view

Answers = dict[str, Any]  # metrics by name


class Task(Protocol):
    name: str  # classify, segment or depth
    main: str  # the metric that chooses the best epoch
    better: str  # higher or lower
    classes: list[str]
    parts: dict[str, Sequence[Any]]  # train, validation (perhaps empty) and test

    def new_head(self, width: int) -> nn.Module: ...

    def load(self, number: int, draw: random.Random) -> tuple[Tensor, Tensor]:
        """A random view of a training image (3×S×S) and its label."""
        ...

    def loss(self, model: Veca, head: nn.Module, images: Tensor, labels: Sequence[Tensor], cores: int) -> Tensor: ...

    def score(self, model: Veca, head: nn.Module, part: str, cores: int) -> Answers: ...

    def saved_head(self, head: Any) -> Head:
        """The head as `veca probe predict` reads it, without what the engine knows."""
        ...

    def files(self, part: str) -> Iterator[Path]:
        """Every file of a part, to tell one data set from another."""
        ...


class Classes:
    name = "classify"

    def __init__(self, data: ClassData, side: int, workers: int) -> None:
        self.data, self.side, self.workers = data, side, workers
        self.main, self.better, self.classes = classify.main_metric(data.several), "higher", list(data.classes)
        self.parts: dict[str, Sequence[Example]] = {
            "train": data.train,
            "validation": data.validation,
            "test": data.test,
        }
        self.labels = classify.targets(data.train, len(data.classes), data.several)

    def new_head(self, width: int) -> nn.Module:
        head = nn.Linear(width, len(self.classes))
        nn.init.normal_(head.weight, std=0.01)
        nn.init.zeros_(head.bias)
        return head

    def load(self, number: int, draw: random.Random) -> tuple[Tensor, Tensor]:
        path, short = self.data.train[number].path, round(self.side * RESIZE)
        width, height = short_side_size(*image_size(path), short, str(path))
        at = (draw.randint(0, width - self.side), draw.randint(0, height - self.side))
        return View(path, short, self.side, at, flip=draw.random() < 0.5).pixels(), self.labels[number]

    def loss(self, model: Veca, head: nn.Module, images: Tensor, labels: Sequence[Tensor], cores: int) -> Tensor:
        return classify.loss_of(
            head(model(images, cores=cores).cls).float(), torch.stack(list(labels)).to(images.device)
        )

    @torch.inference_mode()
    def score(self, model: Veca, head: nn.Module, part: str, cores: int) -> Answers:
        examples = self.parts[part]
        device, logits, step = next(model.parameters()).device, [], 16
        with ThreadPoolExecutor(self.workers) as pool:
            views = pool.map(View.pixels, [centre_view(example.path, self.side) for example in examples])
            for start in progress(range(0, len(examples), step), f"scoring, {cores} cores"):
                images = torch.stack([next(views) for _ in examples[start : start + step]])
                logits.append(head(model(images.to(device), cores=cores).cls).float().cpu())
        return classify.score(torch.cat(logits), classify.targets(examples, len(self.classes), self.data.several))

    def saved_head(self, head: Any) -> Head:
        about = {"feature": "global", "classes": self.classes, "several": self.data.several}
        return Head("classify", head.weight.detach().cpu(), head.bias.detach().cpu(), about)

    def files(self, part: str) -> Iterator[Path]:
        return (example.path for example in self.parts[part])


class Pixels:
    """Masks and depth: the tasks of `veca probe`, on windows drawn anew at every step."""

    def __init__(self, task: Segmentation | Depth, data: PairData, side: int) -> None:
        self.task, self.side = task, side
        self.main, self.better = task.main, task.better
        self.name = "segment" if isinstance(task, Segmentation) else "depth"
        self.classes = list(task.class_names()) if isinstance(task, Segmentation) else []
        self.parts: dict[str, Sequence[Pair]] = {
            "train": data.train,
            "validation": (),
            "test": data.test,
        }

    def new_head(self, width: int) -> nn.Module:
        return NormedLinear(2 * width, self.task.outputs)

    def load(self, number: int, draw: random.Random) -> tuple[Tensor, Tensor]:
        window = dense.random_window(self.parts["train"][number], self.side, self.task, draw)
        return window.view.pixels(), dense.cut(self.task.read(window.pair.label), window)

    def loss(self, model: Veca, head: nn.Module, images: Tensor, labels: Sequence[Tensor], cores: int) -> Tensor:
        out = model(images, cores=cores)
        features = torch.cat([dense.joined(*pair) for pair in zip(out.cls, out.patches, strict=True)])
        maps = [square(part) for part in head(features).float().split(out.patches.shape[1])]
        return self.task.loss(maps, [label.to(images.device) for label in labels])

    @torch.inference_mode()
    def score(self, model: Veca, head: nn.Module, part: str, cores: int) -> Answers:
        device, linear = next(model.parameters()).device, self.saved_head(head)
        linear.weight, linear.bias = linear.weight.to(device), linear.bias.to(device)

        def predictions() -> Iterator[tuple[Tensor, Tensor]]:
            pairs = self.parts[part]
            for pair in progress(pairs, f"scoring, {cores} cores", len(pairs)):
                windows = dense.sliding(pair, self.side, self.task)
                out = model(torch.stack([window.view.pixels() for window in windows]).to(device), cores=cores)
                maps = [
                    self.task.decode(linear.on_grid(whole.float(), patches.float()))
                    for whole, patches in zip(out.cls, out.patches, strict=True)
                ]
                label = self.task.read(pair.label)
                boxes = [window.box for window in windows]
                size = (label.shape[0], label.shape[1])
                whole_image = dense.stitch(list(zip(boxes, maps, strict=True)), size)
                yield whole_image.cpu(), torch.from_numpy(label)

        return self.task.score(predictions())

    def saved_head(self, head: Any) -> Head:
        parts = head.folded() if isinstance(head, NormedLinear) else (head.weight, head.bias)
        weight, bias = (part.detach().cpu() for part in parts)
        return Head(self.name, weight, bias, {"feature": "patches+global", **self.task.about()})

    def files(self, part: str) -> Iterator[Path]:
        return (path for pair in self.parts[part] for path in (pair.image, pair.label))
