"""Photos with boxes as YOLO's text files tell them: a line a thing, its class and box as shares of the photo.

    DIR/images/train/*.jpg  DIR/labels/train/*.txt  DIR/images/val/…       or train/images/, train/labels/, …

Classes are named by `names` in data.yaml (or another .yaml there), or by classes.txt, one a line. A photo without a
text file shows nothing. Lines of outlines (class x y x y …) become the box around them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from veca.errors import InputError
from veca.files import read_text
from veca.images import image_size
from veca.progress import progress
from veca.tasks.base.classes import images_in
from veca.tasks.base.coco import PARTS, CocoData, Picture, Thing, inside

YAML = 1 << 20  # bytes: a list of names is no larger


def read_yolo(folder: str | Path) -> CocoData:
    folder = Path(folder)
    places = find_parts(folder)
    if "train" not in places or len(places) < 2:
        raise InputError(
            f"{folder}: needs train.json and test.json in COCO's format, or images/train, labels/train and "
            "images/test, labels/test in YOLO's"
        )
    classes = class_names(folder)
    parts = {part: pictures(*place, classes) for part, place in places.items()}
    last = "test" if "test" in parts else "val"
    return CocoData(classes, parts["train"], parts["val"] if len(parts) == 3 else (), parts[last])


def find_parts(folder: Path) -> dict[str, tuple[Path, Path]]:
    """(photos, text files) of each part that is there."""
    found: dict[str, tuple[Path, Path]] = {}
    for part, names in PARTS.items():
        for name in names:
            for pair in ((folder / "images" / name, folder / "labels" / name),
                         (folder / name / "images", folder / name / "labels")):  # fmt: skip
                if all(place.is_dir() for place in pair):
                    found.setdefault(part, pair)
    return found


def class_names(folder: Path) -> tuple[str, ...]:
    listed = folder / "classes.txt"
    tables = sorted((*folder.glob("*.yaml"), *folder.glob("*.yml")), key=lambda path: path.stem != "data")
    if listed.is_file():
        names: Any = [line.strip() for line in read_text(listed).splitlines() if line.strip()]
    elif tables:
        names = from_yaml(listed := tables[0])
    else:
        raise InputError(f"{folder}: nothing names its classes; write them to classes.txt, one a line")
    if not names or not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
        raise InputError(f"{listed}: must name the classes, each once")
    return tuple(names)


def from_yaml(path: Path) -> list[Any]:
    """`names`: a list, or a table from 0 on."""
    import yaml  # comes with huggingface_hub

    if path.stat().st_size > YAML:
        raise InputError(f"{path}: too large for a list of names")
    try:
        table = yaml.safe_load(read_text(path))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise InputError(f"{path}: not readable as YAML ({str(error).splitlines()[0]})") from None
    names = table.get("names") if isinstance(table, dict) else None
    if isinstance(names, dict) and set(names) == set(range(len(names))):
        names = [names[number] for number in range(len(names))]
    if not isinstance(names, list):
        raise InputError(f"{path}: has no list of `names`")
    return names


def pictures(images: Path, labels: Path, classes: Sequence[str]) -> tuple[Picture, ...]:
    paths = images_in(images)
    if not paths:
        raise InputError(f"{images}: holds no images")
    found = []
    for path in progress(paths, f"reading {labels.parent.name}/{labels.name}", len(paths)):
        width, height = image_size(path)
        text = (labels / path.relative_to(images)).with_suffix(".txt")
        found.append(Picture(path, width, height, things(text, width, height, len(classes)) if text.is_file() else ()))
    if not any(picture.things for picture in found):
        raise InputError(f"{labels}: no text file there has a box for a photo of {images}")
    return tuple(found)


def things(path: Path, width: int, height: int, classes: int) -> tuple[Thing, ...]:
    found = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        words = line.split()
        if not words:
            continue
        try:
            label, values = int(words[0]), [float(word) for word in words[1:]]
        except ValueError:
            label, values = -1, []
        outline = len(values) >= 6 and len(values) % 2 == 0
        if not (len(values) == 4 or outline) or not all(math.isfinite(value) for value in values):
            raise InputError(f"{path}, line {number}: not `class x y width height` as shares, but {line[:60]!r}")
        if not 0 <= label < classes:
            raise InputError(f"{path}, line {number}: class {label}, but there are 0 to {classes - 1}")
        if outline:
            across, down = values[::2], values[1::2]
            left, top, wide, high = min(across), min(down), max(across) - min(across), max(down) - min(down)
        else:
            left, top, wide, high = values[0] - values[2] / 2, values[1] - values[3] / 2, values[2], values[3]
        where = f"{path}, line {number}"
        box = inside([left * width, top * height, wide * width, high * height], width, height, where)
        if box is not None:
            found.append(Thing(label, box))
    return tuple(found)
