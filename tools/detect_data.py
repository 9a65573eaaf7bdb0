"""Photographs with boxes for docs/detect.md: a small set in COCO's format, from fetched public repositories.

    python tools/detect_data.py --mirror ../.mirror --out ../data/detect

| what | from |
| --- | --- |
| photographs | hai4h/cnn-edge-detection, `train2017`: COCO train2017, squashed to 256² there |
| boxes | dyuan459/Efficient-Robust-Object-Detection-1, `labels/train`: 10,019 of them; ids above 79 are missing |

Kept are the `--classes` categories with most boxes of at least a sixteenth of the photograph (the others are too small
at 256² for so short a training), and the photographs that show one of them; of those the last `--test` in the order of
a fixed shuffle are the test part. Boxes are relative there, so they fit the squashed square. Nothing is committed.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from pathlib import Path

from photos import Part, files, read  # what lists and reads a fetched repository

SIDE = 256
LARGE = 1 / 16
NAMES = {  # COCO's ids up to 79, as far as the boxes have them
    1: "person", 2: "bicycle", 3: "car", 4: "motorcycle", 5: "airplane", 6: "bus", 7: "train", 8: "truck", 9: "boat",
    10: "traffic light", 11: "fire hydrant", 13: "stop sign", 14: "parking meter", 15: "bench", 16: "bird", 17: "cat",
    18: "dog", 19: "horse", 20: "sheep", 21: "cow", 22: "elephant", 23: "bear", 24: "zebra", 25: "giraffe",
    27: "backpack", 28: "umbrella", 31: "handbag", 32: "tie", 33: "suitcase", 34: "frisbee", 35: "skis",
    36: "snowboard", 37: "sports ball", 38: "kite", 39: "baseball bat", 40: "baseball glove", 41: "skateboard",
    42: "surfboard", 43: "tennis racket", 44: "bottle", 46: "wine glass", 47: "cup", 48: "fork", 49: "knife",
    50: "spoon", 51: "bowl", 52: "banana", 53: "apple", 54: "sandwich", 55: "orange", 56: "broccoli", 57: "carrot",
    58: "hot dog", 59: "pizza", 60: "donut", 61: "cake", 62: "chair", 63: "couch", 64: "potted plant", 65: "bed",
    67: "dining table", 70: "toilet", 72: "tv", 73: "laptop", 74: "mouse", 75: "remote", 76: "keyboard",
    77: "cell phone", 78: "microwave", 79: "oven",
}  # fmt: skip
Box = tuple[int, float, float, float, float]  # id, then centre and size as shares of the photograph


def boxes(text: str) -> list[Box]:
    rows = [line.split() for line in text.splitlines()]
    return [(int(row[1]), *map(float, row[2:6])) for row in rows if len(row) == 6]  # type: ignore[misc]


def table(photos: list[str], labels: dict[str, list[Box]], kept: list[int]) -> dict[str, object]:
    images, annotations = [], []
    for number, stem in enumerate(photos, 1):
        images.append({"id": number, "file_name": f"{stem}.jpg", "width": SIDE, "height": SIDE})
        for category, x, y, width, height in labels[stem]:
            if category in kept:
                corner = [(x - width / 2) * SIDE, (y - height / 2) * SIDE, width * SIDE, height * SIDE]
                annotations.append(
                    {
                        "id": len(annotations) + 1,
                        "image_id": number,
                        "category_id": category,
                        "bbox": [round(value, 2) for value in corner],
                        "area": round(width * height * SIDE**2, 2),
                        "iscrowd": 0,
                    }
                )
    categories = [{"id": number, "name": NAMES[number]} for number in kept]
    return {"images": images, "annotations": annotations, "categories": categories}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mirror", type=Path, required=True, help="where the fetched repositories lie")
    parser.add_argument("--out", type=Path, required=True, help="folder of the set, outside the checkout")
    parser.add_argument("--classes", type=int, default=12)
    parser.add_argument("--train", type=int, default=3000)
    parser.add_argument("--test", type=int, default=500)
    settings = parser.parse_args()
    listed = files(
        settings.mirror, Part("dyuan459+Efficient-Robust-Object-Detection-1", "labels/train/", ".txt", False)
    )
    labels = {Path(path).stem: boxes(content.decode()) for path, _, content in read(listed)}
    large = Counter(box[0] for found in labels.values() for box in found if box[3] * box[4] >= LARGE)
    kept = sorted(number for number, _ in large.most_common(settings.classes))
    photos = {
        Path(item[2]).stem: item
        for item in files(settings.mirror, Part("hai4h+cnn-edge-detection", "train2017/", ".jpg", True))
    }
    shown = sorted(stem for stem, found in labels.items() if stem in photos and any(box[0] in kept for box in found))
    random.Random(0).shuffle(shown)
    parts = {"test": shown[-settings.test :], "train": shown[: -settings.test][: settings.train]}
    for part, stems in parts.items():
        (settings.out / part).mkdir(parents=True, exist_ok=True)
        for path, _, content in read([photos[stem] for stem in stems]):
            (settings.out / part / Path(path).name).write_bytes(content)
        there = [stem for stem in stems if (settings.out / part / f"{stem}.jpg").exists()]
        found = table(there, labels, kept)
        (settings.out / f"{part}.json").write_text(json.dumps(found))
        print(f"{part}: {len(there)} photographs, {len(found['annotations'])} boxes")  # type: ignore[arg-type]
    print("categories: " + ", ".join(NAMES[number] for number in kept))


if __name__ == "__main__":
    main()
