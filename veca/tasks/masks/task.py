"""The task: its options, its data seen as squares, training on cached or living features, scores and answers.

head.json has `classes`, `stuff` (numbers of those without instances), `queries`, `layers` and `fine`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from veca.backbones import Backbone, load_backbone
from veca.devices import fast_bfloat16
from veca.errors import InputError
from veca.extract.extractor import Extractor
from veca.images import image_size, open_image, short_side_size
from veca.progress import progress
from veca.tasks.base.batches import endless_batches
from veca.tasks.base.contract import Fitted, Look, Scores, Seen, Task
from veca.tasks.base.features import CachedExtractor
from veca.tasks.base.heads import ModuleHead
from veca.tasks.base.options import FineTuneOptions, Numbers, ProbeOptions
from veca.tasks.base.views import View, label_box, save_picture
from veca.tasks.masks.decode import instances, panoptic
from veca.tasks.masks.drawing import numbered, overlay
from veca.tasks.masks.head import Found, MaskHead
from veca.tasks.masks.labels import Example, MaskData, read_masks
from veca.tasks.masks.loss import loss_of

BATCH, RATE, DECAY, WARMUP, CLIP = 8, 1e-3, 0.05, 0.05, 1.0  # of a probe's training
ZOOM = 1.5  # the closest random crop sees the photo's short side at this many times the crop


@dataclass
class MaskOptions:
    """The head's shape."""

    queries: int = 50
    """learned queries: the most segments that can be found in a photo"""
    layers: int = 3
    """further core-periphery blocks in which queries and cores read the patches"""
    fine: int | None = None
    """draw a VECA's masks (a probe also scores them) with this many pixels from one value to the next, a divisor of its
    patch size: the same head on finer patches, which look along the same cores"""


@dataclass
class MasksProbe(MaskOptions, ProbeOptions):
    """Train a mask head on a frozen backbone: panoptic quality (PQ) and mask mAP.

    DIR is in COCO's format (train.json and val.json or test.json with polygons or RLE, photos beside them), or holds
    train/images, train/instances and val/ (or test/) in the same way: PNGs with 1000·class + number for each thing, the
    number alone where there is one class, 0 for nothing, 65535 (or 255) for what does not count; classes.txt names
    the classes, one a line. Photos are squeezed into a square.

    Examples:
      veca probe masks --data voc-instances/ --model teacher/ --model veca-s14 --cores 8,64 --size 336
      veca probe masks --data coco/ --model veca-s14 --steps 20000 --queries 100 --fine 7 --dtype auto
    """

    size: Numbers = (448,)
    """sides of the square, rounded to whole patches"""
    seeds: int = 1
    """heads trained from different seeds; the table shows mean ± deviation"""
    steps: int = 2000
    """optimiser steps, 8 photos each"""


@dataclass(kw_only=True)
class MasksFineTune(MaskOptions, FineTuneOptions):
    """Fine-tune for masks: queries that join the cores, and the backbone below them.

    DIR as for `veca probe masks`. Half of the photos are seen whole, half as random crops; all of train/ is used.

    Examples:
      veca finetune masks --data voc-instances/ --model veca-s14 --size 448 --head-only --epochs 40 --out runs/masks
      veca finetune masks --data coco/ --model veca-s14 --queries 100 --out runs/coco
    """

    size: int = 448
    """side of the square, rounded to whole patches"""
    batch: int = 8
    """photos a step"""
    head_lr: float = 5e-4
    """highest rate of the head"""


class Masks(Task):
    name, summary = "masks", "a mask and a class for every thing; COCO's JSON or instance PNGs"
    probe_options, finetune_options = MasksProbe, MasksFineTune
    main, better, linear = "PQ", "higher", False

    def __init__(self, data: MaskData, queries: int, layers: int, fine: int | None = None) -> None:
        self.data, self.classes, self.parts = data, list(data.classes), dict(data.parts)
        self.shape = {"queries": queries, "layers": layers}
        self.fine = fine

    @classmethod
    def open(cls, options: Any) -> Masks:
        for name, most in (("queries", 4096), ("layers", 64)):
            if not 1 <= getattr(options, name) <= most:
                raise InputError(f"--{name} lies between 1 and {most}, not {getattr(options, name)}")
        if options.fine is not None:
            check_fine(options.fine, [options.model] if isinstance(options.model, str) else options.model)
        return cls(read_masks(options.data), options.queries, options.layers, options.fine)

    def files(self, part: str) -> Iterator[Path]:
        return (path for example in self.parts[part] for path in {example.path, example.file})

    def load(self, number: int, side: int, rng: random.Random) -> tuple[Tensor, Tensor]:
        """The whole photo squeezed, or a random square of it; mirrored half of the time."""
        example: Example = self.parts["train"][number]
        view = View(example.path, None, side, None, flip=rng.random() < 0.5)
        box = (0, 0, *image_size(example.path))
        if rng.random() < 0.5:
            short = round(side * rng.uniform(1, ZOOM))
            resized = short_side_size(*box[2:], short, str(example.path))
            at = (rng.randint(0, resized[0] - side), rng.randint(0, resized[1] - side))
            box = label_box(at, side, resized, (box[2], box[3]))
            view = replace(view, short=short, at=at)
        return view.pixels(), self.label(example, side, view.flip, box)

    def label(
        self, example: Example, side: int, flip: bool = False, box: tuple[int, int, int, int] | None = None
    ) -> Tensor:
        """The label of a square view, S×S."""
        left, top, right, bottom = box or (0, 0, *image_size(example.path))
        picture = Image.fromarray(self.data.read(example)[top:bottom, left:right])
        values = np.array(picture.resize((side, side), Image.Resampling.NEAREST))
        return torch.from_numpy(values[:, ::-1].copy() if flip else values)

    # Head and loss.

    def new_head(self, width: int) -> MaskHead:
        return MaskHead(width, len(self.classes), self.shape["queries"], self.shape["layers"])

    def loss(self, head: nn.Module, seen: Seen, labels: Sequence[Tensor]) -> Tensor:
        outputs = head(seen.cores, seen.patches, square_grid(seen.patches))
        with torch.autocast(seen.patches.device.type, enabled=False):
            return loss_of(outputs, labels)

    def saved_head(self, head: nn.Module) -> ModuleHead:
        about = {"classes": self.classes, "stuff": list(self.data.stuff), **self.shape, "fine": self.fine}
        return ModuleHead(self.name, {name: tensor.cpu() for name, tensor in head.state_dict().items()}, about)

    @classmethod
    def module(cls, head: Any) -> MaskHead:
        try:
            features = head.tensors["enter.weight"].shape[1]
            sizes = (features, len(head.about["classes"]), int(head.about["queries"]), int(head.about["layers"]))
            if not (0 < sizes[2] <= 4096 and 0 < sizes[3] <= 64):
                raise ValueError(sizes)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise InputError(f"not a whole head of masks: {error!r}") from None
        module = MaskHead(*sizes)
        head.fill(module)
        return module

    # Score.

    def score(self, head: nn.Module, look: Look, part: str, side: int) -> Scores:
        device = next(head.parameters()).device

        def seen(number: int) -> Seen:
            view = View(self.parts[part][number].path, None, side, None)
            return look(view.pixels()[None].to(device))

        return self.judge(head, self.parts[part], seen)

    @torch.inference_mode()
    def judge(
        self,
        head: nn.Module,
        examples: Sequence[Example],
        seen: Callable[[int], Seen],
        finer: Callable[[int], Seen] | None = None,  # the same photos on a finer lattice, where masks are drawn
    ) -> Scores:
        from veca.tasks.masks.scores import MaskScores  # only scoring needs torchmetrics

        scores = MaskScores(len(self.classes), self.data.stuff)
        for number, example in progress(enumerate(examples), "scoring", len(examples)):
            label = torch.from_numpy(self.data.read(example))
            size = (label.shape[0], label.shape[1])
            found = last(head, seen(number), finer and finer(number))
            segments = panoptic(found.classes[0], found.masks[0], size, self.data.stuff)
            surest = instances(found.classes[0], found.masks[0], size)
            scores.add(label, segments, surest, self.data.outlines(example))
        return scores.result()

    # A probe: on the cached features of each photo and of its mirror image.

    def fit(self, extractor: CachedExtractor, side: int, options: Any, seeds: int) -> Fitted:
        backbone, examples, tests = extractor.backbone, self.parts["train"], self.parts["test"]
        shown = [View(example.path, None, side, None, flip) for flip in (False, True) for example in examples]
        train = extractor.dense(shown, f"train, {backbone.name}")
        views = [View(example.path, None, side, None) for example in tests]
        test, finer = extractor.dense(views, f"test, {backbone.name}"), None
        if options.fine is not None and backbone.bank:
            reading = replace(backbone).reading(backbone.share, options.fine, backbone.patches)
            finer = CachedExtractor(reading, extractor.cores, extractor.cache).dense(views, "test, finer")

        def example(number: int) -> tuple[Seen, Tensor]:
            flip, place = divmod(number, len(examples))
            return features_of(train, number), self.label(examples[place], side, bool(flip))

        scores, first = [], None
        for seed in range(seeds):
            head = self.train_head(example, len(shown), backbone, options.steps, seed)
            found = self.judge(head, tests, partial(features_of, test))
            if finer is not None:
                fine = self.judge(head, tests, partial(features_of, test), partial(features_of, finer))
                found |= {f"{name}_fine": fine[name] for name in ("PQ", "mask_mAP")}
            scores.append(found)
            first = first or self.saved_head(head)
        assert first is not None
        return Fitted(scores, first, {})

    def train_head(
        self, example: Callable[[int], tuple[Seen, Tensor]], count: int, backbone: Backbone, steps: int, seed: int
    ) -> MaskHead:
        device = backbone.device
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            head = self.new_head(backbone.width).to(device).train()
        optimiser = torch.optim.AdamW(head.parameters(), lr=RATE, weight_decay=DECAY)
        warm = max(1, round(WARMUP * steps))
        rate = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min((step + 1) / warm, 1 - step / steps))
        drawn = endless_batches(count, BATCH, random.Random(seed), example)
        for _, batch in zip(progress(range(steps), f"training, seed {seed}", steps), drawn, strict=False):
            parts = zip(*(seen for seen, _ in batch), strict=True)
            seen = Seen(*(torch.cat(part).to(device) for part in parts))
            optimiser.zero_grad()
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=fast_bfloat16(device)):
                loss = self.loss(head, seen, [label for _, label in batch])
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(head.parameters(), CLIP)
            optimiser.step()
            rate.step()
        drawn.close()
        return head.eval()

    # At work on a photo.

    @classmethod
    def answer(cls, head: Any, backbone: Backbone, path: Path, target: Path) -> dict[str, Any]:
        """`<name>.instances.png` (numbers as in the data), `<name>.overlay.png`, and what was found."""
        about, module = head.about, cls.module(head).to(backbone.device).eval()
        pixels, budget = View(path, None, about["size"], None).pixels()[None], about["cores"]
        seen, finer = seen_by(backbone, budget, pixels), None
        if about.get("fine") and backbone.bank:
            finer = seen_by(replace(backbone).reading(backbone.share, about["fine"], backbone.patches), budget, pixels)
        image, found = open_image(path), last(module, seen, finer)
        segments = panoptic(found.classes[0], found.masks[0], (image.height, image.width), about["stuff"])
        segments.sort(key=lambda segment: -segment.score)
        numbers = numbered(segments, image.size, about["stuff"], len(about["classes"]))
        save_picture(numbers, target.with_name(target.name + ".instances.png"))
        save_picture(overlay(image, segments, about["classes"]), target.with_name(target.name + ".overlay.png"))
        return {
            "instances": target.name + ".instances.png",
            "overlay": target.name + ".overlay.png",
            "segments": [
                {
                    "class": about["classes"][segment.label],
                    "score": round(segment.score, 4),
                    "share": round(float(segment.mask.float().mean()), 4),
                }
                for segment in segments
            ],
        }


def check_fine(fine: int, models: Sequence[str]) -> None:
    for source in models:
        backbone = load_backbone(source)
        if backbone.bank and (fine < 1 or backbone.patch_size % fine):
            raise InputError(f"--fine must divide the patch size {backbone.patch_size} of {source}, not {fine}")


def square_grid(patches: Tensor) -> tuple[int, int]:
    side = round(patches.shape[1] ** 0.5)
    return side, side


@torch.inference_mode()
def last(head: nn.Module, seen: Seen, finer: Seen | None = None) -> Found:
    """What the queries of a square view say in the end, on the CPU."""
    looking = finer and (finer.patches.float(), square_grid(finer.patches))
    found = head(seen.cores.float(), seen.patches.float(), square_grid(seen.patches), looking)[-1]
    return Found(found.classes.cpu(), found.masks.cpu())


def seen_by(backbone: Backbone, cores: int | None, pixels: Tensor) -> Seen:
    found = Extractor(backbone, cores=cores).compute(pixels)
    return Seen(found.cls, found.patches, found.cores)


def features_of(features: Any, number: int) -> Seen:
    """A cached view as a batch of one."""
    whole, patches = features.dense(number)
    return Seen(whole[None], patches[None], features.cores(number)[None])
