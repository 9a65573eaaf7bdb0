"""What was found, as pictures: the numbers of instance PNGs, and colours over the photo."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from colorsys import hsv_to_rgb

import numpy as np
from PIL import Image, ImageFilter

from veca.tasks.base.pairs import Array
from veca.tasks.masks.decode import Segment
from veca.tasks.masks.labels import EACH, VOID
from veca.tasks.segment import with_legend

OPACITY = 0.55


def numbered(segments: Sequence[Segment], size: tuple[int, int], stuff: Collection[int], classes: int) -> Image.Image:
    """A picture with the numbers that `labels.py` reads; size is (width, height).

    16 bits hold 64 classes; where there are more it has three channels, as COCO's panoptic PNGs do.
    """
    values: Array = np.zeros(size[::-1], np.int32)
    counts: dict[int, int] = {}
    for segment in segments:
        counts[segment.label] = number = counts.get(segment.label, -1) + 1
        kind = segment.label + 1
        each = kind * EACH + min(number, EACH - 1)
        values[segment.mask.numpy()] = kind if segment.label in stuff else each
    if (classes + 1) * EACH <= VOID:
        return Image.fromarray(values.astype(np.uint16))
    return Image.fromarray((values[..., None] >> np.array([0, 8, 16]) & 255).astype(np.uint8))


def bright(number: int) -> tuple[int, ...]:
    """A hue far from those of the numbers just before it."""
    return tuple(round(255 * part) for part in hsv_to_rgb((0.52 + 0.618 * number) % 1, 0.9, 1.0))


def overlay(image: Image.Image, segments: Sequence[Segment], classes: Sequence[str]) -> Image.Image:
    """Each segment in a colour of its own with a white outline, named below the photo."""
    colours = [bright(number) for number in range(len(segments))]
    canvas = image.convert("RGB")
    for segment, colour in zip(segments, colours, strict=True):
        plane = Image.fromarray(segment.mask.numpy().astype(np.uint8) * 255)
        canvas.paste(Image.blend(canvas, Image.new("RGB", canvas.size, colour), OPACITY), mask=plane)
        grown = np.asarray(plane.filter(ImageFilter.MaxFilter(3)))
        edge = Image.fromarray(((grown > 0) & (np.asarray(plane) == 0)).astype(np.uint8) * 255)
        canvas.paste((255, 255, 255), mask=edge)
    legend = [
        (f"{classes[segment.label]} {segment.score:.2f}", colour)
        for segment, colour in zip(segments, colours, strict=True)
    ]
    return with_legend(canvas, legend) if legend else canvas
