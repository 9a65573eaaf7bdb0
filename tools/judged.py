"""Photographs that judge veca-s14 and that it never trains on, laid out from fetched public repositories.

    python tools/judged.py --mirror ../.mirror --out ../data

| folder | from | what |
| --- | --- | --- |
| `caltech/` | MachineLearning2020/Homework2-Caltech101 | 102 folders: 15 photographs each to look among, 10 to judge |
| `underwater/` | xieyifang0508/fasterrcnn, `VOC2007` | the 679 of 3840×2160 pixels, and their boxes |
| `davis/` | MathLee/EOR-VOS | DAVIS 2016 val: 20 sequences of 854×480 and their masks |
| `davis_frames/` | MathLee/EOR-VOS | the middle frame of each of DAVIS 2016's 20 sequences, 854×480 |
| `varied/` | jigsawpieces/dog-api-images | people's photographs of their dogs |
| | xieyifang0508/fasterrcnn, `VOC2007` | dives above the sea floor |
| | zzzDavid/ICDAR-2019-SROIE | scanned receipts |

Of `varied/`, which has as many of each kind, all with a short side of 896 pixels or more, every second breed, third
stretch of the dives and second receipt judges (`judging/`), the others calibrate (`calibrating/`). A folder that is
there already is left alone. Everything stays outside the checkout.
"""

from __future__ import annotations

import argparse
import io
import random
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from photos import Part, files, read
from PIL import Image
from underwater import STRETCHES

from veca.files import whole_folder

AMONG, JUDGED = 15, 10  # photographs a kind
SHORTEST = 896  # pixels
OF_A_KIND = 16  # photographs in each part of varied/
Item = tuple[Path, str, str, bool]


def caltech(mirror: Path, out: Path) -> None:
    kinds = defaultdict(list)
    for item in files(mirror, Part("MachineLearning2020+Homework2-Caltech101", "101_ObjectCategories/", ".jpg", False)):
        kinds[item[2].split("/")[1]].append(item)
    chosen = {}
    for kind, items in kinds.items():
        picked = random.Random(kind).sample(items, AMONG + JUDGED)
        for number, item in enumerate(picked):
            chosen[item[2]] = f"{'train' if number < AMONG else 'test'}/{kind}/{Path(item[2]).name}", item
    place(out, ((name, item) for name, item in chosen.values()))


def underwater(mirror: Path, out: Path) -> None:
    folder = "VOCdevkit/VOC2007"
    boxes = files(mirror, Part("xieyifang0508+fasterrcnn", f"{folder}/Annotations/", ".xml", False))
    large = {Path(path).stem for path, _, content in read(boxes) if b"<width>3840</width>" in content}
    photos = files(mirror, Part("xieyifang0508+fasterrcnn", f"{folder}/JPEGImages/", ".jpg", False))
    place(
        out, ((item[2].removeprefix(f"{folder}/"), item) for item in [*boxes, *photos] if Path(item[2]).stem in large)
    )


def davis(mirror: Path, out: Path) -> None:
    kinds = (("JPEGImages", ".jpg"), ("Annotations", ".png"))
    parts = [Part("MathLee+EOR-VOS", f"DAVIS/{kind}/480p/", ending, False) for kind, ending in kinds]
    found = (item for part in parts for item in files(mirror, part))
    place(out, ((item[2].removeprefix("DAVIS/"), item) for item in found))


def davis_frames(mirror: Path, out: Path) -> None:
    sequences = defaultdict(list)
    for item in files(mirror, Part("MathLee+EOR-VOS", "DAVIS/JPEGImages/480p/", ".jpg", False)):
        sequences[Path(item[2]).parent.name].append(item)
    place(out, ((f"{name}.jpg", items[len(items) // 2]) for name, items in sequences.items()))


def varied(mirror: Path, out: Path) -> None:
    dogs = files(mirror, Part("jigsawpieces+dog-api-images", "", ".jpg", False))
    dogs = [item for item in dogs if not re.match(r"n0\d{7}_", Path(item[2]).name)]  # the others are of ImageNet
    dives = files(mirror, Part("xieyifang0508+fasterrcnn", "VOCdevkit/VOC2007/JPEGImages/", ".jpg", False))
    receipts = files(mirror, Part("zzzDavid+ICDAR-2019-SROIE", "data/img/", ".jpg", False))
    wanted = []
    for kind, items in (("dog", dogs), ("dive", dives), ("receipt", receipts)):
        large = {path for path, _, content in read(items) if min(Image.open(io.BytesIO(content)).size) >= SHORTEST}
        kept = [item for item in items if item[2] in large]
        breeds = sorted({str(Path(item[2]).parent) for item in kept})
        parts: dict[str, list[Item]] = {"calibrating": [], "judging": []}
        for number, item in enumerate(kept):
            judges = {
                "dog": breeds.index(str(Path(item[2]).parent)) % 2,
                "dive": number * STRETCHES // len(kept) % 3 == 2,
                "receipt": number % 2,
            }
            parts["judging" if judges[kind] else "calibrating"].append(item)
        for part, found in parts.items():
            for number in range(OF_A_KIND):
                item = found[number * len(found) // OF_A_KIND]
                wanted.append((f"{part}/{kind}-{number:02d}.jpg", item))
    place(out, wanted)


def place(out: Path, wanted: Iterable[tuple[str, Item]]) -> None:
    names = {item[2]: (name, item) for name, item in wanted}
    with whole_folder(out) as folder:
        for path, _, content in read([item for _, item in names.values()]):
            target = folder / names[path][0]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    print(f"{out}: {sum(1 for path in out.rglob('*') if path.is_file())} files", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mirror", type=Path, required=True, help="where the fetched repositories lie")
    parser.add_argument("--out", type=Path, required=True, help="folder for them, outside the checkout")
    settings = parser.parse_args()
    for lay_out in (caltech, underwater, davis, davis_frames, varied):
        target = settings.out / lay_out.__name__
        if target.exists():
            print(f"{target}: there already")
        else:
            lay_out(settings.mirror, target)


if __name__ == "__main__":
    main()
