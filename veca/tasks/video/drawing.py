"""Masks over frames: one picture a frame, and a short clip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from veca.files import whole_file
from veca.tasks.base.views import save_picture
from veca.tasks.video.scores import edge

# Of one object after another, and then again.
COLOURS = np.array([(0, 200, 255), (255, 190, 0), (255, 0, 160), (120, 230, 0), (140, 90, 255)], np.uint8)
OPACITY = 0.5
CLIP = 480  # pixels, the longer side of the clip
PACE = 80  # milliseconds a frame


def overlay(image: Image.Image, mask: np.ndarray[Any, Any], objects: list[int]) -> Image.Image:
    """The frame (RGB) with each object in its colour, and a white line around it."""
    drawn = np.array(image)
    for number, value in enumerate(objects):
        inside = mask == value
        colour = COLOURS[number % len(COLOURS)]
        drawn[inside] = (drawn[inside] * (1 - OPACITY) + colour * OPACITY).astype(np.uint8)
        drawn[tuple(edge(inside).T)] = 255
    return Image.fromarray(drawn)


class Drawing:
    """`NAME/<frame>.jpg` for every frame and, at the end, `NAME.webp`."""

    def __init__(self, folder: Path, name: str, objects: list[int]) -> None:
        self.folder, self.clip, self.objects = folder / name, folder / f"{name}.webp", objects
        self.small: list[Image.Image] = []

    def add(self, frame: str, image: Image.Image, mask: np.ndarray[Any, Any]) -> None:
        drawn = overlay(image, mask, self.objects)
        save_picture(drawn, self.folder / f"{frame}.jpg")
        drawn.thumbnail((CLIP, CLIP))
        self.small.append(drawn)

    def finish(self) -> None:
        with whole_file(self.clip) as temporary:
            self.small[0].save(temporary, save_all=True, append_images=self.small[1:], duration=PACE, loop=0)
