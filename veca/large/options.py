"""What every command that takes large images asks: at which resolution, and which three channels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

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


def in_folders(paths: tuple[Path, ...]) -> tuple[Path, ...]:
    """The same, with the images of folders instead of the folders; a folder that is an image (Zarr) stays."""
    found: list[Path] = []
    for path in paths:
        if not path.is_dir() or opener_of(path):
            found.append(path)
            continue
        inside = [
            path / name for name in walk(path, is_large, lambda folder: opener_of(Path(folder)) is not None).images
        ]
        if not inside:
            raise InputError(f"{path}: no images in this folder")
        found += inside
    return tuple(found)


def is_large(name: str) -> bool:
    """Whether a file is read here, by its name."""
    return is_image(name) or (not name.startswith(".") and name.lower().endswith(READ_BY_PARTS))


def check_inputs(paths: tuple[Path, ...], where: str | None, verb: str) -> None:
    """What is missing is known before a model is loaded."""
    if not paths:
        raise InputError(f"name at least one image to {verb}")
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        raise InputError(f"two of the images have the same name; {verb} them to different folders")
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
