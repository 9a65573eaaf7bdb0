"""Which pixels of an image a backbone sees: the centre crop, or the windows of a sliding window.

A view names its pixels completely, so that it can be the key of a cached feature.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from veca.files import whole_file
from veca.images import resize_short_side
from veca.tasks.base.pairs import open_trimmed

RESIZE = 288 / 256  # classification resizes to this multiple of its centre crop (docs/probes.md)
STRIDE = 2 / 3  # of the window: neighbouring windows overlap by at least a third


@dataclass(frozen=True)
class View:
    path: Path
    short: int | None  # the short side the image is first resized to; None: all of it is squeezed into the square
    side: int  # then a square of this many pixels is cut out
    at: tuple[int, int] | None  # its left and top; None: the centre
    flip: bool = False  # mirrored left-right after the cut
    trim: tuple[int, int] | None = None  # cut to (height, width), bottom and centred, before anything else

    def key(self, file: str) -> list[object]:
        """What decides the pixels, given the digest of the file."""
        return [file, self.short, self.side, self.at, self.flip, self.trim]

    def pixels(self) -> Tensor:  # S×S×3 uint8
        image = open_trimmed(self.path, self.trim)
        if self.short is None:
            image = image.resize((self.side, self.side), Image.Resampling.BICUBIC)
        else:
            image = resize_short_side(image, self.short, str(self.path))
            left, top = self.at or ((image.width - self.side) // 2, (image.height - self.side) // 2)
            image = image.crop((left, top, left + self.side, top + self.side))
        return torch.from_numpy(np.array(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if self.flip else image))


def centre_view(path: Path, side: int) -> View:
    return View(path, short=round(side * RESIZE), side=side, at=None)


def window_starts(length: int, side: int) -> list[int]:
    """Where windows of `side` begin along an axis: evenly spread from edge to edge, at most STRIDE apart."""
    count = math.ceil((length - side) / (side * STRIDE)) + 1
    return [round(start) for start in np.linspace(0, length - side, count)]


def windows(width: int, height: int, side: int) -> list[tuple[int, int]]:
    """(left, top) of every window of a resized image."""
    return [(left, top) for top in window_starts(height, side) for left in window_starts(width, side)]


def label_box(
    at: tuple[int, int], side: int, resized: tuple[int, int], label: tuple[int, int]
) -> tuple[int, int, int, int]:
    """The part of a label (left, top, right, bottom) that a window covers; sizes are (width, height)."""
    left, top = (round(at[axis] * label[axis] / resized[axis]) for axis in (0, 1))
    right, bottom = (round((at[axis] + side) * label[axis] / resized[axis]) for axis in (0, 1))
    return left, top, right, bottom


def save_picture(image: Image.Image, path: Path) -> None:
    with whole_file(path) as temporary:
        image.save(temporary)
