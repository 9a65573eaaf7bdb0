"""Files are written whole or not at all: a temporary name in the same folder, then a rename."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from veca.errors import InputError

# How safetensors and PyTorch say that a write failed.
WRITERS = ("I/O error", "inline_container", "PytorchStreamWriter")


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it into place on success, remove it on any failure."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The original suffix is kept, because numpy, PIL and matplotlib choose a format by it.
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}.", suffix=f".partial{path.suffix}", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())  # mkstemp makes private files; users expect ordinary ones
        temporary.replace(path)
    except (RuntimeError, SafetensorError) as error:  # the writers of PyTorch and safetensors hide what the disk said
        if shutil.disk_usage(path.parent).free < 64 << 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        if any(words in str(error) for words in WRITERS):
            raise OSError(errno.EIO, "the disk did not take all of it (a quota?)", str(path)) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; on success it takes the place of `path`, on failure it vanishes."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())
        if path.is_dir():  # a folder cannot be replaced in one step: move the old one aside first
            old = temporary.with_suffix(".old")
            path.rename(old)
            temporary.rename(path)
            shutil.rmtree(old)
        else:
            temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def refuse_file(out: str | Path) -> None:
    """For `--out`, before the long work: what is a file cannot become a folder."""
    if Path(out).exists() and not Path(out).is_dir():
        raise InputError(f"--out {out} is a file, not a folder")


def read_text(path: str | Path) -> str:
    """A text file that a user wrote; other encodings than UTF-8 are refused, not guessed."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not text in UTF-8 (byte {error.start}); save it as UTF-8") from None


def write_text(path: str | Path, text: str) -> None:
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def file_digest(path: str | Path) -> str:
    """SHA-256 of a file's content, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(file)


def _digest(file: Any) -> str:  # Python 3.10 has no hashlib.file_digest
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
