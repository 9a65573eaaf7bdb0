"""Segmentation: a linear layer on each patch feature with the global feature appended (docs/probes.md)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn

from veca.backbones import Backbone
from veca.errors import InputError
from veca.files import read_text
from veca.progress import progress
from veca.tasks.base.dense import Pixels, upsample, whole_image
from veca.tasks.base.heads import Head
from veca.tasks.base.options import DenseFineTune, DenseProbe
from veca.tasks.base.pairs import IGNORE, Array, MaskReader, check_pairs, find_pairs, read_values
from veca.tasks.base.presets import SEGMENT, Layout, SegmentPreset, segment_preset
from veca.tasks.base.views import save_picture

OPACITY = 0.6
LEAST = 0.001  # classes that take less of the picture are not listed


@dataclass
class MaskOptions:
    """What the masks mean."""

    preset: Literal["voc2012", "context60", "ade20k", "coco_stuff", "coco_object", "cityscapes"] | None = None
    """what a published data set's files and labels mean"""
    classes: int | None = None
    """number of classes; without it and without a preset, what classes.txt or the training masks show"""
    ignore: int | None = None
    """the stored label that does not count (255)"""
    offset: int | None = None
    """added to stored labels (0); those that fall below 0 do not count"""


@dataclass
class SegmentProbe(MaskOptions, DenseProbe):
    """Train a linear head on every patch feature (global feature appended): mIoU, pixel accuracy, IoU per class.

    DIR holds train/images, train/masks and val/ (or test/) in the same way, masks as index or palette PNG with the
    names of the images; or the layout of the preset. classes.txt in DIR names the classes, one a line.

    Examples:
      veca probe segment --data voc-seg/ --preset voc2012 --model teacher/ --model random:veca_small --size 448
      veca probe segment --data ADEChallengeData2016/ --preset ade20k --model veca-s14 --cores 8,16,32,64 --augment
      veca probe segment --data mine/ --ignore 0 --offset -1 --model veca-s14
    """


@dataclass(kw_only=True)
class SegmentFineTune(MaskOptions, DenseFineTune):
    """Fine-tune for masks: a linear head on every patch (global feature appended), and the backbone below it.

    DIR holds train/images, train/masks and val/ (or test/) in the same way, or the layout of the preset, as
    `veca probe segment` reads them. All of train/ is used, the last weights are kept.

    Examples:
      veca finetune segment --data voc-seg/ --preset voc2012 --model veca-s14 --size 448 --out runs/voc
      veca finetune segment --data mine/ --ignore 0 --offset -1 --model veca-s14 --cores 16
    """


class Segmentation:
    """Cross-entropy at the label's resolution, ignored pixels left out."""

    main, better = "mIoU", "higher"
    rate = 3e-3  # chosen on held-out training images of VOC

    def __init__(self, preset: SegmentPreset) -> None:
        self.preset = preset
        self.outputs = preset.classes
        self.zoom = preset.zoom
        self.trim: tuple[int, int] | None = None
        self.read_mask = MaskReader(preset)

    def read(self, path: Path) -> Array:
        return self.read_mask(path)

    def loss(self, maps: Sequence[Tensor], labels: Sequence[Tensor]) -> Tensor:
        return pixel_loss(maps, labels)

    def decode(self, maps: Tensor) -> Tensor:
        return maps

    def score(self, predictions: Iterator[tuple[Tensor, Tensor]]) -> dict[str, Any]:
        from veca.tasks.base import metrics  # only scoring needs torchmetrics: transformers models use tasks too

        return metrics.segmentation(predictions, self.outputs)

    def about(self) -> dict[str, Any]:
        """What head.json keeps for `predict`."""
        return {"classes": list(self.class_names()), "zoom": self.zoom}

    def class_names(self) -> tuple[str, ...]:
        return self.preset.names or tuple(str(number) for number in range(self.outputs))


def pixel_loss(maps: Sequence[Tensor], labels: Sequence[Tensor], ignore: int = IGNORE) -> Tensor:
    """maps: K×h×w each, labels: H×W each → mean over all counted pixels of the batch."""
    total, count = maps[0].new_zeros(()), 0
    for part, label in zip(maps, labels, strict=True):
        logits = upsample(part, (label.shape[0], label.shape[1]))[None]
        target = label.long()[None]
        total = total + nn.functional.cross_entropy(logits, target, ignore_index=ignore, reduction="sum")
        count += int((target != ignore).sum())
    return total / max(count, 1)


class Segment(Pixels):
    name, summary = "segment", "a linear head on every patch; images and index masks"
    probe_options, finetune_options = SegmentProbe, SegmentFineTune

    @classmethod
    def open(cls, options: Any) -> Segment:
        data = find_pairs(options.data, "masks", segment_preset(options.preset).layout if options.preset else None)
        kind = Segmentation(mask_labels(options, [pair.label for pair in data.train]))
        check_pairs([*data.train, *data.test], kind.read_mask, "masks")
        return cls(kind, data, kind.class_names())

    @classmethod
    def answer(cls, head: Head, backbone: Backbone, path: Path, target: Path) -> dict[str, Any]:
        """`<name>.mask.png` (palette indices) and `<name>.overlay.png`; the share of the picture each class takes."""
        image, logits = whole_image(head, backbone, path, lambda maps: maps)
        colours = palette(len(head.about["classes"])).numpy()
        mask = logits.argmax(0).numpy().astype(np.uint8 if len(colours) <= 256 else np.uint16)
        indexed = Image.fromarray(mask)
        if len(colours) <= 256:
            indexed.putpalette(colours.tobytes())
        names = head.about["classes"]
        shares = {int(value): float((mask == value).mean()) for value in np.unique(mask)}
        largest = sorted((item for item in shares.items() if item[1] >= LEAST), key=lambda item: -item[1])
        seen = [value for value, _ in largest if names[value] != "background"]  # the photo itself shows the background
        covered = Image.fromarray((np.isin(mask, seen) * round(255 * OPACITY)).astype(np.uint8))
        overlay = Image.composite(Image.fromarray(colours[mask]), image, covered)
        legend = [(names[value], tuple(colours[value].tolist())) for value in seen]
        save_picture(indexed, target.with_name(target.name + ".mask.png"))
        save_picture(with_legend(overlay, legend), target.with_name(target.name + ".overlay.png"))
        return {
            "mask": target.name + ".mask.png",
            "overlay": target.name + ".overlay.png",
            "classes": [{"class": names[value], "share": round(share, 4)} for value, share in largest],
        }


def mask_labels(settings: Any, masks: list[Path]) -> SegmentPreset:
    """The preset, or what the command line, classes.txt and the training masks say."""
    given = {name: getattr(settings, name) for name in ("classes", "ignore", "offset")}
    chosen = {name: value for name, value in given.items() if value is not None}
    if settings.preset:
        return replace(SEGMENT[settings.preset], **chosen)
    listed = settings.data / "classes.txt"
    names = tuple(read_text(listed).split("\n")) if listed.is_file() else ()
    names = tuple(name.strip() for name in names if name.strip())
    preset = replace(SegmentPreset(Layout("", ""), len(names), names), **chosen)
    if preset.classes == 0:
        found: set[int] = set()
        for path in progress(masks, "counting classes", len(masks)):
            found.update(np.unique(read_values(path)).tolist())
        preset = replace(preset, classes=max(found - {preset.ignore}, default=0) + preset.offset + 1)
    if preset.classes < 2:
        raise InputError(f"{settings.data}: {preset.classes} class in the masks; a probe needs at least 2")
    if preset.names and len(preset.names) != preset.classes:
        raise InputError(f"{listed}: names {len(preset.names)} classes, not {preset.classes}")
    return preset


def palette(classes: int) -> Tensor:  # K×3 uint8
    """Colours as PASCAL VOC assigns them: the bits of the class number spread over red, green and blue."""
    number = torch.arange(classes)
    colours = torch.zeros(classes, 3, dtype=torch.long)
    for bit in range(8):
        for channel in range(3):
            colours[:, channel] |= ((number >> (3 * bit + channel)) & 1) << (7 - bit)
    return colours.to(torch.uint8)


def with_legend(image: Image.Image, entries: Sequence[tuple[str, tuple[int, ...]]]) -> Image.Image:
    """The picture with a strip of named colours below it."""
    row, pad = 18, 6
    place, x, y = [], pad, pad
    probe = ImageDraw.Draw(image)
    for name, colour in entries:
        width = row + round(probe.textlength(name)) + 2 * pad
        if x + width > image.width and x > pad:
            x, y = pad, y + row
        place.append((x, y, name, colour))
        x += width
    canvas = Image.new("RGB", (image.width, image.height + y + row + pad), "white")
    canvas.paste(image)
    draw = ImageDraw.Draw(canvas)
    for x, y, name, colour in place:
        top = image.height + y
        draw.rectangle((x, top, x + 12, top + 12), fill=colour, outline="black")
        draw.text((x + row, top), name, fill="black")
    return canvas


TASK = Segment
