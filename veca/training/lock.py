"""One run in a folder at a time: two would mix their files."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from veca.errors import InputError

try:
    import fcntl
except ImportError:  # Windows: two runs in one folder are not noticed there
    fcntl = None  # type: ignore[assignment]


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Refuse a folder in which another process is at work.

    The lock is the process's own: it ends with it, even by SIGKILL, and data workers do not inherit it (a lock by
    `flock` would live on in them).
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a") as file:
        try:
            if fcntl is not None:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise InputError(f"another run is at work in {folder}: wait for it, or use another --out") from None
        yield  # a disk that knows no locks must not end the run
