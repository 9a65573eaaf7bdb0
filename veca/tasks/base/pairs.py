"""Images with a label per pixel: index masks or 16-bit depth, found, checked and read.

    DIR/train/images/*.jpg  DIR/train/masks/*.png  DIR/val/…         (depth/ instead of masks/ for depth)

or the layout of a preset. Every pair is checked before any feature is computed, so that a bad file is named at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from veca.errors import InputError
from veca.images import image_size, open_image, stored_values
from veca.progress import progress
from veca.tasks.base.classes import images_in, split_names
from veca.tasks.base.presets import DepthPreset, Layout, SegmentPreset

IGNORE = -1  # what every ignored pixel becomes once it is read
LABEL_SUFFIXES = (".png", ".tif", ".tiff")
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Pair:
    image: Path
    label: Path


@dataclass(frozen=True)
class PairData:
    train: tuple[Pair, ...]
    test: tuple[Pair, ...]


def find_pairs(folder: str | Path, labels: str, layout: Layout | None) -> PairData:
    """The pairs of each part; `labels` is what the plain layout calls its label folder: masks or depth."""
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    if layout is None or (folder / "train" / "images").is_dir():
        train, _, test = split_names(folder)
        return PairData(_plain(folder / train, labels), _plain(folder / test, labels))
    return PairData(_published(folder, layout, layout.train), _published(folder, layout, layout.test))


def _plain(folder: Path, labels: str) -> tuple[Pair, ...]:
    images = images_in(folder / "images") if (folder / "images").is_dir() else []
    if not images:
        raise InputError(f"{folder / 'images'}: holds no images")
    there = {path.stem: path for path in images_in(folder / labels)} if (folder / labels).is_dir() else {}
    for path in images:
        if path.stem not in there or there[path.stem].suffix.lower() not in LABEL_SUFFIXES:
            raise InputError(f"{path}: has no label {folder / labels / path.stem}.png")
    return tuple(Pair(path, there[path.stem]) for path in images)


def _published(folder: Path, layout: Layout, split: str) -> tuple[Pair, ...]:
    pattern = {name: getattr(layout, name).format(split=split) for name in ("images", "labels", "names", "pairs")}
    base, end = ({name: part[at] for name, part in _cut(pattern).items()} for at in (0, 1))
    if layout.pairs:
        pairs = [
            Pair(folder / base["images"] / line[0].lstrip("/"), folder / base["labels"] / line[1].lstrip("/"))
            for line in map(str.split, _lines(folder / pattern["pairs"]))
            if len(line) >= 2 and line[1] != "None"  # KITTI's list marks images without depth so
        ]
    else:
        if layout.names:
            shared = [line.strip() for line in _lines(folder / pattern["names"])]
        else:
            top = folder / base["images"]
            shared = [
                path.relative_to(top).as_posix().removesuffix(end["images"])
                for path in images_in(top)
                if path.name.endswith(end["images"])
            ]
        pairs = [
            Pair(*(folder / base[kind] / f"{name}{end[kind]}" for kind in ("images", "labels")))
            for name in shared
            if name
        ]
    if not pairs:
        raise InputError(f"{folder}: no images at {pattern['images']}; is this the data set its preset describes?")
    for pair in pairs:
        if not pair.image.is_file():
            raise InputError(f"{pair.image}: no such file")
        if not pair.label.is_file():
            raise InputError(f"{pair.image}: has no label {pair.label}")
    return tuple(pairs)


def _cut(pattern: dict[str, str]) -> dict[str, tuple[str, str]]:
    """A pattern's folder before `*` and its ending after it."""
    return {name: (part.partition("*")[0], part.partition("*")[2]) for name, part in pattern.items()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        raise InputError(f"{path}: no such file; the preset needs this list of images") from None


def check_pairs(pairs: Sequence[Pair], read: Callable[[Path], Array], what: str) -> None:
    """Read every label once: range, size and existence are settled before the long work begins."""

    def check(pair: Pair) -> None:
        label = read(pair.label)
        width, height = image_size(pair.image)
        if label.shape != (height, width):
            raise InputError(
                f"{pair.label}: is {label.shape[1]}×{label.shape[0]}, but {pair.image.name} is {width}×{height}"
            )

    with ThreadPoolExecutor(4) as pool:
        for _ in progress(pool.map(check, pairs), f"checking {what}", len(pairs)):
            pass


def read_values(path: Path) -> Array:  # H×W
    """The stored numbers of a single-channel label, palette and colours not applied."""
    values = stored_values(path)
    if values.ndim != 2:
        raise InputError(f"{path}: a label has one channel (index or palette PNG), this has {values.shape[-1]}")
    return values


class MaskReader:
    """Index masks as classes 0 … K−1 with `IGNORE` elsewhere."""

    def __init__(self, preset: SegmentPreset) -> None:
        self.preset = preset
        self.table = np.full(max(preset.ids, default=0) + 2, IGNORE, np.int16)  # its last entry stands for all beyond
        for value, index in preset.ids.items():
            self.table[value] = index

    def __call__(self, path: Path) -> Array:  # H×W int16
        preset, stored = self.preset, read_values(path).astype(np.int32)
        if preset.ids:
            return np.asarray(self.table[np.clip(stored, 0, len(self.table) - 1)], np.int16)
        label = np.full_like(stored, IGNORE)
        counted = stored != preset.ignore
        label[counted] = np.maximum(stored[counted] + preset.offset, IGNORE)
        if label.max(initial=IGNORE) >= preset.classes:
            raise InputError(
                f"{path}: holds the label {stored[label == label.max()].flat[0]}, outside the {preset.classes} classes "
                f"(ignore index {preset.ignore}, offset {preset.offset})"
            )
        return np.asarray(label, np.int16)


class DepthReader:
    """Depth in metres, float32; 0 where it is unknown, out of range or outside the evaluation crop."""

    def __init__(self, preset: DepthPreset) -> None:
        self.preset = preset

    def __call__(self, path: Path) -> Array:  # H×W
        values = read_values(path)
        if values.dtype == np.uint8:
            raise InputError(f"{path}: depth needs 16 bits, this picture has 8")
        depth: Array = np.asarray(values, np.float32) * np.float32(self.preset.scale)
        if not np.isfinite(depth).all():
            raise InputError(f"{path}: holds depth that is not a number")
        depth[(depth <= self.preset.nearest) | (depth >= self.preset.farthest)] = 0
        return depth

    def trimmed(self, path: Path) -> Array:
        """What is trained and scored: the trim applied, pixels outside the evaluation crop unknown."""
        depth = self(path)
        if self.preset.trim:
            left, top, right, bottom = trim_box(depth.shape[1], depth.shape[0], self.preset.trim, path)
            depth = depth[top:bottom, left:right]
        height, width = depth.shape
        x0, y0, x1, y1 = self.preset.crop
        inside = np.zeros_like(depth)
        inside[round(y0 * height) : round(y1 * height), round(x0 * width) : round(x1 * width)] = 1
        return np.asarray(depth * inside, np.float32)


def trim_box(width: int, height: int, trim: tuple[int, int], path: Path) -> tuple[int, int, int, int]:
    """The bottom-centre box (left, top, right, bottom) of (height, width) `trim`."""
    if height < trim[0] or width < trim[1]:
        raise InputError(f"{path}: {width}×{height} is smaller than the {trim[1]}×{trim[0]} this preset cuts out")
    left = (width - trim[1]) // 2
    return left, height - trim[0], left + trim[1], height


def open_trimmed(path: Path, trim: tuple[int, int] | None) -> Image.Image:
    image = open_image(path)
    return image.crop(trim_box(*image.size, trim, path)) if trim else image
