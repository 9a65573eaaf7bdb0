"""Training photographs of veca-s14: tar shards, written once, from fetched public repositories.

    python tools/photos.py --mirror ../.mirror --out ../data

| shards | from | what |
| --- | --- | --- |
| `coco-*.tar` | hai4h/cnn-edge-detection, `train2017` | COCO train2017, squashed to 256² there |
| `large-*.tar` | minto5z/coco_yolo; jbhuang0604/SelfExSR; xieyifang0508/fasterrcnn, `test-A-image` | real pixels |
| `animals-*.tar` | MVasquez95/Stanford-Dogs; laxmimerit/dog-cat-full-dataset; routsourav1729/CUB_200_2011 | |
| `rooms-*.tar` | SilviuBR24/room-classification; saideepaknagaraj/Indoor-Scene-Recognition; emanhamed/Houses-dataset ||

The true aspect ratios of the squashed ones are not known: one between 3:4 and 4:3 is drawn for each, the longer side
enlarged; animals, which are judged squashed, are squashed likewise. Of the large ones the short side is at most 1008.
What judges is left out: the photographs of COCO with boxes in dyuan459/Efficient-Robust-Object-Detection-1
(docs/detect.md), `VOC2007` of the last repository, and whatever looks like a photograph under ../shared/data/pets,
nyu-depth or voc-seg (a fingerprint of 256 bits, at most 16 of them different). The shards stay outside the checkout.
"""

from __future__ import annotations

import argparse
import io
import math
import random
import subprocess
import tarfile
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

A_SHARD = 1024
SHORT = 1008  # 1.125 × 896, the largest crop
ASPECT = 4 / 3


class Part(NamedTuple):
    """Some files of a fetched repository."""

    repository: str
    folder: str
    ending: str
    squashed: bool


COCO = [Part("hai4h+cnn-edge-detection", "train2017/", ".jpg", True)]
JUDGING = Part("dyuan459+Efficient-Robust-Object-Detection-1", "labels/train/", ".txt", False)
LARGE = [
    Part("minto5z+coco_yolo", "coco/images/", ".jpg", False),
    Part("jbhuang0604+SelfExSR", "data/Urban100/image_SRF_2/", "_HR.png", False),
    Part("xieyifang0508+fasterrcnn", "VOCdevkit/test-A-image/", ".jpg", False),
]
ANIMALS = [
    Part("MVasquez95+Stanford-Dogs", "dogs_split/", ".jpg", True),
    Part("laxmimerit+dog-cat-full-dataset", "data/", ".jpg", True),
    Part("routsourav1729+CUB_200_2011", "", ".jpg", True),
]
ROOMS = [
    Part("SilviuBR24+room-classification", "dataset/", ".jpg", True),
    Part("saideepaknagaraj+Indoor-Scene-Recognition", "data_indoor/", ".jpg", False),
    Part("emanhamed+Houses-dataset", "Houses Dataset/", ".jpg", False),
]
SIDE, DIFFERENT = 16, 16  # of a fingerprint: its bits are SIDE², and so many may differ


def files(mirror: Path, part: Part) -> list[tuple[Path, str, str, bool]]:
    """(repository, object, path, squashed) of every file of a part, in the order of their names."""
    repository = mirror / part.repository / "repo"
    listing = subprocess.run(
        ["git", "-C", str(repository), "ls-tree", "-r", "HEAD", *filter(None, [part.folder])],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    rows = (line.split(None, 3) for line in listing.splitlines())
    return sorted(
        (repository, row[2], row[3], part.squashed) for row in rows if row[3].lower().endswith(part.ending.lower())
    )


def read(items: list[tuple[Path, str, str, bool]]) -> Iterator[tuple[str, bool, bytes]]:
    """Contents of the files, by one `git cat-file` per repository."""
    for repository in dict.fromkeys(item[0] for item in items):
        mine = [item for item in items if item[0] == repository]
        with subprocess.Popen(
            ["git", "-C", str(repository), "cat-file", "--batch"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as git:
            assert git.stdin is not None
            assert git.stdout is not None
            for _, name, path, squashed in mine:
                git.stdin.write(f"{name}\n".encode())
                git.stdin.flush()
                header = git.stdout.readline().split()
                if header[-1] == b"missing":
                    continue
                content = git.stdout.read(int(header[2]))
                git.stdout.read(1)
                yield path, squashed, content


def fingerprint(image: Image.Image) -> NDArray[np.uint8]:
    """Whether each of SIDE² places is brighter than its right neighbour: the same of a squashed or reduced copy."""
    grey = np.asarray(image.convert("L").resize((SIDE + 1, SIDE), Image.Resampling.BOX), dtype=np.int16)
    return np.packbits(grey[:, :-1] > grey[:, 1:])


def fingerprints(folders: list[Path]) -> NDArray[np.uint8]:
    """Of all photographs in these folders, and of their mirror images."""
    images = [Image.open(path) for folder in folders for path in sorted(folder.rglob("*.webp"))]
    both = [each for image in images for each in (image.convert("RGB"), ImageOps.mirror(image.convert("RGB")))]
    return np.stack([fingerprint(image) for image in both])


def prepared(path: str, squashed: bool, content: bytes, judging: NDArray[np.uint8]) -> bytes | None:
    """The photograph as it is trained on; None if it judges."""
    image = Image.open(io.BytesIO(content)).convert("RGB")
    if np.bitwise_count(judging ^ fingerprint(image)).sum(-1).min() <= DIFFERENT:
        return None
    if squashed:
        ratio = math.exp(random.Random(path).uniform(-math.log(ASPECT), math.log(ASPECT)))
        size = (round(image.width * max(1, ratio)), round(image.height * max(1, 1 / ratio)))
        image = image.resize(size, Image.Resampling.BICUBIC)
    elif min(image.size) > SHORT:
        scale = SHORT / min(image.size)
        image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.LANCZOS)
    elif Path(path).suffix == ".jpg":
        return content
    out = io.BytesIO()
    image.save(out, "JPEG", quality=92)
    return out.getvalue()


def write_shard(job: tuple[Path, list[tuple[Path, str, str, bool]], NDArray[np.uint8]]) -> str:
    shard, items, judging = job
    if shard.exists():
        return f"{shard.name}: there already"
    unreadable, judges = 0, 0
    partial = shard.with_suffix(".partial")
    with tarfile.open(partial, "w") as tar:
        for number, (path, squashed, content) in enumerate(read(items)):
            try:
                data = prepared(path, squashed, content, judging)
            except (OSError, ValueError):
                unreadable += 1
                continue
            if data is None:
                judges += 1
                continue
            info = tarfile.TarInfo(f"{number:04d}-{Path(path).stem}.jpg")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    partial.rename(shard)
    return f"{shard.name}: {len(items) - unreadable - judges} photographs, {unreadable} unreadable, {judges} judge"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mirror", type=Path, required=True, help="where the fetched repositories lie")
    parser.add_argument("--out", type=Path, required=True, help="folder for the shards, outside the checkout")
    parser.add_argument("--shared", type=Path, default=Path("../shared"), help="where data/ holds what judges")
    parser.add_argument("--workers", type=int, default=2)
    settings = parser.parse_args()
    settings.out.mkdir(parents=True, exist_ok=True)
    judging = {Path(item[2]).stem for item in files(settings.mirror, JUDGING)}
    judged = fingerprints([settings.shared / "data" / name for name in ("pets", "voc-seg", "nyu-depth")])
    jobs = []
    for name, parts in (("coco", COCO), ("large", LARGE), ("animals", ANIMALS), ("rooms", ROOMS)):
        found = [item for part in parts for item in files(settings.mirror, part)]
        items = [item for item in found if Path(item[2]).stem not in judging]
        random.Random(0).shuffle(items)
        jobs += [
            (settings.out / f"{name}-{first // A_SHARD:04d}.tar", items[first : first + A_SHARD], judged)
            for first in range(0, len(items), A_SHARD)
        ]
    with get_context("spawn").Pool(settings.workers) as pool:
        for line in pool.imap(write_shard, jobs):
            print(line, flush=True)


if __name__ == "__main__":
    main()
