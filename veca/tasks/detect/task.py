"""The task: photos with boxes → a view squeezed into a square → patch features → RF-DETR → boxes, scored by mAP.

head.json has, beside what every head has: `classes`, `width` (D), `queries`, `groups` and `layers` of the decoder.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn

from veca.backbones import Backbone
from veca.devices import fast_bfloat16
from veca.errors import InputError, require
from veca.extract.extractor import Extractor
from veca.images import open_image
from veca.progress import progress
from veca.tasks.base.batches import endless_batches
from veca.tasks.base.coco import CocoData, Picture, find_json, read_coco
from veca.tasks.base.contract import Fitted, Look, Scores, Seen, Task
from veca.tasks.base.features import CachedExtractor, Features
from veca.tasks.base.heads import ModuleHead
from veca.tasks.base.options import FineTuneOptions, Numbers, ProbeOptions
from veca.tasks.base.views import View, save_picture
from veca.tasks.detect import head as rf_detr
from veca.tasks.detect.scores import Found, average_precision
from veca.tasks.detect.yolo import read_yolo
from veca.training.schedule import learning_rate

SHOWN = 0.3  # score from which `veca probe predict` draws a box
LEAST = 0.3  # of a thing must be left in a random crop for its box to count
SMALLEST = 0.6  # side of a random crop, as a share of the photo
MOST = {"width": 1 << 14, "queries": 1 << 12, "groups": 64, "layers": 64}  # what a head.json may ask for
COLOURS = ("#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#008080", "#9a6324", "#800000", "#808000", "#000075")


@dataclass
class DetectorOptions:
    """RF-DETR's own."""

    queries: int = 100
    """boxes it can say at once; at most one a patch. RF-DETR's own: 300"""
    groups: int = 1
    """copies of the queries that learn side by side and only while training. RF-DETR's own, for a GPU: 13"""
    layers: int = 3
    """of the decoder"""


@dataclass
class DetectProbe(DetectorOptions, ProbeOptions):
    """Train a detector (RF-DETR) on frozen patch features, computed once: mAP, AP of each class.

    DIR holds train.json and test.json (or val.json) in COCO's format with the photos in train/ and test/, COCO's own
    annotations/ and train2017/, or YOLO's images/train/ and labels/train/ with classes.txt. Photos are squeezed into a
    square. Needs transformers 5 (veca[transformers]).

    Examples:
      veca probe detect --data boxes/ --model teacher/ --model veca-s14 --cores 8,64 --size 252 --out boxes-probe/
      veca probe predict boxes-probe/heads/veca-s14-252px-64cores photo.jpg --out seen/
    """

    size: Numbers = (252,)
    """sides of the square, rounded to whole patches"""
    steps: int = 1000
    """optimiser steps"""
    batch: int = 8
    """photos a step"""
    rate: float = 3e-4
    """highest learning rate; 10 % of the steps warm up to it, then a cosine to 0"""
    seeds: int = 1
    """detectors trained from different seeds; the table shows mean ± deviation"""


@dataclass(kw_only=True)
class DetectFineTune(DetectorOptions, FineTuneOptions):
    """Fine-tune for boxes: a detector (RF-DETR) on the patch features, and the backbone below it.

    DIR as `veca probe detect` reads it: COCO's JSON or YOLO's text files. Random crops and mirror images are squeezed
    into a square. Where there are val and test, the best epoch on val is kept. On a GPU: --size 560 --batch 16
    --groups 13 --queries 300. Needs transformers 5 (veca[transformers]).

    Examples:
      veca finetune detect --data boxes/ --model veca-s14 --head-only --size 252 --out runs/boxes
      veca finetune detect --data coco/ --model veca-s14 --size 560 --groups 13 --queries 300 --epochs 50
    """

    size: int = 448
    """side of the square, rounded to whole patches"""
    batch: int = 8
    """photos a step"""
    head_lr: float = 3e-4
    """highest rate of the detector"""


class Detect(Task):
    name, summary = "detect", "a detector (RF-DETR) on the patches; boxes as COCO's JSON or YOLO's text files"
    probe_options, finetune_options = DetectProbe, DetectFineTune
    main, better, linear = "mAP", "higher", False

    def __init__(self, data: CocoData, options: Any = None) -> None:
        chosen = options or DetectorOptions()
        self.classes = list(data.classes)
        self.shape = {name: getattr(chosen, name) for name in ("queries", "groups", "layers")}
        self.parts: dict[str, Sequence[Picture]] = {
            "train": data.train,
            "validation": data.validation,
            "test": data.test,
        }

    @classmethod
    def open(cls, options: Any) -> Detect:
        require("pycocotools", "probe")
        rf_detr.require_rf_detr()
        for name in ("queries", "groups", "layers"):
            if not 1 <= getattr(options, name) <= MOST[name]:
                raise InputError(f"--{name} lies between 1 and {MOST[name]}, not {getattr(options, name)}")
        for name in ("steps", "batch", "rate"):
            if getattr(options, name, 1) <= 0:
                raise InputError(f"--{name} must be more than 0, not {getattr(options, name)}")
        data = read_coco(options.data) if find_json(options.data) else read_yolo(options.data)
        for part in (data.train, data.test):
            if not any(picture.things for picture in part):
                raise InputError(f"{options.data}: one of its parts has no box at all")
        return cls(data, options)

    def files(self, part: str) -> Iterator[Path]:
        return (picture.path for picture in self.parts[part])

    def load(self, number: int, side: int, rng: random.Random) -> tuple[Tensor, Tensor]:
        picture = self.parts["train"][number]
        share = rng.uniform(SMALLEST, 1)
        left, top = (rng.uniform(0, 1 - share) for _ in range(2))
        crop, flip = (left, top, left + share, top + share), rng.random() < 0.5
        image = open_image(picture.path)
        part = (crop[0] * image.width, crop[1] * image.height, crop[2] * image.width, crop[3] * image.height)
        image = image.resize((side, side), Image.Resampling.BICUBIC, box=part)
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else image
        return torch.from_numpy(np.array(image)), targets(picture, crop, flip)

    def new_head(self, width: int) -> nn.Module:
        head: nn.Module = rf_detr.new_head(width, self.classes, **self.shape)
        return head

    def loss(self, head: nn.Module, seen: Seen, labels: Sequence[Tensor]) -> Tensor:
        return rf_detr.loss(head, rf_detr.on_map(seen.patches), [label.to(seen.patches.device) for label in labels])

    def saved_head(self, head: nn.Module) -> ModuleHead:
        tensors = {name: tensor.detach().cpu().clone() for name, tensor in head.state_dict().items()}
        width = tensors["model.backbone.projector.projector_layer.conv1.conv.weight"].shape[1]
        about = {"feature": "patches", "classes": self.classes, "width": width, **self.shape}
        return ModuleHead(self.name, tensors, about)

    @classmethod
    def module(cls, head: ModuleHead) -> nn.Module:
        about = head.about
        names, shape = about.get("classes"), {name: about.get(name) for name in MOST}
        if not isinstance(names, list) or not 0 < len(names) <= MOST["width"]:
            raise InputError("head.json: its classes are no list of names")
        for name, most in MOST.items():
            if not isinstance(shape[name], int) or not 1 <= shape[name] <= most:  # type: ignore[operator]
                raise InputError(f"head.json: {name} lies between 1 and {most}, not {str(shape[name])[:40]}")
        module: nn.Module = rf_detr.new_head(classes=names, **shape)  # type: ignore[arg-type]
        head.fill(module)
        return module

    @torch.inference_mode()
    def score(self, head: nn.Module, look: Look, part: str, side: int) -> Scores:
        pictures, device, step = self.parts[part], next(head.parameters()).device, 8

        def maps() -> Iterator[Tensor]:
            with ThreadPoolExecutor(4) as pool:
                views = pool.map(View.pixels, [whole(picture, side) for picture in pictures])
                for start in range(0, len(pictures), step):
                    images = torch.stack([next(views) for _ in pictures[start : start + step]])
                    yield look(images.to(device)).patches

        return self.judge(head, maps(), part)

    def judge(self, head: nn.Module, maps: Iterator[Tensor], part: str) -> Scores:
        """Scores from the patches of a part's photos, B×N×D each."""
        found: list[Found] = []
        pictures = self.parts[part]
        shown = iter(progress(range(len(pictures)), "scoring"))
        with torch.inference_mode():
            for patches in maps:
                out = head(rf_detr.on_map(patches.float()))
                for one in rf_detr.decode(out.logits, out.pred_boxes):
                    found.append(tuple(tensor.cpu() for tensor in one))  # type: ignore[arg-type]
                    next(shown, None)
        next(shown, None)
        return average_precision(found, pictures, len(self.classes))

    def fit(self, extractor: CachedExtractor, side: int, options: Any, seeds: int) -> Fitted:
        """On cached features: AdamW, warmed up, then a cosine to 0."""
        backbone, train, test = extractor.backbone, self.parts["train"], self.parts["test"]
        labels = [targets(picture, (0, 0, 1, 1), False) for picture in train]
        cached = extractor.dense([whole(picture, side) for picture in train], f"train, {backbone.name}")
        seen = extractor.dense([whole(picture, side) for picture in test], f"test, {backbone.name}")
        scores, first = [], None
        for seed in range(seeds):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                head = self.new_head(backbone.width).to(backbone.device).train()
            self.train(head, cached, labels, options, seed)
            head.eval()
            patches = (seen.dense(number)[1][None].to(backbone.device) for number in range(len(test)))
            scores.append(self.judge(head, patches, "test"))
            first = first or self.saved_head(head)
        assert first is not None
        return Fitted(scores, first, {"steps": options.steps, "batch": options.batch})

    def train(self, head: nn.Module, features: Features, labels: Sequence[Tensor], options: Any, seed: int) -> None:
        device, steps = next(head.parameters()).device, options.steps
        optimiser = torch.optim.AdamW(head.parameters(), lr=options.rate, weight_decay=1e-4)
        batches = endless_batches(
            len(features),
            options.batch,
            random.Random(seed),
            lambda number: (features.dense(number)[1], labels[number]),
        )
        bfloat16 = device.type != "mps" and fast_bfloat16(device)
        for step in progress(range(steps), f"training, seed {seed}", steps):
            for group in optimiser.param_groups:
                group["lr"] = learning_rate(step, steps, round(0.1 * steps), options.rate, 0.0)
            batch = next(batches)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bfloat16):
                maps = rf_detr.on_map(torch.stack([patches for patches, _ in batch]).to(device))
                loss = rf_detr.loss(head, maps, [label.to(device) for _, label in batch])
            optimiser.zero_grad()
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimiser.step()
        batches.close()

    @classmethod
    def answer(cls, head: ModuleHead, backbone: Backbone, path: Path, target: Path) -> dict[str, Any]:
        """`<name>.boxes.png`, and the boxes in pixels of the photo: left, top, right, bottom."""
        detector = cls.module(head).to(backbone.device).eval()
        image = open_image(path)
        view = View(path, None, head.about["size"], None)
        seen = Extractor(backbone, cores=head.about["cores"]).compute(view.pixels()[None])
        with torch.inference_mode():
            out = detector(rf_detr.on_map(seen.patches))
        scores, labels, corners = rf_detr.decode(out.logits, out.pred_boxes)[0]
        sides = corners.new_tensor(image.size * 2)
        rows = [
            {"class": head.about["classes"][label], "score": round(score, 4), "box": [round(one, 1) for one in box]}
            for score, label, box in zip(scores.tolist(), labels.tolist(), (corners * sides).tolist(), strict=True)
            if score >= SHOWN
        ]
        save_picture(with_boxes(image, rows, head.about["classes"]), target.with_name(target.name + ".boxes.png"))
        return {"picture": target.name + ".boxes.png", "boxes": rows}


def whole(picture: Picture, side: int) -> View:
    """All of a photo, squeezed into the square."""
    return View(picture.path, None, side, None)


def targets(picture: Picture, crop: tuple[float, float, float, float], flip: bool) -> Tensor:  # M×5
    """Class, centre and size as shares of a crop (left, top, right, bottom as shares of the photo)."""
    rows = []
    for thing in picture.things:
        sides = (picture.width, picture.height) * 2
        box = [value / side for value, side in zip(thing.box, sides, strict=True)]
        left, top = max(box[0], crop[0]), max(box[1], crop[1])
        right, bottom = min(box[2], crop[2]), min(box[3], crop[3])
        area = (box[2] - box[0]) * (box[3] - box[1])
        if thing.crowd or right <= left or bottom <= top or (right - left) * (bottom - top) < LEAST * area:
            continue
        wide, high = crop[2] - crop[0], crop[3] - crop[1]
        x, y = ((left + right) / 2 - crop[0]) / wide, ((top + bottom) / 2 - crop[1]) / high
        rows.append((thing.label, 1 - x if flip else x, y, (right - left) / wide, (bottom - top) / high))
    return torch.tensor(rows, dtype=torch.float32).reshape(-1, 5)


def with_boxes(image: Image.Image, rows: Sequence[dict[str, Any]], classes: Sequence[str]) -> Image.Image:
    """Boxes over the photo, each with its class and score; the best is drawn last."""
    canvas = image.copy()
    draw = ImageDraw.Draw(canvas)
    line = max(2, round(min(image.size) / 160))
    size = max(11, round(min(image.size) / 28))
    for row in reversed(rows):
        colour = COLOURS[classes.index(row["class"]) % len(COLOURS)]
        left, top, right, bottom = row["box"]
        draw.rectangle((left, top, max(left, right), max(top, bottom)), outline=colour, width=line)
        text = f"{row['class']} {row['score']:.2f}"
        from_left, _, to_right, to_bottom = draw.textbbox((left + line, top), text, font_size=size)
        draw.rectangle((from_left - line, top, to_right + line, to_bottom + line), fill=colour)
        draw.text((left + line, top), text, fill="white", font_size=size)
    return canvas
