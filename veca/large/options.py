"""What every command that takes large images asks: at which resolution, and which three channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro

from veca.errors import InputError
from veca.folders import is_image, walk
from veca.large.formats import READ_BY_PARTS, opener_of
from veca.large.picture import Picture, open_source


@dataclass(kw_only=True)
class ViewOptions:
    level: int | None = None
    """one of the file's own resolutions, 0 the finest"""
    mpp: Annotated[str | None, tyro.conf.arg(metavar="LENGTH")] = None
    """micrometres a pixel (0.5), or with a unit (10m): resampled as it is read"""
    scale: float | None = None
    """or a factor: 0.5 halves both sides"""
    bands: Annotated[str | None, tyro.conf.arg(metavar="R,G,B")] = None
    """which bands are red, green and blue, from 1: 4,3,2; one number: grey"""
    stretch: Annotated[str | None, tyro.conf.arg(metavar="LOW,HIGH")] = None
    """percentiles of each band that become black and white: 2,98"""

    def view(self) -> dict[str, Any]:
        names = ("level", "mpp", "scale", "bands", "stretch")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def open(self, path: Path) -> Picture:
        return open_source(path, **self.view())


class Input(NamedTuple):
    """One image, and what its results are called: by its name, below a folder by its path from there."""

    path: Path
    name: str


def in_folders(paths: tuple[Path, ...]) -> list[Input]:
    """These images, and those in these folders; a folder that is an image (Zarr) is one."""
    found: list[Input] = []
    for path in paths:
        if not path.is_dir() or opener_of(path):
            found.append(Input(path, path.name))
            continue
        inside = walk(path, is_large, lambda folder: opener_of(Path(folder)) is not None).images
        if not inside:
            raise InputError(f"{path}: no images in this folder")
        found += [Input(path / name, name) for name in inside]
    if len({name for _, name in found}) < len(found):
        raise InputError(
            "two of the images have the same name; write them to different folders, or name one above both"
        )
    return found


def is_large(name: str) -> bool:
    """Whether a file is read here, by its name."""
    return is_image(name) or (not name.startswith(".") and name.lower().endswith(READ_BY_PARTS))


def check_inputs(paths: Sequence[Path], where: str | None, verb: str) -> None:
    """What is missing is known before a model is loaded."""
    if not paths:
        raise InputError(f"name at least one image to {verb}")
    for path in paths:
        if not path.is_file() and not (path.is_dir() and opener_of(path)):
            raise InputError(f"{path}: {'is a folder, not an image' if path.is_dir() else 'no such file'}")
    if where not in (None, "auto") and not Path(str(where)).is_file():
        raise InputError(f"{where}: {'is a folder, not a mask' if Path(str(where)).is_dir() else 'no such file'}")


def file_stamp(path: Path) -> list[int]:
    """What changes when a file does: its size and when it was written; nothing where there is none."""
    if not path.exists() or not path.name:
        return []
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]
