"""Patch tokens between the layers of a stream: in memory, in float16, or in a file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from veca.errors import InputError
from veca.large.sinks import reserve

if TYPE_CHECKING:
    from veca.model import Veca

Precision = Literal["float32", "float16"]


def in_precision(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """On the CPU in the buffer's precision; what does not fit in float16 is an error, not an infinity."""
    rows = rows.float()
    if dtype == torch.float16 and not float(rows.abs().amax()) <= torch.finfo(torch.float16).max:  # nor is no number
        raise InputError("a value of this model's tokens is too large for float16; use tokens float32")
    return rows.to("cpu", dtype)


def token_buffer(model: Veca, patches: int, tokens: Precision, spill: str | os.PathLike[str] | None) -> Buffer:
    width, device = model.config.width, model.patch_embed.proj.weight.device
    kept = getattr(torch, tokens)
    return Buffer(patches, width, kept, device) if spill is None else Spilled(patches, width, kept, device, Path(spill))


class Buffer:
    """Patch tokens between layers, in memory (of the CPU, whatever the device)."""

    def __init__(self, patches: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.count, self.width, self.dtype, self.device = patches, width, dtype, device
        self.held = self.allocate()

    def allocate(self) -> Tensor | None:
        return torch.empty(self.count, self.width, dtype=self.dtype)

    def load(self, start: int, stop: int) -> Tensor:
        """n×D float32 on the device, which may be this buffer's own memory."""
        assert self.held is not None
        return self.held[start:stop].to(self.device, torch.float32)

    def keep(self, start: int, rows: Tensor) -> None:
        assert self.held is not None
        own = self.held[start : start + len(rows)]
        if rows.data_ptr() != own.data_ptr():
            own.copy_(rows if self.dtype == torch.float32 else in_precision(rows, self.dtype))

    def memory(self) -> Tensor | None:
        """Where the tokens lie (N×D), if they lie in memory."""
        return self.held

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Spilled(Buffer):
    """Patch tokens in a file without a name, which the system removes even if the process is killed."""

    def __init__(self, patches: int, width: int, dtype: torch.dtype, device: torch.device, folder: Path) -> None:
        self.folder, self.row_bytes = folder, width * dtype.itemsize
        super().__init__(patches, width, dtype, device)

    def allocate(self) -> Tensor | None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.file = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise InputError(f"cannot keep tokens in {self.folder}: {error.strerror}") from error
        try:
            reserve(self.file.fileno(), self.count * self.row_bytes, self.folder)
        except InputError:
            self.file.close()
            raise
        return None

    def load(self, start: int, stop: int) -> Tensor:
        rows = torch.empty(stop - start, self.width, dtype=self.dtype)
        left = memory_of(rows)
        self.file.seek(start * self.row_bytes)
        while len(left):
            count = self.file.readinto(left)
            if not count:
                raise InputError(f"the file of tokens in {self.folder} ended early: the disk failed")
            left = left[count:]
        return rows.to(self.device, torch.float32)

    def keep(self, start: int, rows: Tensor) -> None:
        left = memory_of(in_precision(rows, self.dtype).contiguous())
        self.file.seek(start * self.row_bytes)
        while len(left):
            left = left[self.file.write(left) :]

    def __exit__(self, *_: object) -> None:
        self.file.close()


def memory_of(rows: Tensor) -> memoryview[Any]:
    return rows.numpy().data.cast("B")
