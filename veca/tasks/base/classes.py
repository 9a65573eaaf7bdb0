"""Images with class labels: class folders, CSV files, and other label sets of the same classes.

    DIR/train/<class>/*.jpg  DIR/test/<class>/*.jpg        or        DIR/train.csv  DIR/test.csv  (path,labels)

`val` may stand for `test`; where both are there, `val` is the validation part and `test` is reported. In a CSV the
paths are relative to it, and several labels of an image are separated by `;`.
"""

from __future__ import annotations

import csv
import io
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from veca.errors import InputError
from veca.files import read_text
from veca.folders import walk


@dataclass(frozen=True)
class Example:
    path: Path
    labels: tuple[int, ...]


@dataclass(frozen=True)
class ClassData:
    classes: tuple[str, ...]
    train: tuple[Example, ...]
    validation: tuple[Example, ...]  # empty: a part of `train` is held out
    test: tuple[Example, ...]
    several: bool  # some image does not have exactly one label: scored by mean average precision


def images_in(folder: Path) -> list[Path]:
    """The image files below a folder, sorted by name."""
    found = walk(folder)
    if found.special:
        raise InputError(f"{folder / found.special[0]}: not a regular file; take it out of the data")
    return sorted(folder / name for name in found.images)


def split_names(folder: Path, suffix: str = "") -> tuple[str, str, str]:
    """Which of train, val and test are there: (train, validation or "", test)."""
    there = [name for name in ("train", "val", "test") if (folder / f"{name}{suffix}").exists()]
    if "train" not in there or len(there) < 2:
        raise InputError(f"{folder}: needs {'train' + suffix} and {'test' + suffix} (or {'val' + suffix})")
    return "train", "val" if len(there) == 3 else "", there[-1]


def read_classes(folder: str | Path) -> ClassData:
    """Class folders or CSV files below `folder`, whichever is there; the classes are those of the training part."""
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    from_csv = (folder / "train.csv").exists()
    train, validation, test = split_names(folder, ".csv" if from_csv else "")
    if from_csv:
        rows = read_rows(folder / "train.csv")
        classes = tuple(sorted({label for _, labels in rows for label in labels}, key=natural))
    else:
        classes = tuple(sorted((path.name for path in class_folders(folder / train)), key=natural))
    if len(classes) < 2:
        raise InputError(f"{folder}: {len(classes)} class in the training part; a probe needs at least 2")
    source = {name: folder / f"{name}.csv" if from_csv else folder / name for name in (train, validation, test) if name}
    parts = {name: read_examples(path, classes) for name, path in source.items()}
    several = any(len(example.labels) != 1 for example in parts[train])
    odd = next((example for part in parts.values() for example in part if len(example.labels) != 1), None)
    if odd is not None and not several:
        raise InputError(
            f"{folder}: {odd.path.name} has {len(odd.labels)} labels, while every training image has exactly one"
        )
    return ClassData(
        classes=classes,
        train=parts[train],
        validation=parts.get(validation, ()),
        test=parts[test],
        several=several,
    )


def read_examples(source: Path, classes: Sequence[str], pictures: Sequence[Example] = ()) -> tuple[Example, ...]:
    """A label set: a CSV, a folder of classes, or ReaL's JSON for the images in `pictures`.

    Class folders whose names are all numbers, none of them a class name, count the classes in order (ImageNetV2).
    """
    index = {name: number for number, name in enumerate(classes)}
    if source.suffix == ".json":
        return read_numbered(source, len(classes), pictures)
    if source.suffix == ".csv":
        return tuple(
            Example(path, tuple(_class_of(label, index, f"{source}, {path.name}") for label in labels))
            for path, labels in read_rows(source)
        )
    folders = class_folders(source)
    if all(folder.name.isdigit() and folder.name not in index for folder in folders):
        index = {str(number): number for number in range(len(classes))}
    return tuple(
        Example(path, (_class_of(folder.name, index, str(folder)),)) for folder in folders for path in images_in(folder)
    )


def class_folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    folders = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not folders:
        raise InputError(f"{folder}: holds no class folders")
    for path in folders:
        if not images_in(path):
            raise InputError(f"{path}: this class has no images")
    return folders


def read_rows(path: Path) -> list[tuple[Path, tuple[str, ...]]]:
    """Rows of a CSV with the columns `path` and `labels`."""
    with io.StringIO(read_text(path), newline="") as file:
        reader = csv.DictReader(file)
        if not {"path", "labels"} <= set(reader.fieldnames or ()):
            raise InputError(f"{path}: its first line must name the columns path and labels")
        rows = []
        for row in reader:
            image = path.parent / (row["path"] or "")
            if not image.is_file():
                raise InputError(f"{path}, line {reader.line_num}: no image at {image}")
            labels = (label.strip() for label in (row["labels"] or "").split(";"))
            rows.append((image, tuple(label for label in labels if label)))
    if not rows:
        raise InputError(f"{path}: holds no images")
    return rows


def read_numbered(path: Path, classes: int, pictures: Sequence[Example]) -> tuple[Example, ...]:
    """ReaL's format: a list of label lists; the n-th belongs to the image whose name ends in the number n (from 1)."""
    try:
        lists = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not readable as JSON ({error})") from None
    examples = []
    for picture in pictures:
        number = re.search(r"(\d+)$", picture.path.stem)
        if number is None or not 1 <= int(number[1]) <= len(lists):
            raise InputError(f"{picture.path}: its name does not end in a number from 1 to {len(lists)} ({path})")
        labels = tuple(lists[int(number[1]) - 1])
        if not all(isinstance(label, int) and 0 <= label < classes for label in labels):
            raise InputError(f"{path}: the labels of {picture.path.name} are {labels}, not numbers below {classes}")
        examples.append(Example(picture.path, labels))
    return tuple(examples)


def held_out(examples: Sequence[Example], share: float, seed: int) -> tuple[list[int], list[int]]:
    """Numbers of the examples to train on and to validate on: `share` of each class, at least one where it has two."""
    rng = random.Random(seed)
    by_class: dict[tuple[int, ...], list[int]] = {}
    for number, example in enumerate(examples):
        by_class.setdefault(example.labels, []).append(number)
    validation: set[int] = set()
    singles = []
    for numbers in by_class.values():
        rng.shuffle(numbers)
        if len(numbers) > 1:
            validation.update(numbers[: max(1, round(share * len(numbers)))])
        else:
            singles.extend(numbers)
    validation.update(singles[: round(share * len(singles))])
    return [number for number in range(len(examples)) if number not in validation], sorted(validation)


def natural(name: str) -> tuple[tuple[bool, int | str], ...]:
    """Sorting key with numbers in order: 2 before 10."""
    parts = re.split(r"(\d+)", name)
    return tuple((False, int(part)) if part.isdigit() else (True, part) for part in parts if part)


def _class_of(label: str, index: dict[str, int], where: str) -> int:
    if label not in index:
        raise InputError(f"{where}: the class {label!r} is not among the {len(index)} of the training part")
    return index[label]
