"""The underwater photographs that tools/judged.py lays out: boxes as labels of cells, which train and which test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
from PIL import Image

from veca.errors import InputError
from veca.images import open_image

KINDS = ("echinus", "starfish", "holothurian", "scallop")
CELLS = (36, 64)  # rows, columns
STRETCHES = 24  # of the dives: two to train on, one to test, and so on
Array = np.ndarray[Any, Any]


class Photo(NamedTuple):
    path: Path
    size: tuple[int, int]  # width, height
    boxes: list[tuple[str, float, float, float, float]]  # kind, left, top, right, bottom

    def labels(self) -> Array:  # cells×kinds
        rows, columns = CELLS
        y = (np.arange(rows)[:, None] + 0.5) / rows * self.size[1]
        x = (np.arange(columns)[None] + 0.5) / columns * self.size[0]
        found = np.zeros((rows, columns, len(KINDS)), np.float32)
        for kind, left, top, right, bottom in self.boxes:
            if kind in KINDS:
                found[..., KINDS.index(kind)] += (left <= x) & (x < right) & (top <= y) & (y < bottom)
        return found.clip(max=1).reshape(-1, len(KINDS))

    def pixels(self, width: int) -> Array:  # H×W×3
        size = (width, width * 9 // 16)
        return np.asarray(open_image(self.path).resize(size, Image.Resampling.BICUBIC))


def read_photos(data: Path) -> list[Photo]:
    """Those with 3840×2160 pixels, in the order of the dives."""
    photos = []
    for path in sorted((data / "Annotations").glob("*.xml")):
        root = ElementTree.parse(path).getroot()  # fetched by a maintainer, not by a user
        size = int(root.findtext("size/width", "0")), int(root.findtext("size/height", "0"))
        boxes = [
            (
                one.findtext("name", ""),
                *(float(one.findtext(f"bndbox/{side}", "0")) for side in ("xmin", "ymin", "xmax", "ymax")),
            )
            for one in root.iter("object")
        ]
        if size == (3840, 2160):
            photos.append(Photo(data / "JPEGImages" / f"{path.stem}.jpg", size, boxes))
    if not photos:
        raise InputError(f"{data} holds no annotated photographs: python tools/judged.py lays them out")
    return photos


def split(photos: Sequence[Photo], a_stretch: int) -> tuple[list[Photo], list[Photo]]:
    """To train on and to test, from different stretches, evenly spread within each."""
    parts: tuple[list[Photo], list[Photo]] = ([], [])
    for number, stretch in enumerate(np.array_split(np.arange(len(photos)), STRETCHES)):
        chosen = stretch[np.linspace(0, len(stretch) - 1, min(a_stretch, len(stretch))).round().astype(int)]
        parts[number % 3 == 2].extend(photos[index] for index in chosen)
    return parts
