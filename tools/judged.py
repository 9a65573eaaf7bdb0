"""Photographs that judge veca-s14 and that it never trains on, laid out from fetched public repositories.

    python tools/judged.py --mirror ../.mirror --out ../data

| folder | from | what |
| --- | --- | --- |
| `caltech/` | MachineLearning2020/Homework2-Caltech101 | 102 folders: 15 photographs each to look among, 10 to judge |
| `underwater/` | xieyifang0508/fasterrcnn, `VOC2007` | the 679 of 3840×2160 pixels, and their boxes |
| `davis/` | MathLee/EOR-VOS | DAVIS 2016 val: 20 sequences of 854×480 and their masks |
| `davis_frames/` | MathLee/EOR-VOS | the middle frame of each of DAVIS 2016's 20 sequences, 854×480 |
| `everyday/` | jigsawpieces/dog-api-images | people's photographs of their dogs, short side of 896 pixels or more |

Of `everyday/` every second breed calibrates (`calibrating/`), the others judge (`judging/`). A folder that is there
already is left alone. Everything stays outside the checkout.
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

from veca.files import whole_folder

AMONG, JUDGED = 15, 10  # photographs a kind
SHORTEST = 896  # pixels


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


def everyday(mirror: Path, out: Path) -> None:
    photos = files(mirror, Part("jigsawpieces+dog-api-images", "", ".jpg", False))
    own = [item for item in photos if not re.match(r"n0\d{7}_", Path(item[2]).name)]  # the others are of ImageNet
    large = {path for path, _, content in read(own) if min(Image.open(io.BytesIO(content)).size) >= SHORTEST}
    breeds = sorted({str(Path(path).parent) for path in large})
    parts = {breed: ("calibrating", "judging")[number % 2] for number, breed in enumerate(breeds)}
    kept = (item for item in own if item[2] in large)
    place(out, ((f"{parts[str(Path(item[2]).parent)]}/{item[2].replace('/', '-')}", item) for item in kept))


def place(out: Path, wanted: Iterable[tuple[str, tuple[Path, str, str, bool]]]) -> None:
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
    for lay_out in (caltech, underwater, davis, davis_frames, everyday):
        target = settings.out / lay_out.__name__
        if target.exists():
            print(f"{target}: there already")
        else:
            lay_out(settings.mirror, target)


if __name__ == "__main__":
    main()
