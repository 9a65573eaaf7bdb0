"""What `veca features` is given, as files and entries that any process can read: images, folders of them, lists,
tar shards, and Parquet files with a column of images.

An entry has a name, under which its features are found: the absolute path or address of a file,
`…/shard.tar/member.jpg` in a tar shard, `…/table.parquet/17` for a row.
"""

from __future__ import annotations

import os
import posixpath
import tarfile
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from veca.distill.sources import expand_braces, index_tar, names_in
from veca.errors import InputError, require
from veca.folders import is_image, refuse_special, walk
from veca.images import SUFFIXES, Source

COLUMNS = ("image", "bytes", "content")  # where a Parquet file keeps its images
SHARDS = (".tar", ".parquet")


class Entry(NamedTuple):
    name: str
    file: str
    place: int = -1  # where its bytes begin in a tar shard, or its row in a Parquet file; −1: the file is the image
    size: int = -1  # how many bytes, in a tar shard

    def read(self) -> Source:
        if self.place < 0:
            refuse_special(self.file)
            return self.file
        if self.size < 0:
            return _row(self.file, self.place)
        with open(self.file, "rb") as file:
            file.seek(self.place)
            return file.read(self.size)


def find_entries(paths: Iterable[str | Path]) -> list[Entry]:
    """Every image on this machine's disks that was named or found, once, in a fixed order."""
    _refuse_far(map(str, paths))
    files = find_files(paths)
    _refuse_far(files)  # of a list
    found = {entry.name: entry for file in files for entry in _entries(file)}
    if not found:
        raise InputError(f"no images in {', '.join(map(str, paths))} (looking for {' '.join(SUFFIXES)})")
    return list(found.values())


def _refuse_far(paths: Iterable[str]) -> None:
    if far := [path for path in paths if "://" in path]:
        raise InputError(f"{far[0]}: addresses are read by --engine ray; here, copy or mount it first")


def find_files(paths: Iterable[str | Path]) -> list[str]:
    """Every image and shard that was named, or found in a folder or a list: absolute paths and addresses."""
    given = [pattern for path in paths for pattern in expand_braces(str(path))]
    if not given:
        raise InputError("name at least one image or folder; `veca features --help` has examples")
    found = dict.fromkeys(file for path in given for file in (_far(path) if "://" in path else _near(path)))
    if not found:
        raise InputError(f"no images in {', '.join(given)} (looking for {' '.join(SUFFIXES)})")
    return list(found)


def _near(given: str) -> Iterator[str]:
    path = os.path.abspath(given)  # noqa: PTH100  (a link keeps its own name)
    if Path(path).is_dir():
        walked = walk(given)
        names = sorted([*walked.images, *walked.special])
        shards = () if names else sorted(str(file) for kind in SHARDS for file in Path(path).glob(f"*{kind}"))
        yield from (os.path.join(path, name) for name in names)  # noqa: PTH118
        yield from shards
    elif not Path(path).exists():
        raise InputError(f"{given}: no such file or folder")
    elif path.endswith(".txt"):
        names = names_in(Path(path).read_bytes(), path)
        yield from (name if "://" in name else os.path.normpath(Path(path).parent / name) for name in names)
    else:
        yield path


def _far(address: str) -> Iterator[str]:
    from pyarrow import fs

    files, path = file_system(address)
    begin = address[: len(address) - len(path)] if address.endswith(path) else f"{address.partition('://')[0]}://"
    try:
        info = files.get_file_info(path)
        if info.type == fs.FileType.NotFound:
            raise InputError(f"{address}: no such file or folder")
        if info.is_file and address.endswith(".txt"):
            with files.open_input_stream(path) as stream:
                names = names_in(stream.read(), address)
            yield from (name if "://" in name else posixpath.join(posixpath.dirname(address), name) for name in names)
            return
        if info.is_file:
            yield address
            return
        below = files.get_file_info(fs.FileSelector(path, recursive=True))
    except OSError as error:
        raise InputError(f"{address} cannot be listed: {' '.join(str(error).split())[:160]}") from error
    shown = [one.path for one in below if one.is_file and "/." not in one.path[len(path) :]]
    images = sorted(one for one in shown if is_image(one))
    yield from (begin + one for one in images or sorted(one for one in shown if one.endswith(SHARDS)))


def file_system(address: str) -> tuple[Any, str]:
    """pyarrow's file system of an address, or fsspec's, and the path in it."""
    fs = require("pyarrow.fs", "parquet")
    try:
        files, path = fs.FileSystem.from_uri(address)
    except ValueError:
        import fsspec

        try:
            theirs, path = fsspec.core.url_to_fs(address)
        except (ValueError, ImportError) as error:
            raise InputError(f"{address}: neither pyarrow nor fsspec knows this kind of address ({error})") from None
        files = fs.PyFileSystem(fs.FSSpecHandler(theirs))
    except OSError as error:
        raise InputError(f"{address} cannot be reached: {' '.join(str(error).split())[:160]}") from error
    return files, str(path)


def _entries(path: str) -> Iterator[Entry]:
    if path.endswith(".tar"):
        part, _ = index_tar(Path(path))
        assert part.offsets is not None
        assert part.sizes is not None
        places = zip(part.offsets.tolist(), part.sizes.tolist(), strict=True)
        yield from (Entry(member(path, part.name(number)), path, *place) for number, place in enumerate(places))
    elif path.endswith(".parquet"):
        yield from (Entry(f"{path}/{row}", path, row) for row in range(_table(path).metadata.num_rows))
    else:
        yield Entry(path, path)


def member(shard: str, name: str) -> str:
    return f"{shard}/{posixpath.normpath(name)}"


def read_whole(file: str) -> Iterator[tuple[str, bytes]]:
    """Every image in a file, wherever it is, one after another: for workers of a cluster, which share no disk."""
    if "://" in file:
        files, path = file_system(file)
    else:
        refuse_special(file)
        files, path = require("pyarrow.fs", "parquet").LocalFileSystem(), file
    if file.endswith(".tar"):
        with files.open_input_stream(path) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
            for one in tar:
                if one.isfile() and is_image(one.name):
                    yield member(file, one.name), tar.extractfile(one).read()  # type: ignore[union-attr]
    elif file.endswith(".parquet"):
        with files.open_input_file(path) as stream:
            table, row = require("pyarrow.parquet", "parquet").ParquetFile(stream), 0
            for batch in table.iter_batches(16, columns=[image_column(table.schema_arrow.names, file)]):
                for value in batch[0]:
                    yield f"{file}/{row}", image_bytes(value.as_py())
                    row += 1
    else:
        with files.open_input_stream(path) as stream:
            yield file, stream.read()


def image_column(names: Iterable[str], file: str) -> str:
    """Which column of a table holds the images."""
    there = [name for name in COLUMNS if name in names]
    if not there:
        raise InputError(f"{file}: no column of images; it needs one of {', '.join(COLUMNS)}")
    return there[0]


def image_bytes(value: Any) -> bytes:
    """What a cell holds: the bytes of a file, or as Hugging Face's data sets write it, a table with them."""
    data = value.get("bytes") if isinstance(value, dict) else value
    return data if isinstance(data, bytes) else b""  # which no decoder takes for an image


@lru_cache(maxsize=8)
def _table(file: str) -> Any:
    parquet = require("pyarrow.parquet", "parquet")
    try:
        return parquet.ParquetFile(file)
    except (OSError, ValueError) as error:
        raise InputError(f"{file} is not a readable Parquet file ({' '.join(str(error).split())[:120]})") from error


@lru_cache(maxsize=2)
def _group(file: str, group: int) -> Any:
    """The images of a row group: a worker reads neighbouring rows one after another."""
    table = _table(file)
    return table.read_row_group(group, columns=[image_column(table.schema_arrow.names, file)])[0]


def _row(file: str, row: int) -> bytes:
    metadata = _table(file).metadata
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group).num_rows
        if row < rows:
            return image_bytes(_group(file, group)[row].as_py())
        row -= rows
    raise InputError(f"{file}: has no row {row}")
