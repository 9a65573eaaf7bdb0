"""Files are written whole or not at all: a temporary name in the same folder, then a rename."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError

from veca.errors import InputError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# How safetensors and PyTorch say that a write failed.
WRITERS = ("I/O error", "inline_container", "PytorchStreamWriter")
NUMPY = ("Not enough free space", "requested and")


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it into place on success, remove it on any failure."""
    path = Path(path)
    if path.name in ("", ".."):
        raise InputError(f"{str(path)!r} is no name of a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    # The original suffix is kept, because numpy, PIL and matplotlib choose a format by it.
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(4)}.partial{path.suffix}")
    mark = open(temporary, "xb")  # noqa: SIM115  (held until the end; an ordinary file, whose mode the umask decides)
    if not _lock(mark):
        mark.close()
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except (RuntimeError, SafetensorError) as error:  # the writers of PyTorch and safetensors hide what the disk said
        if shutil.disk_usage(path.parent).free < 64 << 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        if any(words in str(error) for words in WRITERS):
            raise OSError(errno.EIO, "the disk did not take all of it (a quota?)", str(path)) from error
        raise
    except OSError as error:
        full = any(words in str(error) for words in NUMPY)  # which has no number
        code = errno.ENOSPC if full else error.errno
        if error.filename is not None or code is None:
            raise
        raise OSError(code, os.strerror(code), str(path)) from error  # a write knows no name
    finally:
        temporary.unlink(missing_ok=True)
        mark.close()


@contextmanager
def whole_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; on success it takes the place of `path`, on failure it vanishes."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    temporary.mkdir()
    mark = os.open(temporary, os.O_RDONLY) if fcntl is not None else None
    if mark is not None:
        _lock(mark)
    try:
        yield temporary
        if path.is_dir():  # a folder cannot be replaced in one step: move the old one aside first
            old = temporary.with_suffix(".old")
            path.rename(old)
            temporary.rename(path)
            shutil.rmtree(old)
        else:
            temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if mark is not None:
            os.close(mark)


def remove_partials(folder: Path) -> None:
    """Remove what processes that were killed while they wrote left in a folder; not what is being written now."""
    for partial in folder.glob(".*.partial*"):
        with contextlib.suppress(OSError):
            mark = os.open(partial, os.O_RDONLY)
            try:
                if _lock(mark) and partial.is_dir():
                    shutil.rmtree(partial)
                elif _lock(mark):
                    partial.unlink()
            finally:
                os.close(mark)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Refuse a folder to which another process is writing; the lock is the process's own, and ends with it."""
    folder.mkdir(parents=True, exist_ok=True)
    # A file of its own, which nobody replaces; a record lock, which no worker inherits.
    with open(folder / ".lock", "a") as file:
        try:
            if fcntl is not None:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # a disk that knows no locks must not end the run
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise InputError(f"another run is writing to {folder}; wait, or use another --out") from None
        yield


def refuse_file(out: str | Path, flag: str = "--out") -> None:
    """For `--out`, before the long work: what is a file cannot become a folder."""
    if Path(out).exists() and not Path(out).is_dir():
        raise InputError(f"{flag} {out} is a file, not a folder")


def read_text(path: str | Path) -> str:
    """A text file that a user wrote; other encodings than UTF-8 are refused, not guessed."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not text in UTF-8 (byte {error.start}); save it as UTF-8") from None


def read_json(path: str | Path) -> dict[str, Any]:
    """A table of settings; what is damaged in whatever way is an InputError."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise InputError(f"{path} is damaged: not JSON") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} is damaged: a {type(value).__name__}, not a table of settings")
    return value


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


def _lock(file: IO[bytes] | int) -> bool:
    """Whether the file or folder is ours: no living process holds it (where the system can tell)."""
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return fcntl is not None
    except OSError:  # somebody else's, or a file system without locks
        return False
