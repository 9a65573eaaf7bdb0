"""Which frames and masks a data set of videos holds: DAVIS's layout, or plain folders.

DAVIS/JPEGImages/480p/NAME/00000.jpg …    DAVIS/Annotations/480p/NAME/00000.png …    DAVIS/ImageSets/…/val.txt
mine/frames/NAME/….jpg                     mine/masks/NAME/….png
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from veca.errors import InputError
from veca.files import read_text
from veca.folders import by_number, is_image
from veca.images import image_size, stored_values

LAYOUTS = (("JPEGImages", "Annotations"), ("frames", "masks"))
LISTS = ("ImageSets/480p/val.txt", "ImageSets/2016/val.txt", "ImageSets/2017/val.txt", "val.txt")
LOSSY = (".jpg", ".jpeg")


@dataclass(frozen=True)
class Sequence:
    name: str
    frames: tuple[Path, ...]
    masks: tuple[Path | None, ...]  # of each frame; the first has one

    def first(self, count: int) -> Sequence:
        """Its first frames; 0 means all."""
        return Sequence(self.name, self.frames[: count or None], self.masks[: count or None])

    @property
    def scored(self) -> list[int]:
        """Frames whose masks count. DAVIS leaves out the first, which is given, and the last."""
        return [number for number in range(1, len(self.frames) - 1) if self.masks[number] is not None]


def find_sequences(data: Path, frames: int = 0) -> list[Sequence]:
    """Every sequence with a mask of its first frame, by name; where the data set has a list, those on it.

    Of each the first `frames` frames (0: all). What is wrong with one is said here, before the long work.
    """
    if not data.is_dir():
        raise InputError(f"{data}: {'is a file, not a folder' if data.exists() else 'no such folder'}")
    images, masks = next(
        ((data / images, data / masks) for images, masks in LAYOUTS if (data / images).is_dir()),
        (None, None),
    )
    if images is None or masks is None:
        raise InputError(f"{data} has neither JPEGImages/ and Annotations/ nor frames/ and masks/ in it")
    if (images / "480p").is_dir():
        images, masks = images / "480p", masks / "480p"
    names = listed(data) or sorted(path.name for path in images.iterdir() if path.is_dir() and path.name[0] != ".")
    found = [sequence(images / name, masks / name).first(frames) for name in names]
    if not found:
        raise InputError(f"no sequences in {images}: a folder of frames each")
    for one in found:
        check(one)
    return found


def listed(data: Path) -> list[str]:
    """Names on the data set's list of validation sequences: one a line, or (DAVIS 2016) the paths of all frames."""
    for name in LISTS:
        if (data / name).is_file():
            lines = [line.split()[0] for line in read_text(data / name).splitlines() if line.strip()]
            return list(dict.fromkeys(line.strip("/").split("/")[-2] if "/" in line else line for line in lines))
    return []


def sequence(images: Path, masks: Path) -> Sequence:
    if not images.is_dir():
        raise InputError(f"{images}: no such folder, but the list of sequences names it")
    frames = sorted((path for path in images.iterdir() if is_image(path.name)), key=lambda path: by_number(path.name))
    known = {path.stem: path for path in sorted(masks.iterdir()) if is_image(path.name)} if masks.is_dir() else {}
    if lossy := [path for path in known.values() if path.suffix.lower() in LOSSY]:
        raise InputError(f"{lossy[0]}: JPEG does not keep the numbers of a mask; save it as PNG")
    if not frames or frames[0].stem not in known:
        first = frames[0].stem if frames else "the first frame"
        raise InputError(f"{images}: no mask of {first} in {masks}; propagation starts from it")
    return Sequence(images.name, tuple(frames), tuple(known.get(path.stem) for path in frames))


def check(one: Sequence) -> None:
    if not one.scored:
        raise InputError(
            f"{one.name}: nothing to score in {len(one.frames)} frames: the first and the last do not count, and "
            f"another with a mask is needed"
        )
    for number in (0, *one.scored):
        mask = one.masks[number]
        assert mask is not None
        if image_size(mask) != image_size(one.frames[number]):
            raise InputError(f"{mask}: another size than its frame {one.frames[number]}")
    if not objects(read_mask(one.masks[0])):
        raise InputError(f"{one.masks[0]}: the first mask is empty; there is no object to follow")


def read_mask(path: Path | None) -> np.ndarray[Any, Any]:
    """H×W, 0 for the background and a number for each object.

    Of a mask in colours everything but black is object 255: DAVIS 2016 has grey ones and such in one sequence.
    """
    assert path is not None
    values = stored_values(path)
    if values.ndim == 2:
        return values
    colours = values[..., : 1 if values.shape[-1] == 2 else 3]  # without alpha
    mask: np.ndarray[Any, Any] = (colours != 0).any(-1) * np.uint8(255)
    return mask


def objects(mask: np.ndarray[Any, Any]) -> list[int]:
    """The numbers of a mask's objects."""
    return [int(value) for value in np.unique(mask) if value != 0]
