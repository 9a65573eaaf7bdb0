"""Features as Parquet, on one machine and on many: a folder of part files, at any place that pyarrow reaches.

One row an image: `path`, `size` [width, height], `grid` [h, w], with --patches `tokens`, `cls` (D × float32), with
--dense `patches` (h·w·D × float16, row by row), or its `error`. `_settings.json` says what all rows were made with. A
part file appears whole; what a killed run left half-written is removed by the next one, which computes only what is not
there.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from veca.errors import InputError, require
from veca.extract.folder import check_settings
from veca.extract.sources import file_system
from veca.files import lock_folder, refuse_file

ROWS, BYTES = 1000, 64 << 20  # what a part file of the local engine holds at most
SETTINGS = "_settings.json"  # readers of Parquet folders pass over names with an underscore


class ParquetFolder:
    """Open for one run, as `FeatureFolder` is; `out` may be an address of pyarrow or fsspec, such as s3://bucket/x."""

    def __init__(self, out: str | Path, settings: dict[str, Any]) -> None:
        self.out, self.settings = str(out), settings
        self.done: set[str] = set()
        self.rows: list[dict[str, Any]] = []
        self.bytes = 0
        self._open = ExitStack()

    def __enter__(self) -> ParquetFolder:
        pyarrow_fs = require("pyarrow.fs", "parquet")
        if "://" in self.out:
            self.files, self.folder = file_system(self.out)
        else:
            refuse_file(self.out)
            self._open.enter_context(lock_folder(Path(self.out)))
            self.files, self.folder = pyarrow_fs.LocalFileSystem(), str(Path(self.out).absolute())
        try:
            self._check()
            self._find_done()
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.flush()
        finally:
            self._open.close()

    def has(self, path: str | Path) -> bool:
        return text_of(path) in self.done

    def add(
        self,
        path: str | Path,
        features: dict[str, np.ndarray[Any, Any]],
        size: tuple[int, int],
        grid: tuple[int, int],
        **more: int,
    ) -> None:
        self._append({"path": text_of(path), "size": size, "grid": grid, "error": None, **more, **features})

    def add_error(self, path: str | Path, error: str) -> None:
        self._append({"path": text_of(path), "error": text_of(error)})

    def flush(self) -> None:
        """Write the rows that wait as one part file."""
        if self.rows:
            self._write(table_of(self.rows, self.settings["dense"], self.settings.get("patches", 1) != 1))
            self.rows, self.bytes = [], 0

    def _append(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.bytes += sum(value.size * 2 for value in row.values() if isinstance(value, np.ndarray))
        if len(self.rows) >= ROWS or self.bytes >= BYTES:
            self.flush()

    def _write(self, table: Any) -> None:
        """Whole: under a hidden name first."""
        from pyarrow import parquet

        name = f"part-{secrets.token_hex(8)}.parquet"
        with self.files.open_output_stream(f"{self.folder}/.{name}") as stream:
            parquet.write_table(table, stream)
        self.files.move(f"{self.folder}/.{name}", f"{self.folder}/{name}")

    def _check(self) -> None:
        """What is in the folder was made the same way; in a new one, write how."""
        self.files.create_dir(self.folder, recursive=True)
        place = f"{self.folder}/{SETTINGS}"
        if self.files.get_file_info(place).size is None:
            if self._parts():
                raise InputError(f"{self.out} has Parquet files but no {SETTINGS}; use another --out")
            with self.files.open_output_stream(place) as stream:
                stream.write(json.dumps(self.settings, indent=2).encode())
            return
        with self.files.open_input_stream(place) as stream:
            try:
                before = json.loads(stream.read())
                check_settings(before, self.settings, self.out)
            except (ValueError, AttributeError, TypeError) as error:
                if isinstance(error, InputError):
                    raise
                raise InputError(f"{self.out}/{SETTINGS} is damaged: not a table of settings") from None

    def _parts(self) -> list[Any]:
        from pyarrow import fs

        found = self.files.get_file_info(fs.FileSelector(self.folder, recursive=True))
        return [info for info in found if info.base_name.endswith(".parquet")]

    def read_index(self) -> tuple[set[str], dict[str, str]]:
        """The images whose features are there, and those that could not be read, with the reason."""
        good: set[str] = set()
        bad: dict[str, str] = {}
        for _, table in self._indices():
            for path, error in zip(table["path"].to_pylist(), table["error"].to_pylist(), strict=True):
                if error is None:
                    good.add(path)
                else:
                    bad[path] = error
        return good, bad

    def _indices(self) -> Iterator[tuple[str, Any]]:
        """Place and index of every part file that is whole; others were never finished, and are removed."""
        from pyarrow import ArrowInvalid, parquet

        for info in self._parts():
            try:
                if info.base_name.startswith("."):
                    raise ArrowInvalid("hidden until it is whole")
                with self.files.open_input_file(info.path) as file:
                    table = parquet.read_table(file, columns=["path", "error"])
            except ArrowInvalid:
                self.files.delete_file(info.path)
            else:
                yield info.path, table

    def _find_done(self) -> None:
        """What is there; images that could not be read are forgotten, to be tried again.

        A row that is there twice goes, too: a run that was killed had put it into a new part, but not removed the old.
        """
        import pyarrow
        from pyarrow import parquet

        for place, table in list(self._indices()):
            rows = zip(table["path"].to_pylist(), table["error"].to_pylist(), strict=True)
            good = []
            for path, error in rows:
                good.append(error is None and path not in self.done)
                if good[-1]:
                    self.done.add(path)
            if not all(good):
                with self.files.open_input_file(place) as file:
                    kept = parquet.read_table(file).filter(pyarrow.array(good))
                if len(kept):
                    self._write(kept)
                self.files.delete_file(place)


def text_of(name: str | Path) -> str:
    """A file's name may hold any bytes; Parquet's text is UTF-8."""
    return str(name).encode("utf-8", "backslashreplace").decode()


def schema(dense: bool, mixed: bool = False) -> Any:
    import pyarrow

    fields = [
        ("path", pyarrow.string()),
        ("size", pyarrow.list_(pyarrow.int32())),
        ("grid", pyarrow.list_(pyarrow.int32())),
        *([("tokens", pyarrow.int32())] if mixed else []),
        ("cls", pyarrow.list_(pyarrow.float32())),
        *([("patches", pyarrow.list_(pyarrow.float16()))] if dense else []),
        ("error", pyarrow.string()),
    ]
    return pyarrow.schema(fields)


def table_of(rows: Sequence[dict[str, Any]], dense: bool, mixed: bool = False) -> Any:
    """Rows as Arrow's table; what a row does not have is null."""
    import pyarrow

    shape = schema(dense, mixed)
    columns = [_column([row.get(name) for row in rows], shape.field(name).type) for name in shape.names]
    return pyarrow.Table.from_arrays(columns, schema=shape)


def _column(values: list[Any], kind: Any) -> Any:
    import pyarrow

    if not pyarrow.types.is_list(kind):
        return pyarrow.array(values, kind)
    dtype = kind.value_type.to_pandas_dtype()
    flat = [None if value is None else np.asarray(value, dtype).ravel() for value in values]
    ends = np.cumsum([0, *(0 if one is None else one.size for one in flat)], dtype=np.int32)
    there = [one for one in flat if one is not None]
    numbers = pyarrow.array(np.concatenate(there) if there else np.empty(0, dtype), kind.value_type)
    nulls = pyarrow.array([one is None for one in flat], pyarrow.bool_())
    return pyarrow.ListArray.from_arrays(pyarrow.array(ends), numbers, type=kind, mask=nulls)
