"""Classification: a linear layer on the global feature, trained by SGD at several rates at once (docs/probes.md).

The rate is chosen on a validation part of the training set (a fifth of each class, unless the data has its own `val`);
then the head is trained at that rate on all of it, and scored once on the test set.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from veca.backbones import Backbone
from veca.errors import InputError
from veca.extract.extractor import Extractor
from veca.images import image_size, short_side_size
from veca.progress import progress
from veca.tasks.base.classes import ClassData, Example, held_out, read_classes, read_examples
from veca.tasks.base.contract import Fitted, Look, Scores, Seen, Task
from veca.tasks.base.features import CachedExtractor
from veca.tasks.base.heads import Head
from veca.tasks.base.options import FineTuneOptions, Paths, ProbeOptions
from veca.tasks.base.views import RESIZE, View, centre_view

BEST = 5  # classes of an answer
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
VALIDATION = 0.2


@dataclass
class ClassifyProbe(ProbeOptions):
    """Train a linear head on the global feature: top-1 and top-5, or mean average precision for several labels.

    DIR holds train/<class>/ and test/<class>/ (or val/), or train.csv and test.csv with the columns path and labels
    (several labels separated by ;). Heads are trained by SGD at nine learning rates at once; the rate is chosen on a
    fifth of the training images, the head is then trained on all of them and scored once on the test images.

    Examples:
      veca probe classify --data pets/ --model teacher/ --model veca-s14 --cores 8,64 --size 256,384 --out pets-probe/
      veca probe classify --data imagenet/ --model veca-s14 --also imagenetv2/ --also real.json --against paper
      veca probe classify --data food/ --model veca-s14 --cores 8,16,32,64 --size 256,384 --against paper:food101
    """

    epochs: int = 100
    """passes over the cached features"""
    also: Paths = ()
    """score the heads on other labels of the classes too: class folders, a CSV, or ReaL's JSON of the test images"""


@dataclass(kw_only=True)
class ClassifyFineTune(FineTuneOptions):
    """Fine-tune for classes: a linear head on the global feature, and the backbone below it.

    DIR holds train/<class>/ and test/<class>/, perhaps val/<class>/, or CSV files; as `veca probe classify` reads them.
    Where there is val/, the best epoch is kept; without it all of train/ is used and the last weights are kept. The
    test images are scored once, at the end. The run's folder then holds model/ (for veca.load) and head/ (for
    `veca probe predict` and transformers).

    Examples:
      veca finetune classify --data pets/ --model veca-s14 --size 196 --epochs 10 --out runs/pets
      veca finetune classify --data pets/ --model veca-s14 --cores 64 --head-only --out runs/pets-head
      veca finetune classify --data pets/ --model veca-s14 --start-head pets-probe/heads/veca-s14-196px-64cores
    """


@dataclass(frozen=True)
class Training:
    epochs: int = 100
    batch: int = 128
    momentum: float = 0.9


def targets(examples: Sequence[Example], classes: int, several: bool) -> Tensor:
    """V class numbers, or V×K of 0 and 1 where an image may have several labels."""
    if not several:
        return torch.tensor([example.labels[0] for example in examples])
    rows = torch.zeros(len(examples), classes, dtype=torch.long)
    for row, example in zip(rows, examples, strict=True):
        row[list(example.labels)] = 1
    return rows


def fit(
    features: Tensor, labels: Tensor, classes: int, rates: Sequence[float], how: Training, seed: int
) -> list[tuple[Tensor, Tensor]]:
    """One head (K×D, K) per rate, all trained in the same pass. features: V×D; labels: V, or V×K for several."""
    rng = torch.Generator().manual_seed(seed)
    start = torch.randn(classes, features.shape[1], generator=rng) * 0.01
    weights = [start.clone().to(features.device).requires_grad_() for _ in rates]
    biases = [torch.zeros(classes, device=features.device, requires_grad=True) for _ in rates]
    groups = [{"params": pair, "lr": rate} for pair, rate in zip(zip(weights, biases, strict=True), rates, strict=True)]
    optimiser = torch.optim.SGD(groups, lr=rates[0], momentum=how.momentum)
    steps = how.epochs * math.ceil(len(features) / how.batch)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in progress(range(how.epochs), f"training, seed {seed}", how.epochs):
        for rows in torch.split(torch.randperm(len(features), generator=rng).to(features.device), how.batch):
            logits = nn.functional.linear(features[rows], torch.cat(weights), torch.cat(biases))
            # The heads share nothing, so the sum of their losses trains each as if it were alone.
            loss = torch.stack([loss_of(part, labels[rows]) for part in logits.chunk(len(rates), dim=1)]).sum()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            cosine.step()
    return [(weight.detach(), bias.detach()) for weight, bias in zip(weights, biases, strict=True)]


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    if labels.ndim == 1:
        return nn.functional.cross_entropy(logits, labels)
    return nn.functional.binary_cross_entropy_with_logits(logits, labels.float())


def score(logits: Tensor, labels: Tensor) -> dict[str, Any]:
    """Top-1, top-5 and per class; mean average precision where labels are V×K."""
    from veca.tasks.base import metrics  # only scoring needs torchmetrics: transformers models use tasks too

    return metrics.accuracy(logits, labels) if labels.ndim == 1 else metrics.average_precision(logits, labels)


def main_metric(several: bool) -> str:
    return "mAP" if several else "top1"


def train(
    data: ClassData, train: Tensor, validation: Tensor | None, how: Training, seed: int
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Weight and bias trained at the best rate, with that rate and its validation score. train: V×D."""
    labels = targets(data.train, len(data.classes), data.several).to(train.device)
    if validation is None:
        kept, out = held_out(data.train, VALIDATION, seed)
        part, part_labels, valid, valid_labels = train[kept], labels[kept], train[out], labels[out]
    else:
        part, part_labels, valid = train, labels, validation
        valid_labels = targets(data.validation, len(data.classes), data.several).to(train.device)
    heads = fit(part, part_labels, len(data.classes), RATES, how, seed)
    name = main_metric(data.several)
    scores = [score(nn.functional.linear(valid, *head).cpu(), valid_labels.cpu())[name] for head in heads]
    best = max(range(len(RATES)), key=lambda index: scores[index] if math.isfinite(scores[index]) else -1.0)
    head = heads[best]
    if validation is None:  # nothing is wasted: the held-out images train the head that is reported
        head = fit(train, labels, len(data.classes), RATES[best : best + 1], how, seed)[0]
    return *head, {"rate": RATES[best], "validation": scores[best]}


class Classify(Task):
    name, summary, better = "classify", "a linear head on the global feature; class folders or CSV", "higher"
    probe_options, finetune_options = ClassifyProbe, ClassifyFineTune

    def __init__(self, data: ClassData, also: dict[str, tuple[Example, ...]] | None = None, workers: int = 4) -> None:
        self.data, self.also, self.workers = data, also or {}, workers
        self.main, self.classes = main_metric(data.several), list(data.classes)
        self.parts: dict[str, Sequence[Example]] = {
            "train": data.train,
            "validation": data.validation,
            "test": data.test,
        }
        self.labels = {
            part: targets(examples, len(self.classes), data.several) for part, examples in self.parts.items()
        }

    @classmethod
    def open(cls, options: Any) -> Classify:
        data = read_classes(options.data)
        return cls(data, other_label_sets(getattr(options, "also", ()), data), getattr(options, "workers", 4))

    def files(self, part: str) -> Iterator[Path]:
        return (example.path for example in self.parts[part])

    def load(self, number: int, side: int, rng: random.Random) -> tuple[Tensor, Tensor]:
        path, short = self.data.train[number].path, round(side * RESIZE)
        width, height = short_side_size(*image_size(path), short, str(path))
        at = (rng.randint(0, width - side), rng.randint(0, height - side))
        return View(path, short, side, at, flip=rng.random() < 0.5).pixels(), self.labels["train"][number]

    def new_head(self, width: int) -> nn.Module:
        head = nn.Linear(width, len(self.classes))
        nn.init.normal_(head.weight, std=0.01)
        nn.init.zeros_(head.bias)
        return head

    def loss(self, head: nn.Module, seen: Seen, labels: Sequence[Tensor]) -> Tensor:
        return loss_of(head(seen.cls).float(), torch.stack(list(labels)).to(seen.cls.device))

    def saved_head(self, head: Any) -> Head:
        return Head("classify", head.weight.detach().cpu(), head.bias.detach().cpu(), self.about())

    def about(self) -> dict[str, Any]:
        return {"feature": "global", "classes": self.classes, "several": self.data.several}

    @torch.inference_mode()
    def score(self, head: nn.Module, look: Look, part: str, side: int) -> Scores:
        examples = self.parts[part]
        device, logits, step = next(head.parameters()).device, [], 16
        with ThreadPoolExecutor(self.workers) as pool:
            views = pool.map(View.pixels, [centre_view(example.path, side) for example in examples])
            for start in progress(range(0, len(examples), step), "scoring"):
                images = torch.stack([next(views) for _ in examples[start : start + step]])
                logits.append(head(look(images.to(device)).cls).float().cpu())
        return score(torch.cat(logits), self.labels[part])

    def fit(self, extractor: CachedExtractor, side: int, options: Any, seeds: int) -> Fitted:
        """On cached features of centre crops, at nine rates at once."""
        from veca.tasks.base import metrics

        def seen(part: str, examples: Sequence[Example]) -> Tensor:
            return whole(extractor, examples, side, part)

        data, how = self.data, Training(epochs=options.epochs)
        train_features, test_features = seen("train", data.train), seen("test", data.test)
        validation = seen("val", data.validation) if data.validation else None
        others = {name: seen(name, examples) for name, examples in self.also.items()}
        scores, choices, first = [], [], None
        for seed in range(seeds):
            weight, bias, choice = train(data, train_features, validation, how, seed)
            choices.append(choice)
            found = score(nn.functional.linear(test_features, weight, bias).cpu(), self.labels["test"])
            for name, features in others.items():
                logits = nn.functional.linear(features, weight, bias).cpu()
                answers = [example.labels for example in self.also[name]]
                found[f"top1 {name}"] = metrics.accuracy_of_any(logits, answers)["top1"]
            scores.append(found)
            first = first or Head("classify", weight, bias, self.about())
        assert first is not None
        return Fitted(scores, first, {"choices": choices})

    @classmethod
    def answer(cls, head: Head, backbone: Backbone, path: Path, target: Path) -> dict[str, Any]:
        """The five best classes; scores add up to 1 over all classes, or are each in 0…1 where several may hold."""
        extractor = Extractor(backbone, cores=head.about["cores"])
        seen = extractor.compute(centre_view(path, head.about["size"]).pixels()[None])
        logits = head(seen.cls.cpu())[0]
        scores = logits.sigmoid() if head.about["several"] else logits.softmax(0)
        best = scores.topk(min(BEST, len(scores)))
        names = head.about["classes"]
        return {
            "classes": [
                {"class": names[index], "score": round(value, 4)}
                for value, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
            ]
        }


def whole(extractor: CachedExtractor, examples: Sequence[Example], side: int, what: str) -> Tensor:  # V×D
    """Global features of centre crops, on the device of the backbone."""
    views = [centre_view(example.path, side) for example in examples]
    return extractor.whole(views, f"{what}, {extractor.backbone.name}").to(extractor.backbone.device)


def other_label_sets(paths: Sequence[Path], data: ClassData) -> dict[str, tuple[Example, ...]]:
    """`--also`: other images or labels of the same classes, by name."""
    if paths and data.several:
        raise InputError("--also needs training images with exactly one label each")
    return {path.stem: read_examples(path, data.classes, data.test) for path in paths}


TASK = Classify
