"""The folder that `veca features` writes: features, an index, and the settings they were made with.

It survives being killed at any moment: a feature file appears whole and before its row, and a row cut short is dropped
when the folder is opened again.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from veca.errors import InputError
from veca.files import lock_folder, read_json, refuse_file, whole_file, write_json, write_text

# What folders were made with before their settings said so.
EARLIER = {"dtype": "float32", "stride": None, "share": 1.0, "patches": 1.0, "carry": False}


class FeatureFolder:
    """Open for one run; what an earlier run with the same settings finished is kept.

    >>> with FeatureFolder("features", {"model": "veca-s14", "size": 448}) as folder:
    ...     if not folder.has(path):
    ...         folder.add(path, {"cls": cls}, size=(640, 480), grid=(32, 43))
    """

    def __init__(self, folder: str | Path, settings: dict[str, Any]) -> None:
        self.folder, self.settings = Path(folder), settings
        self.done: set[str] = set()
        self._open = ExitStack()
        self._index: IO[str] | None = None

    def __enter__(self) -> FeatureFolder:
        refuse_file(self.folder)
        with ExitStack() as stack:
            stack.enter_context(lock_folder(self.folder))
            self._check()
            self._clean()
            self._index = stack.enter_context(open(self.index_path, "a", encoding="utf-8"))
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    @property
    def index_path(self) -> Path:
        return self.folder / "index.jsonl"

    def has(self, path: Path) -> bool:
        return str(path) in self.done

    def add(
        self,
        path: Path,
        features: dict[str, np.ndarray[Any, Any]],
        size: tuple[int, int],
        grid: tuple[int, int],
        **more: int,
    ) -> None:
        """Write the features of the image at `path` (absolute), then its row, with what `more` is known of it."""
        output = self.output(path)
        with whole_file(self.folder / output) as temporary, open(temporary, "wb") as file:
            np.savez(file, **features)  # type: ignore[arg-type]  # numpy's stub takes the names for its own option
        self._append({"path": str(path), "output": output, "size": list(size), "grid": list(grid), **more})

    def add_error(self, path: Path, error: str) -> None:
        self._append({"path": str(path), "error": error})

    @staticmethod
    def output(path: Path) -> str:
        """Where the features of an image go, from its path alone: a run that continues needs no bookkeeping."""
        return f"{_shorten(path.parent.name)}-{_digest(path.parent)}/{_shorten(path.name)}.npz"

    def _append(self, row: dict[str, Any]) -> None:
        assert self._index is not None
        self._index.write(json.dumps(row) + "\n")  # ASCII: a path of any bytes is written, and read back the same
        self._index.flush()

    def _check(self) -> None:
        """What is in the folder was made the same way; in a new one, write how."""
        path = self.folder / "settings.json"
        if not path.exists():
            if any("streamed" not in row for row in read_rows(self.index_path)):
                raise InputError(f"{self.folder} has an index but no settings.json; use another --out")
            write_json(path, self.settings)
        check_settings(read_json(path), self.settings, self.folder)

    def _clean(self) -> None:
        """Keep the index's good rows: not a row cut short, a failure (to be tried again), or a file that is gone."""
        for partial in self.folder.glob("*/.*.partial.npz"):  # left by a kill in the middle of a write
            partial.unlink()
        if not self.index_path.exists():
            return
        kept = []
        for row in read_rows(self.index_path):
            path, output = row["path"], row.get("output")
            if "streamed" in row:  # whose `veca features --stream` takes care
                kept.append(row)
            elif output is not None and path not in self.done and self._is_whole(Path(path), output):
                kept.append(row)
                self.done.add(path)
        write_rows(self.index_path, kept)

    def _is_whole(self, path: Path, output: str) -> bool:
        """Whether the features are there; a disk that failed may have left an empty file, or half of one."""
        return output == self.output(path) and zipfile.is_zipfile(self.folder / output)


def read_rows(index: Path) -> list[dict[str, Any]]:
    """Of an index that a run may have left with its last row cut short; none where there is no index."""
    rows, lines = [], index.read_bytes().split(b"\n") if index.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line.decode())
            if not isinstance(row["path"], str) or not isinstance(row.get("output", ""), str):
                raise TypeError
        except (ValueError, KeyError, TypeError, RecursionError):
            if number < len(lines):
                raise InputError(
                    f"{index} line {number} is not a row of an index; remove it, or use another --out"
                ) from None
            break  # the last: empty, or cut short
        rows.append(row)
    return rows


def write_rows(index: Path, rows: list[dict[str, Any]]) -> None:
    write_text(index, "".join(f"{json.dumps(row)}\n" for row in rows))


def check_settings(before: dict[str, Any], settings: dict[str, Any], out: str | Path) -> None:
    """Refuse to put features beside others that were made in another way."""
    before = EARLIER | before
    # The model's name may differ as long as its weights are the same.
    changed = [name for name in settings if name != "model" and before.get(name) != settings[name]]
    if changed:
        named = [name for name in changed if name != "weights"]
        what = ", ".join(f"{name} {before.get(name)} (now {settings[name]})" for name in named)
        if "weights" in changed and "dtype" not in changed:  # in another precision the weights are others too
            what = f"the model {before.get('model')} with other weights"
        raise InputError(f"{out} holds features made with {what}; use another --out, or the same settings")


def _digest(path: Path | str) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:10]


def _shorten(name: str) -> str:
    """File systems stop at 255 bytes, and a file being written has a longer name than the finished one."""
    whole = os.fsencode(name)
    return name if len(whole) <= 200 else f"{whole[:180].decode('utf-8', 'ignore')}-{_digest(name)}"
