"""Photos with coloured squares, whose boxes are known, as COCO's JSON; and a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

COLOURS = ((220, 30, 30), (30, 30, 220))


def squares(folder: Path, part: str, count: int, seed: int) -> None:
    (folder / part).mkdir(parents=True)
    draw, images, annotations = np.random.default_rng(seed), [], []
    for number in range(count):
        pixels = draw.integers(110, 140, (48, 64, 3))
        side, colour = int(draw.integers(16, 33)), number % 2
        left, top = int(draw.integers(0, 64 - side)), int(draw.integers(0, 48 - side))
        pixels[top : top + side, left : left + side] = COLOURS[colour]
        Image.fromarray(pixels.astype(np.uint8)).save(folder / part / f"{number}.png")
        images.append({"id": number, "file_name": f"{number}.png", "width": 64, "height": 48})
        box = [left, top, side, side]
        annotations.append({"id": number, "image_id": number, "category_id": colour + 1, "bbox": box})
    categories = [{"id": 1, "name": "red"}, {"id": 2, "name": "blue"}]
    table = {"images": images, "annotations": annotations, "categories": categories}
    (folder / f"{part}.json").write_text(json.dumps(table))


@pytest.fixture(scope="session")
def boxes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("boxes")
    squares(folder, "train", 40, 0)
    squares(folder, "test", 6, 1)
    return folder
