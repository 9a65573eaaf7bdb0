"""Exact inference on images that do not fit in memory (`model.stream`).

Patches need only the cores, so every layer is one pass over the patches, piece by piece, and the cores' softmax over
all of them accumulates on the way (`veca.pieces`). What must be kept between layers is one buffer of tokens: in memory,
in float16, or in a file. Dense attention has no such pass: there every patch reads every other.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from veca.errors import InputError
from veca.files import whole_file
from veca.pieces import PATCHES, InMemory, Tokens, Workspace, complex_turns, folded, pass_layer, pieces, refuse_changed
from veca.rope import axis_rotation
from veca.strips import Strips, StripSource, open_strips

if TYPE_CHECKING:
    from veca.model import Block, Veca, VecaOutput

Precision = Literal["float32", "float16"]
Report = Callable[[str, int, int], None]  # what, how much is done, how much there is


@torch.inference_mode()
def stream(
    model: Veca,
    source: StripSource,
    cores: int | None = None,
    tile: int = PATCHES,
    tokens: Precision = "float32",
    spill: str | os.PathLike[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    report: Report | None = None,
) -> VecaOutput:
    """The forward pass of one image of any size; see `Veca.stream`."""
    from veca.model import VecaOutput

    if tile < 1:
        raise InputError(f"tile must be at least 1 patch, not {tile}")
    if tokens not in ("float32", "float16"):
        raise InputError(f"tokens are kept in float32 or float16, not {tokens!r}")
    refuse_changed(model)
    report = report or (lambda what, done, total: None)
    with ExitStack() as stack:
        strips = stack.enter_context(open_strips(source, model.patch_size))
        budget = model.check(torch.empty(1, 3, strips.height, strips.width, device="meta"), cores)
        grid = (strips.height // model.patch_size, strips.width // model.patch_size)
        buffer = stack.enter_context(token_buffer(model, budget, grid[0] * grid[1], getattr(torch, tokens), spill))
        for start, rows in embedded(model, strips, grid, tile, report):
            buffer.keep(budget + start, budget + start + len(rows), rows)
        coords = run_layers(model, buffer, budget, grid, tile, report)
        final_cores = output(model, buffer.load(0, budget))
        patches = collect(model, buffer, budget, grid, tile, out, report)
    return VecaOutput(cls=final_cores[:1], patches=patches[None], cores=final_cores[None], coords=coords, grid=grid)


def embedded(
    model: Veca, strips: Strips, grid: tuple[int, int], tile: int, report: Report
) -> Iterator[tuple[int, Tensor]]:
    """Patch tokens of one strip after another, and the number of the first: rows of the grid, about `tile` patches."""
    weight = model.patch_embed.proj.weight
    table = SeparableTable(model, grid) if model.config.positions == "table" else None
    step = max(1, tile // grid[1])
    for top in range(0, grid[0], step):
        bottom = min(top + step, grid[0])
        strip = strips.read(top * model.patch_size, bottom * model.patch_size)
        rows, _ = model.patch_embed(strip.to(weight.device, weight.dtype))
        rows = rows[0].float()
        if table is not None:
            rows += table.rows(top, bottom)
        yield top * grid[1], rows
        report("patches", bottom, grid[0])


def run_layers(
    model: Veca, buffer: Tokens, cores: int, grid: tuple[int, int], tile: int, report: Report
) -> Tensor:  # 1×C×2
    """All blocks, one pass over the tokens each; returns where the cores sit in the last."""
    config = model.config
    device = model.patch_embed.proj.weight.device
    space = Workspace(device)
    by_x, by_y = (
        torch.complex(by.cos, by.sin)
        for by in (axis_rotation(n, config.head_width, config.rope_zero_fraction, device) for n in (grid[1], grid[0]))
    )
    first, state = model.bank.start(cores, 1)
    buffer.keep(0, cores, first[0].float())
    for index, block in enumerate(cast("Iterable[Block]", model.blocks)):
        if index > 0:
            state = model.bank.move(state, buffer.load(0, cores)[None], index)
        position = state.tanh()
        by_core = complex_turns(model.rotation(position))[0]  # C×1×d/2

        def turns(start: int, stop: int, by_core: Tensor = by_core) -> Tensor:
            number = torch.arange(max(start, cores) - cores, stop - cores, device=device)
            by_patch = torch.cat((by_x[number % grid[1]], by_y[number // grid[1]]), dim=-1).unsqueeze(1)
            return torch.cat((by_core, by_patch)) if start == 0 else by_patch

        def passed(done: int, layer: int = index) -> None:
            report(f"layer {layer + 1} of {config.depth}", done, buffer.count)

        pass_layer(folded(block), buffer, cores, config.heads, turns, space, tile, passed)
    return position


def output(model: Veca, rows: Tensor) -> Tensor:
    """The final norm and projection, of T×D rows: T×D′."""
    features: Tensor = model.project(model.norm(rows.to(model.norm.weight.dtype)))
    return features


def collect(
    model: Veca,
    buffer: Buffer,
    cores: int,
    grid: tuple[int, int],
    tile: int,
    out: str | os.PathLike[str] | None,
    report: Report,
) -> Tensor:
    """The dense feature, N×D′: in memory, or from the .npy file `out` (h×w×D′), which the disk alone holds."""
    width, count = model.config.feature_width, grid[0] * grid[1]

    def features() -> Iterator[tuple[int, int, Tensor]]:
        for start, stop in pieces(cores + count, cores, tile):
            start = max(start, cores)
            yield start - cores, stop - cores, output(model, buffer.load(start, stop)).to("cpu", buffer.dtype)
            report("output", stop - cores, count)

    if out is None:
        held = buffer.memory()  # nobody needs the tokens any more: the features take their place
        patches = torch.empty(count, width, dtype=buffer.dtype) if held is None or held.shape[1] != width else held
        for start, stop, rows in features():
            patches[start:stop] = rows
        return patches
    header = {"descr": np.dtype(str(buffer.dtype)[6:]).str, "fortran_order": False, "shape": (*grid, width)}
    with whole_file(Path(out)) as temporary, open(temporary, "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for _, _, rows in features():  # written, not mapped: pages of a map would count as the process's memory
            file.write(rows.contiguous().numpy().data)
    return torch.from_numpy(np.load(out, mmap_mode="c")).flatten(0, 1)


class SeparableTable:
    """The additive table resized to a grid, row by row: bicubic interpolation is one matrix per axis."""

    def __init__(self, model: Veca, grid: tuple[int, int]) -> None:
        self.table = model.table.float()  # s×s×D
        size = self.table.shape[0]
        one = torch.eye(size, device=self.table.device)[None, None]
        self.down, self.across = (  # h×s, w×s
            nn.functional.interpolate(one, size=(n, size), mode="bicubic", align_corners=False)[0, 0] for n in grid
        )

    def rows(self, top: int, bottom: int) -> Tensor:
        """Rows top ≤ i < bottom of the grid: (bottom−top)·w × D."""
        lines = torch.tensordot(self.down[top:bottom], self.table, dims=1)  # rows×s×D
        return torch.einsum("ws,rsd->rwd", self.across, lines).flatten(0, 1)


class Buffer(Tokens, Protocol):
    """Tokens between layers."""

    dtype: torch.dtype

    def memory(self) -> Tensor | None:
        """Where the patches lie (N×D), if they lie in memory."""

    def __enter__(self) -> Buffer: ...

    def __exit__(self, *_: object) -> None: ...


def token_buffer(
    model: Veca, cores: int, patches: int, dtype: torch.dtype, spill: str | os.PathLike[str] | None
) -> Buffer:
    width, device = model.config.width, model.patch_embed.proj.weight.device
    if spill is not None:
        return SpilledTokens(cores, patches, width, dtype, device, Path(spill))
    if dtype == torch.float32 and device.type == "cpu":
        return WholeTokens(cores, patches, width)
    return ConvertedTokens(cores, patches, width, dtype, device)


class WholeTokens(InMemory):
    """All tokens as the layers use them."""

    dtype = torch.float32

    def __init__(self, cores: int, patches: int, width: int) -> None:
        super().__init__(torch.empty(1, cores + patches, width))
        self.cores = cores

    def memory(self) -> Tensor | None:
        return self.x[0, self.cores :]

    def __enter__(self) -> WholeTokens:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class ConvertedTokens:
    """Patches in another precision, or away from the device; the cores, few and precious, stay in float32."""

    images = 1

    def __init__(self, cores: int, patches: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.count, self.dtype, self.device = cores + patches, dtype, device
        self.cores = torch.empty(cores, width, device=device)
        self.patches: Tensor | None = self.reserve(patches, width)

    def reserve(self, patches: int, width: int) -> Tensor | None:
        return torch.empty(patches, width, dtype=self.dtype)

    def load(self, start: int, stop: int) -> Tensor:
        cores = len(self.cores)
        rows = torch.empty(stop - start, self.cores.shape[1], device=self.device)
        inside = max(0, min(stop, cores) - start)
        rows[:inside] = self.cores[start : start + inside]
        if start + inside < stop:
            rows[inside:] = self.read(start + inside - cores, stop - cores)
        return rows

    def keep(self, start: int, stop: int, rows: Tensor) -> None:
        cores = len(self.cores)
        inside = max(0, min(stop, cores) - start)
        self.cores[start : start + inside] = rows[:inside]
        if start + inside < stop:
            self.write(start + inside - cores, rows[inside:].to("cpu", self.dtype))

    def read(self, start: int, stop: int) -> Tensor:
        assert self.patches is not None
        return self.patches[start:stop]

    def write(self, start: int, rows: Tensor) -> None:
        assert self.patches is not None
        self.patches[start : start + len(rows)] = rows

    def memory(self) -> Tensor | None:
        return self.patches

    def __enter__(self) -> ConvertedTokens:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class SpilledTokens(ConvertedTokens):
    """Patches in a file without a name, which the system removes even if the process is killed."""

    def __init__(
        self, cores: int, patches: int, width: int, dtype: torch.dtype, device: torch.device, folder: Path
    ) -> None:
        self.folder, self.row_bytes = folder, width * dtype.itemsize
        super().__init__(cores, patches, width, dtype, device)

    def reserve(self, patches: int, width: int) -> Tensor | None:
        size = patches * self.row_bytes
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.file = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise InputError(f"cannot keep tokens in {self.folder}: {error.strerror}") from error
        try:
            os.truncate(self.file.fileno(), size)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.file.fileno(), 0, size)  # a full disk is known now, not after an hour
        except OSError as error:
            self.file.close()
            raise InputError(f"cannot keep {size / 1e9:.1f} GB of tokens in {self.folder}: {error.strerror}") from error
        return None

    def read(self, start: int, stop: int) -> Tensor:
        rows = torch.empty(stop - start, self.row_bytes // self.dtype.itemsize, dtype=self.dtype)
        left = rows.numpy().data.cast("B")
        self.file.seek(start * self.row_bytes)
        while len(left):
            count = self.file.readinto(left)
            if not count:
                raise InputError(f"the file of tokens in {self.folder} ended early: the disk failed")
            left = left[count:]
        return rows

    def write(self, start: int, rows: Tensor) -> None:
        left = rows.contiguous().numpy().data.cast("B")
        self.file.seek(start * self.row_bytes)
        while len(left):
            left = left[self.file.write(left) :]

    def __exit__(self, *_: object) -> None:
        self.file.close()
