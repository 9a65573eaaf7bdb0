"""What is where in a photo: one number for each pixel, from instance PNGs or from COCO's outlines.

In memory, as in Cityscapes' instance files: class·1000 + number for the pixels of a thing, class alone for stuff that
has no instances (sky, grass), classes from 1; 0 where nothing is, −1 where it does not count. An instance PNG holds the
same numbers, with its largest value (255 of 8 bits, 65535 of 16, white of three channels) for −1; where there is one
class only, small numbers are its instances. Three channels are one number, red + 256·green + 65536·blue.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from veca.errors import InputError
from veca.files import read_text
from veca.images import stored_values
from veca.tasks.base.coco import Picture, find_json, read_coco
from veca.tasks.base.pairs import Array, check_pairs, find_pairs

EACH = 1000  # instances a class can have in a photo
VOID = 65535  # of 16 bits: what does not count
SMALL = 4  # pixels; what is smaller is noise of an annotation


def segments_of(label: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of the segments of a label, and their classes from 0."""
    numbers, sizes = label.unique(return_counts=True)
    numbers = numbers[(numbers > 0) & (sizes >= SMALL)]
    return numbers, torch.where(numbers >= EACH, numbers // EACH, numbers).long() - 1


@dataclass(frozen=True)
class Example:
    """A photo and where its label comes from."""

    path: Path
    label: Path | Picture

    @property
    def file(self) -> Path:
        """What holds the label; COCO's JSON is one for all, so the photo stands for it."""
        return self.label if isinstance(self.label, Path) else self.path


class Outline(NamedTuple):
    """A thing of COCO's with all of its mask, also what another covers."""

    label: int  # class, from 0
    mask: Array  # H×W bool
    crowd: bool


@dataclass(frozen=True)
class MaskData:
    classes: tuple[str, ...]
    stuff: tuple[int, ...]  # the classes without instances, from 0
    parts: dict[str, tuple[Example, ...]]

    def outlines(self, example: Example) -> list[Outline] | None:
        """The things of COCO's JSON as they are there, one over the other; None where the label is a PNG."""
        if isinstance(example.label, Path):
            return None
        picture = example.label
        return [Outline(one.label, mask_of(one.segmentation, picture), one.crowd) for one in picture.things]

    def read(self, example: Example) -> Array:  # H×W int32
        if isinstance(example.label, Picture):
            return read_outlines(example.label)
        label = read_png(example.label, len(self.classes) == 1)
        small = np.unique(label[(label > 0) & (label < EACH)])
        group = [number for number in small if number - 1 not in self.stuff]  # things that nobody told apart
        label[np.isin(label, group)] = -1
        return label


def read_masks(folder: Path) -> MaskData:
    """Instance PNGs or COCO's JSON below `folder`, whichever is there, every file checked."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    return coco_masks(folder) if find_json(folder) else png_masks(folder)


def png_masks(folder: Path) -> MaskData:
    """train/images, train/instances and val/ (or test/) in the same way; classes.txt names the classes."""
    pairs = find_pairs(folder, "instances", None)
    listed = folder / "classes.txt"
    names = [line.strip() for line in read_text(listed).splitlines() if line.strip()] if listed.is_file() else []
    found: set[int] = set()  # the training labels' numbers, which say what the classes are

    def read(path: Path) -> Array:
        values = read_png(path, one_class=False)
        found.update(np.unique(values).tolist())
        return values

    check_pairs(pairs.train, read, "instances")
    kinds = {number if number < EACH else number // EACH for number in found if number > 0}
    one_class = len(names) == 1 or (not names and max(found, default=0) < EACH)
    names = names or [str(number) for number in range(1, 2 if one_class else max(kinds, default=0) + 1)]
    if not names or not kinds:
        raise InputError(f"{folder / 'train' / 'instances'}: no file holds a thing")
    things = {number // EACH for number in found if number >= EACH}
    stuff = () if one_class else tuple(sorted(number - 1 for number in kinds - things))

    def checked(path: Path) -> Array:
        values = read_png(path, one_class)
        if (worst := int(values.max(initial=0))) // EACH > len(names) or len(names) < worst < EACH:
            raise InputError(f"{path}: holds the number {worst}, of a class beyond the {len(names)} of this data set")
        return values

    check_pairs([*pairs.train, *pairs.test], checked, "instances")
    train, test = (tuple(Example(pair.image, pair.label) for pair in part) for part in (pairs.train, pairs.test))
    return MaskData(tuple(names), stuff, {"train": train, "validation": (), "test": test})


def read_png(path: Path, one_class: bool) -> Array:
    stored = stored_values(path)
    if stored.ndim == 3 and stored.shape[-1] == 3:
        stored = stored @ np.array([1, 1 << 8, 1 << 16], np.int32)
        void = (1 << 24) - 1
    elif stored.ndim == 2:
        void = np.iinfo(stored.dtype).max if stored.dtype in (np.uint8, np.uint16) else VOID
    else:
        raise InputError(f"{path}: a label has one channel, or three that are one number; this has {stored.shape[-1]}")
    label = stored.astype(np.int32)
    if one_class:
        label = np.where((label > 0) & (label < EACH), label + EACH, label)
    label[stored == void] = -1
    return np.asarray(label, np.int32)


def coco_masks(folder: Path) -> MaskData:
    data = read_coco(folder, segments=True)
    parts = {"train": data.train, "validation": data.validation, "test": data.test}
    for part in parts.values():
        for picture in part:
            for thing in picture.things:
                check_outline(thing.segmentation, picture)
    examples = {name: tuple(Example(picture.path, picture) for picture in part) for name, part in parts.items()}
    return MaskData(data.classes, (), examples)


def check_outline(outline: Any, picture: Picture) -> None:
    """Refuse what pycocotools would misread, or run out of memory over."""
    if isinstance(outline, dict):
        size, counts = outline.get("size"), outline.get("counts")
        if size != [picture.height, picture.width]:
            raise InputError(f"{picture.path}: an RLE of size {size!r}, not [{picture.height}, {picture.width}]")
        runs = counts if isinstance(counts, list) else decode_runs(counts) if isinstance(counts, str) else None
        if runs and all(isinstance(run, int) and run >= 0 for run in runs) and sum(runs) == size[0] * size[1]:
            return
        raise InputError(f"{picture.path}: an RLE whose runs do not add up to the photo's pixels")
    if isinstance(outline, list) and outline:
        if all(
            isinstance(ring, list)
            and len(ring) >= 6
            and len(ring) % 2 == 0
            and all(isinstance(value, (int, float)) and abs(value) < 1e6 for value in ring)
            for ring in outline
        ):
            return
        raise InputError(f"{picture.path}: a polygon is a list of at least three corners x, y, …")
    raise InputError(f"{picture.path}: a thing without an outline (COCO's `segmentation`): masks cannot learn from it")


def decode_runs(text: str) -> list[int] | None:
    """COCO's compressed RLE: numbers of 5 bits a character, from the third on as differences; None if it is none."""
    runs: list[int] = []
    value, shift = 0, 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64 or shift > 60:
            return None
        value |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            if bits & 16:
                value -= 1 << shift
            runs.append(value + runs[-2] if len(runs) > 2 else value)
            value, shift = 0, 0
    return runs if shift == 0 else None


def read_outlines(picture: Picture) -> Array:  # H×W int32
    """Larger things first, so that where two overlap the smaller one has the pixel; crowds do not count."""
    planes = sorted(
        ((mask_of(thing.segmentation, picture), thing) for thing in picture.things), key=lambda item: -item[0].sum()
    )
    label = np.zeros((picture.height, picture.width), np.int32)
    for plane, _ in (item for item in planes if item[1].crowd):
        label[plane] = -1
    counts: dict[int, int] = {}
    for plane, thing in (item for item in planes if not item[1].crowd):
        counts[thing.label] = number = counts.get(thing.label, -1) + 1
        label[plane] = (thing.label + 1) * EACH + min(number, EACH - 1)
    return label


def mask_of(outline: Any, picture: Picture) -> Array:  # H×W bool
    from pycocotools import mask as rle

    size = (picture.height, picture.width)
    if isinstance(outline, dict):
        runs = outline["counts"] if isinstance(outline["counts"], list) else decode_runs(outline["counts"]) or []
        flat = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
        return flat.reshape(size, order="F")
    rings = [np.clip(np.reshape(ring, (-1, 2)), 0, (size[1], size[0])).flatten().tolist() for ring in outline]
    return np.asarray(rle.decode(rle.merge(rle.frPyObjects(rings, *size))), bool)
