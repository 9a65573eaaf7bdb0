"""Labels from instance PNGs and from COCO's outlines, against numpy; damaged ones are one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask as rle

from veca.errors import InputError
from veca.tasks.masks.decode import Segment
from veca.tasks.masks.drawing import numbered
from veca.tasks.masks.labels import decode_runs, read_masks, segments_of


def photo(path: Path, width: int = 20, height: int = 16) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height)).save(path)


def png_set(folder: Path, values: np.ndarray, test: np.ndarray | None = None) -> Path:
    for part, label in (("train", values), ("test", values if test is None else test)):
        photo(folder / part / "images/a.png", label.shape[1], label.shape[0])
        (folder / part / "instances").mkdir(parents=True)
        Image.fromarray(label).save(folder / part / "instances/a.png")
    return folder


def test_one_class_of_small_numbers(tmp_path: Path) -> None:
    values = np.zeros((16, 20), np.uint8)
    values[2:6, 2:6], values[8:12, 8:12], values[0] = 1, 2, 255
    data = read_masks(png_set(tmp_path, values))
    assert data.classes == ("1",)
    label = torch.from_numpy(data.read(data.parts["test"][0]))
    numbers, kinds = segments_of(label)
    assert numbers.tolist() == [1001, 1002]
    assert kinds.tolist() == [0, 0]
    assert label[0].eq(-1).all()


def test_classes_stuff_and_groups(tmp_path: Path) -> None:
    """2 has instances; 1 never does, so it is stuff; what is 2 alone is a group that does not count."""
    values = np.zeros((16, 20), np.uint16)
    values[:4], values[5:9, :5], values[5:9, 6:12], values[12:, 10:] = 1, 2000, 2001, 2
    (tmp_path / "classes.txt").write_text("grass\nsheep\n")
    data = read_masks(png_set(tmp_path, values))
    assert data.classes == ("grass", "sheep")
    assert data.stuff == (0,)
    label = torch.from_numpy(data.read(data.parts["train"][0]))
    assert segments_of(label)[0].tolist() == [1, 2000, 2001]
    assert segments_of(label)[1].tolist() == [0, 1, 1]
    assert label[12:, 10:].eq(-1).all()


def coco(folder: Path, things: list[dict[str, Any]], width: int = 20, height: int = 16) -> Path:
    for part in ("train", "test"):
        photo(folder / part / "a.png", width, height)
        table = {
            "images": [{"id": 1, "file_name": "a.png", "width": width, "height": height}],
            "categories": [{"id": 3, "name": "cat"}, {"id": 7, "name": "dog"}],
            "annotations": [
                {"id": number, "image_id": 1, "bbox": [0, 0, 8, 8], **one} for number, one in enumerate(things)
            ],
        }
        (folder / f"{part}.json").write_text(json.dumps(table))
    return folder


def test_polygons_and_both_kinds_of_rle_say_the_same(tmp_path: Path) -> None:
    plane = np.zeros((16, 20), np.uint8)
    plane[3:9, 4:12] = 1
    runs = np.flatnonzero(np.diff(np.concatenate(([0], plane.flatten("F"), [0]))))
    counts = np.diff(np.concatenate(([0], runs, [plane.size]))).tolist()
    packed = rle.encode(np.asfortranarray(plane))["counts"].decode()
    assert decode_runs(packed) == counts
    ways: list[Any] = [
        [[4, 3, 12, 3, 12, 9, 4, 9]],
        {"size": [16, 20], "counts": counts},
        {"size": [16, 20], "counts": packed},
    ]
    for number, outline in enumerate(ways):
        data = read_masks(coco(tmp_path / str(number), [{"category_id": 7, "segmentation": outline}]))
        label = data.read(data.parts["test"][0])
        assert np.array_equal(label == 2000, plane.astype(bool))
        assert np.array_equal(label == 0, ~plane.astype(bool))


def test_the_smaller_thing_is_on_top_and_a_crowd_does_not_count(tmp_path: Path) -> None:
    square = lambda left, top, right, bottom: [[left, top, right, top, right, bottom, left, bottom]]  # noqa: E731
    things = [
        {"category_id": 3, "segmentation": square(6, 6, 9, 9)},
        {"category_id": 3, "segmentation": square(2, 2, 14, 14)},
        {"category_id": 7, "segmentation": square(0, 0, 20, 4), "iscrowd": 1},
    ]
    data = read_masks(coco(tmp_path, things))
    label = data.read(data.parts["train"][0])
    assert (label == 1001).sum() == 9
    assert (label == 1000).sum() == 144 - 9
    assert label[0].tolist() == [-1] * 20


@pytest.mark.parametrize("classes", [64, 80])
def test_what_was_found_is_read_back(tmp_path: Path, classes: int) -> None:
    """As many classes as COCO has do not fit into 16 bits."""
    kinds = [0, 63, 63] if classes == 64 else [65, 70, 79]
    planes = [torch.zeros(16, 20, dtype=torch.bool) for _ in kinds]
    for number, plane in enumerate(planes):
        plane[5 * number : 5 * number + 4, 3:9] = True
    found = [Segment(kind, 0.9, plane) for kind, plane in zip(kinds, planes, strict=True)]
    picture = numbered(found, (20, 16), (), classes)
    folder = png_set(tmp_path, np.asarray(picture))
    (folder / "classes.txt").write_text("\n".join(map(str, range(classes))))
    data = read_masks(folder)
    label = torch.from_numpy(data.read(data.parts["test"][0]))
    numbers, labels = segments_of(label)
    assert labels.tolist() == kinds
    assert all(torch.equal(label == number, plane) for number, plane in zip(numbers, planes, strict=True))
    void = np.full((16, 20, 3), 255, np.uint8)
    Image.fromarray(void).save(folder / "test/instances/a.png")
    assert (data.read(data.parts["test"][0]) == -1).all()


BAD = {
    "without an outline": None,
    "at least three corners": [[1, 2, 3, 4]],
    "of at least three": [["a", 2, 3, 4, 5, 6]],
    "an RLE of size": {"size": [160, 200], "counts": [32000]},
    "do not add up": {"size": [16, 20], "counts": [1, 10**9]},
    "runs do not add": {"size": [16, 20], "counts": "PPYo\x7f"},
    "whose runs": {"size": [16, 20], "counts": 7},
}


@pytest.mark.parametrize("message", BAD)
def test_damaged_outlines_are_one_line(tmp_path: Path, message: str) -> None:
    with pytest.raises(InputError, match=message) as told:
        read_masks(coco(tmp_path, [{"category_id": 3, "segmentation": BAD[message]}]))
    assert "\n" not in str(told.value)


def test_damaged_instances_are_one_line(tmp_path: Path) -> None:
    values = np.zeros((16, 20), np.uint16)
    with pytest.raises(InputError, match="no file holds a thing"):
        read_masks(png_set(tmp_path / "empty", values))
    values[:4] = 1000
    beyond = values.copy()
    beyond[5:] = 9000
    with pytest.raises(InputError, match="9000, of a class beyond the 1"):
        read_masks(png_set(tmp_path / "beyond", values, beyond))
    whole = png_set(tmp_path / "small", values)
    Image.new("RGB", (8, 8)).save(whole / "test/images/a.png")
    with pytest.raises(InputError, match=r"is 20×16, but a\.png is 8×8"):
        read_masks(whole)
    with pytest.raises(InputError, match="no such folder"):
        read_masks(tmp_path / "nowhere")
