"""Which images there are: folders, text lists and tar shards become one numbered index with random access.

A tar shard (webdataset's format) is indexed by the offset of each image in it, so shards and folders are read in the
same way: image i, whoever asks. Listing millions of files is slow on network disks, so indices are cached in
`~/.cache/veca/index` (`caches.cache_folder`) and used again while no folder or shard has changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from veca.caches import cache_folder
from veca.errors import InputError
from veca.files import whole_file
from veca.folders import is_image, refuse_special, walk
from veca.images import SUFFIXES

MAX_BRACES = 100_000  # files that one pattern may stand for


@dataclass
class Part:
    """The images of one source, as arrays: a Python list of millions of names would be copied into every worker."""

    root: str  # the folder, the shard, or the folder of the list
    names: NDArray[np.uint8]  # all names, one after another, UTF-8
    ends: NDArray[np.int64]  # where each name ends
    offsets: NDArray[np.int64] | None = None  # of the image's bytes in the shard; None: names are files below root
    sizes: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.ends)

    def name(self, index: int) -> str:
        begin = int(self.ends[index - 1]) if index else 0
        return bytes(self.names[begin : int(self.ends[index])]).decode("utf-8", "surrogateescape")


class TrainingImages:
    """All images of a list of sources, numbered from 0."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = list(parts)
        self.starts = np.cumsum([0, *(len(part) for part in parts)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def groups(self) -> list[int]:
        """Sizes of the shards, for `schedule.epoch_order`."""
        return [len(part) for part in self.parts]

    def _locate(self, index: int) -> tuple[Part, int]:
        number = int(np.searchsorted(self.starts, index, side="right")) - 1
        return self.parts[number], index - int(self.starts[number])

    def name(self, index: int) -> str:
        part, local = self._locate(index)
        return f"{part.root}/{part.name(local)}"

    def read(self, index: int) -> bytes:
        """The encoded image."""
        part, local = self._locate(index)
        if part.offsets is None or part.sizes is None:
            path = Path(part.root, part.name(local))  # a list may hold absolute paths
            refuse_special(path)
            with open(path, "rb") as file:
                return file.read()
        with open(part.root, "rb") as file:
            file.seek(int(part.offsets[local]))
            return file.read(int(part.sizes[local]))

    def stamp(self, index: int) -> tuple[int, int]:
        """(bytes, time of the last change) of the file that holds an image: as long as it is equal, so is the image."""
        part, local = self._locate(index)
        try:
            status = Path(part.root, "" if part.offsets is not None else part.name(local)).stat()
        except OSError:
            return -1, -1
        return status.st_size, status.st_mtime_ns

    def digest(self) -> str:
        """Changes with the number, names and order of the images, not with where they are kept."""
        digest = hashlib.sha256()
        for part in self.parts:
            digest.update(part.ends.tobytes())
            digest.update(part.names.tobytes())
        return digest.hexdigest()

    def sizes_digest(self) -> str:
        """Changes with the bytes of images in shards: other photographs often have the same names."""
        sizes = [part.sizes for part in self.parts if part.sizes is not None]
        return hashlib.sha256(b"".join(each.tobytes() for each in sizes)).hexdigest() if sizes else ""


def index_images(sources: Sequence[str]) -> TrainingImages:
    """The index of all sources, in the order given; every one must hold at least one image."""
    parts = []
    for path in _expand(sources):
        if path.is_dir():
            found = [_cached(path, _index_folder)]
            if not len(found[0]):  # a folder of shards
                found = [_cached(shard, index_tar) for shard in sorted(path.glob("*.tar"))]
        elif path.suffix == ".tar":
            found = [_cached(path, index_tar)]
        elif path.suffix == ".txt":
            found = [index_list(path)]
        else:
            raise InputError(f"{path}: images are given as folders, .txt lists or .tar shards")
        if not sum(map(len, found)):
            raise InputError(f"{path} holds no images ({', '.join(SUFFIXES[:6])}, …)")
        parts += [part for part in found if len(part)]
    return TrainingImages(parts)


def _expand(sources: Sequence[str]) -> Iterator[Path]:
    for source in sources:
        for pattern in expand_braces(source):
            path = Path(pattern)
            found = (
                [path] if path.exists() else sorted(Path(path.anchor or ".").glob(str(path.relative_to(path.anchor))))
            )
            if not found:
                raise InputError(f"no images at {pattern}: there is no such file or folder")
            yield from found


def expand_braces(pattern: str) -> list[str]:
    """`photos-{000..005}.tar` and `{a,b}.tar`, as users of webdataset write them."""
    found = re.search(r"\{(\d+)\.\.(\d+)\}|\{([^{}]*,[^{}]*)\}", pattern)
    if not found:
        return [pattern]
    if found[3] is not None:
        values = found[3].split(",")
    else:
        first, last = (int(digits[:19]) for digits in (found[1], found[2]))
        if last < first:
            raise InputError(f"{pattern}: the numbers in braces run backwards")
        if last - first >= MAX_BRACES:
            raise InputError(f"{pattern}: the braces stand for more than {MAX_BRACES} files; name a folder instead")
        values = [str(value).zfill(len(found[1])) for value in range(first, last + 1)]
    before, after = pattern[: found.start()], pattern[found.end() :]
    expanded: list[str] = []
    for value in values:
        expanded += expand_braces(before + value + after)
        if len(expanded) > MAX_BRACES:
            raise InputError(f"{pattern}: the braces stand for more than {MAX_BRACES} files; name a folder instead")
    return expanded


def _index_folder(folder: Path) -> tuple[Part, dict[str, Any]]:
    """What is no regular file stays in the index: whoever reads it lists it as unreadable."""
    found = walk(folder)
    return _pack(str(folder), sorted([*found.images, *found.special])), found.stamps


def index_tar(shard: Path) -> tuple[Part, dict[str, Any]]:
    names, offsets, sizes = [], [], []
    try:
        with tarfile.open(shard, "r:") as tar:
            for member in tar:
                if member.isfile() and is_image(member.name):
                    names.append(member.name)
                    offsets.append(member.offset_data)
                    sizes.append(member.size)
                tar.members = []  # type: ignore[attr-defined]  # tarfile keeps every header otherwise
    except (tarfile.TarError, EOFError, OSError) as error:
        raise InputError(f"{shard} is not a readable tar file ({error}): make it again or leave it out") from error
    part = _pack(str(shard), names)
    part.offsets, part.sizes = np.array(offsets, np.int64), np.array(sizes, np.int64)
    return part, _shard_stamp(shard)


def index_list(path: Path) -> Part:
    return _pack(str(path.parent), names_in(path.read_bytes(), path))


def names_in(content: bytes, where: str | Path) -> list[str]:
    """The names that a list holds, one a line."""
    lines = content.decode("utf-8", "surrogateescape").splitlines()
    names = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    for number, name in enumerate(names, 1):
        if "\0" in name:
            raise InputError(f"{where}: its entry {number} holds a NUL byte, which no file's name does; is it text?")
    return names


def _pack(root: str, names: list[str]) -> Part:
    encoded = [name.encode("utf-8", "surrogateescape") for name in names]
    ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)
    return Part(root, np.frombuffer(b"".join(encoded), np.uint8), ends)


def _shard_stamp(shard: Path) -> dict[str, Any]:
    status = shard.stat()
    return {"size": status.st_size, "mtime": status.st_mtime_ns}


def _unchanged(path: Path, stamps: dict[str, Any]) -> bool:
    """A folder's time changes when a file in it comes or goes; so it is enough to look at the folders."""
    try:
        if path.is_file():
            return stamps == _shard_stamp(path)
        return all((path / name).stat().st_mtime_ns == stamp for name, stamp in stamps.items())
    except OSError:
        return False


def _cached(path: Path, build: Any) -> Part:
    """The index of a folder or shard, from the cache where that is still true."""
    where = cache_folder("index") / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:24]}.safetensors"
    try:
        with safe_open(where, framework="np") as file:
            if _unchanged(path, json.loads(file.metadata()["stamps"])):
                stored = file.keys()
                return Part(str(path), **{name: file.get_tensor(name) for name in stored})
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        pass  # none yet, or damaged: make it again
    part: Part
    part, stamps = build(path)
    arrays: dict[str, NDArray[Any]] = {"names": part.names, "ends": part.ends}
    if part.offsets is not None and part.sizes is not None:
        arrays |= {"offsets": part.offsets, "sizes": part.sizes}
    try:
        with whole_file(where) as temporary:
            save_file(arrays, temporary, metadata={"stamps": json.dumps(stamps)})
    except OSError:
        pass  # a cache that cannot be written costs time, not the run
    return part
