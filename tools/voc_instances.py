"""Lay out an instance set from VOC's semantic masks: `python tools/voc_instances.py ../shared/data/voc-seg OUT`.

VOC draws a border that does not count around every object, also between two that touch. So the connected parts of a
class are its objects, but for those that something in front cuts in two (each piece counts as one here) and for pieces
under 0.1 % of the photo, which do not count. OUT gets train/ and val/ with images/ and instances/, and classes.txt, as
`veca probe masks` reads them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.ndimage import label as parts_of

from veca.images import stored_values
from veca.tasks.base.presets import SEGMENT

SMALL = 0.001  # of the photo
VOID = 65535


def main(source: Path, out: Path) -> None:
    for part in ("train", "val"):
        for kind in ("images", "instances"):
            (out / part / kind).mkdir(parents=True, exist_ok=True)
        photos = things = 0
        for path in sorted((source / part / "masks").glob("*.png")):
            values, count = instances(stored_values(path))
            Image.fromarray(values).save(out / part / "instances" / path.name)
            (photo,) = (source / part / "images").glob(f"{path.stem}.*")
            link = out / part / "images" / photo.name
            link.unlink(missing_ok=True)
            link.symlink_to(photo.resolve())
            photos, things = photos + 1, things + count
        print(f"{part}: {photos} photos, {things} things")
    names = SEGMENT["voc2012"].names[1:]
    (out / "classes.txt").write_text("\n".join(names) + "\n", encoding="utf-8")


def instances(mask: np.ndarray) -> tuple[np.ndarray, int]:
    """Class numbers, H×W with 255 for what does not count → 1000·class + number, and how many things there are."""
    found = np.where(mask == 255, VOID, 0).astype(np.uint16)
    count = 0
    for kind in np.unique(mask[(mask > 0) & (mask < 255)]).tolist():
        pieces, many = parts_of(mask == kind)
        number = 0
        for piece in range(1, many + 1):
            plane = pieces == piece
            if plane.sum() < SMALL * mask.size:
                found[plane] = VOID
            else:
                found[plane] = kind * 1000 + number
                number += 1
        count += number
    return found, count


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
