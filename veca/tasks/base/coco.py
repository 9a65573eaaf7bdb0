"""Photos with things in them, as COCO's JSON tells them: a box, a class and perhaps an outline for each.

    DIR/train.json  DIR/test.json (or val.json)        or annotations/instances_train2017.json, …val2017.json
    DIR/train/*.jpg DIR/test/*.jpg                     or train/_annotations.coco.json beside its photos

The photos are looked for in the part's folder, in images/ and beside the JSON. The file is somebody else's: whatever is
wrong with it is one InputError, and nothing outside the folder is opened.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from veca.errors import InputError
from veca.images import image_size
from veca.progress import progress

PARTS = {"train": ("train",), "val": ("val", "valid"), "test": ("test",)}  # and what others call them


@dataclass(frozen=True)
class Thing:
    label: int  # of the classes, from 0
    box: tuple[float, float, float, float]  # left, top, right, bottom in pixels of the upright photo
    crowd: bool = False  # several in one box: neither trained on nor counted as missed
    segmentation: Any = None  # COCO's field as it stands there: polygons or RLE


@dataclass(frozen=True)
class Picture:
    path: Path
    width: int
    height: int
    things: tuple[Thing, ...]


@dataclass(frozen=True)
class CocoData:
    classes: tuple[str, ...]
    train: tuple[Picture, ...]
    validation: tuple[Picture, ...]  # empty unless val and test are both there
    test: tuple[Picture, ...]


def find_json(folder: Path) -> dict[str, Path]:
    """The JSON of each part that is there."""
    found: dict[str, Path] = {}
    for part, names in PARTS.items():
        for name in names:
            plain = [folder / f"{name}.json", folder / "annotations" / f"{name}.json"]
            published = sorted((folder / "annotations").glob(f"instances_{name}*.json"))
            for path in (*plain, *published, folder / name / "_annotations.coco.json"):
                if path.is_file():
                    found.setdefault(part, path)
    return found


def read_coco(folder: str | Path, segments: bool = False) -> CocoData:
    """Every part, checked; `segments` keeps the outlines (large, so not without need)."""
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    there = find_json(folder)
    if "train" not in there or len(there) < 2:
        raise InputError(f"{folder}: needs train.json and test.json (or val.json) in COCO's format")
    tables = {part: read_table(path) for part, path in there.items()}
    names = categories(tables["train"], there["train"])
    classes = tuple(names.values())
    parts = {}
    for part, path in there.items():
        own = {number: name for number, name in categories(tables[part], path).items() if name in classes}
        index = {number: classes.index(name) for number, name in own.items()}
        parts[part] = pictures(tables[part], path, folder, part, index, segments)
        del tables[part]  # COCO's own takes gigabytes
    last = "test" if "test" in parts else "val"
    return CocoData(classes, parts["train"], parts["val"] if len(parts) == 3 else (), parts[last])


def read_table(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not readable as JSON ({str(error).splitlines()[0]})") from None
    for name in ("images", "annotations", "categories"):
        rows = table.get(name) if isinstance(table, dict) else None
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise InputError(f"{path}: not COCO's format, its {name!r} is no list of tables")
    checked: dict[str, Any] = table
    return checked


def categories(table: dict[str, Any], path: Path) -> dict[int, str]:
    """Names by id, in the order of the ids."""
    found: dict[int, str] = {}
    for row in table["categories"]:
        number, name = row.get("id"), row.get("name")
        if not isinstance(number, int) or not isinstance(name, str) or number in found or name in found.values():
            raise InputError(f"{path}: each category needs an id and a name of its own, not {str(row)[:80]}")
        found[number] = name
    if not found:
        raise InputError(f"{path}: names no categories")
    return dict(sorted(found.items()))


def pictures(
    table: dict[str, Any], path: Path, folder: Path, part: str, index: dict[int, int], segments: bool
) -> tuple[Picture, ...]:
    """The photos of a part with their things; every one is there, as large as the JSON says."""
    sizes: dict[Any, tuple[str, int, int]] = {}
    for row in table["images"]:
        name, width, height = row.get("file_name"), row.get("width"), row.get("height")
        if not isinstance(row.get("id"), (int, str)) or row["id"] in sizes or not isinstance(name, str):
            raise InputError(f"{path}: each image needs an id of its own and a file_name, not {str(row)[:80]}")
        if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
            raise InputError(f"{path}: the file_name {name[:80]!r} leads out of the folder")
        if any(len(word.encode(errors="replace")) > 255 for word in Path(name).parts):
            raise InputError(f"{path}: the file_name {name[:80]!r}… is longer than a file's name can be")
        if not all(isinstance(side, int) and 0 < side < 2**31 for side in (width, height)):
            raise InputError(f"{path}: {name} needs a width and a height in pixels, not {width!r} and {height!r}")
        sizes[row["id"]] = (name, width, height)
    if not sizes:
        raise InputError(f"{path}: holds no images")
    things: dict[Any, list[Thing]] = {number: [] for number in sizes}
    for row in table["annotations"]:
        image, category = row.get("image_id"), row.get("category_id")
        if not isinstance(image, (int, str)) or image not in sizes:
            raise InputError(f"{path}: an annotation belongs to the image {image!r}, which is not listed")
        if not isinstance(category, int) or category not in index:
            raise InputError(f"{path}: an annotation of image {image!r} has the unknown category {category!r}")
        name, width, height = sizes[image]
        box = inside(row.get("bbox"), width, height, f"{path}: {name}")
        if box is not None:
            outline = row.get("segmentation") if segments else None
            things[image].append(Thing(index[category], box, bool(row.get("iscrowd")), outline))
    top = photo_folder(path, folder, part, [name for name, _, _ in sizes.values()])
    found = [Picture(top / name, width, height, tuple(things[id_])) for id_, (name, width, height) in sizes.items()]
    check_sizes(found, path)
    return tuple(found)


def inside(box: Any, width: int, height: int, where: str) -> tuple[float, float, float, float] | None:
    """COCO's (left, top, width, height) as corners, cut at the edges; None where nothing of it is left."""
    numbers = box if isinstance(box, list) and len(box) == 4 else []
    if not numbers or not all(isinstance(one, (int, float)) and abs(one) < 1e9 for one in numbers):
        raise InputError(f"{where}: a bbox is [left, top, width, height] in pixels, not {str(box)[:60]}")
    left, top, right, bottom = numbers[0], numbers[1], numbers[0] + numbers[2], numbers[1] + numbers[3]
    left, right = (min(max(float(one), 0.0), float(width)) for one in (left, right))
    top, bottom = (min(max(float(one), 0.0), float(height)) for one in (top, bottom))
    return (left, top, right, bottom) if right > left and bottom > top else None


def photo_folder(path: Path, folder: Path, part: str, names: Sequence[str]) -> Path:
    """Where the photos of a part are: the first place that has the first of them."""

    def places() -> Iterator[Path]:
        for name in (*PARTS[part], path.stem.removeprefix("instances_")):
            yield from (folder / name, folder / name / "images", folder / "images" / name)
        yield from (folder / "images", path.parent, folder)

    for place in places():
        if (place / names[0]).is_file():
            return place
    raise InputError(f"{path}: its photo {names[0]} is neither in {folder / part} nor in {folder / 'images'}")


def check_sizes(found: Sequence[Picture], path: Path) -> None:
    """Boxes and outlines are in pixels: a photo of another size would put each in the wrong place."""

    def check(picture: Picture) -> None:
        if not picture.path.is_file():
            raise InputError(f"{picture.path}: no such file, but {path} lists it")
        if (size := image_size(picture.path)) != (picture.width, picture.height):
            told = f"{picture.width}×{picture.height}"
            raise InputError(f"{picture.path}: is {size[0]}×{size[1]}, but {path.name} says {told}")

    with ThreadPoolExecutor(4) as pool:
        for _ in progress(pool.map(check, found), f"checking {path.name}", len(found)):
            pass
