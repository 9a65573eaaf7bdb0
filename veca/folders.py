"""Which images a folder holds: the one walker, and the one rule for what may be opened."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from veca.errors import InputError
from veca.images import SUFFIXES


@dataclass
class Walk:
    """What was found below a folder; names are relative to it, with `/`, and sorted."""

    images: list[str] = field(default_factory=list)
    special: list[str] = field(default_factory=list)  # named like images, but pipes, sockets or dead links
    stamps: dict[str, int] = field(default_factory=dict)  # of every folder: changes when a file comes or goes


def is_image(name: str) -> bool:
    """By its name; hidden files (macOS leaves `._photo.jpg` beside a photo) are none."""
    return name.lower().endswith(SUFFIXES) and not name.rpartition("/")[2].startswith(".")


def by_number(name: str) -> list[Any]:
    """A key that sorts frames as they were taken: frame2 before frame10."""
    words_and_numbers = re.split(r"([0-9]+)", name)  # a number at every other place
    return [int(part) if place % 2 else part for place, part in enumerate(words_and_numbers)] + [name]


def walk(
    top: str | Path,
    is_wanted: Callable[[str], bool] = is_image,  # by the name of a file
    is_whole: Callable[[str], bool] = lambda path: False,  # by the path of a folder: it is one image
) -> Walk:
    """Every image below a folder. Hidden folders are left out; a link to a folder is followed, each folder once."""
    found, seen = Walk(), set()
    folders: list[str] = [""]
    links: list[str] = []
    while folders or links:
        relative = folders.pop() if folders else links.pop()  # a folder is known by its own name before a link's
        here = Path(top, relative)
        try:
            status = here.stat()
            if (status.st_dev, status.st_ino) in seen:  # a link back to a folder above
                continue
            entries = sorted(os.scandir(here), key=lambda entry: entry.name, reverse=True)
        except OSError as error:
            if not relative:
                raise InputError(f"{top} cannot be listed: {error.strerror}") from error
            continue  # vanished, or not ours to read
        seen.add((status.st_dev, status.st_ino))
        found.stamps[relative] = status.st_mtime_ns
        for entry in entries:
            name = f"{relative}/{entry.name}" if relative else entry.name
            mode = _mode(entry.path)
            if stat.S_ISDIR(mode):
                if not entry.name.startswith("."):
                    into = links if entry.is_symlink() else folders
                    (found.images if is_whole(entry.path) else into).append(name)
            elif is_wanted(entry.name):
                (found.images if stat.S_ISREG(mode) else found.special).append(name)
    found.images.sort()
    found.special.sort()
    return found


def refuse_special(path: str | Path) -> None:
    """A pipe named like a photo would be waited for without end."""
    mode = _mode(path)
    if mode and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise InputError(f"{path}: not a regular file")


def _mode(path: str | Path) -> int:
    """0 where there is nothing, as behind a link that leads nowhere or to itself."""
    try:
        return Path(path).stat().st_mode
    except (OSError, ValueError):
        return 0
