"""Exact inference on images that do not fit in memory (`model.stream`, and the first half of `model.scan`).

Patches need only the cores, so every layer is one pass over the patches, piece by piece, and what the cores read of
each piece is merged on the way (`veca.block.Read`). What must be kept between layers is one buffer of tokens: in
memory, in float16, or in a file. Dense attention has no such pass: there every patch reads every other.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from veca import table
from veca.block import Attention, Block, CoreSide, Read
from veca.errors import InputError
from veca.files import whole_file
from veca.fused import FusedBlock, Workspace, can_fuse, piece_size, pieces
from veca.rope import Rotation, axis_coords, frequencies
from veca.strips import Strips, StripSource, open_strips

if TYPE_CHECKING:
    from veca.model import Veca, VecaOutput

Precision = Literal["float32", "float16"]
Report = Callable[[str, int, int], None]  # what, how much is done, how much there is
Verbs = Block | FusedBlock


class Journey(NamedTuple):
    """What remains of one image when all patches have passed all layers."""

    cores: Tensor  # 1×C×D, before the final norm
    coords: Tensor  # 1×C×2
    path: list[CoreSide]  # of each layer, if it was asked for


@torch.inference_mode()
def stream(
    model: Veca,
    source: StripSource,
    cores: int | None = None,
    tile: int | None = None,
    tokens: Precision = "float32",
    spill: str | os.PathLike[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    report: Report | None = None,
) -> VecaOutput:
    """The forward pass of one image of any size; see `Veca.stream`."""
    from veca.model import VecaOutput

    budget, tile = checked(model, cores, tile, tokens, out)
    with open_strips(source, model.patch_size) as strips:
        grid = grid_of(model, strips)
        with token_buffer(model, grid[0] * grid[1], tokens, spill) as buffer:
            journey = travel(model, strips, None, budget, tile, buffer, report)
            core_features = model.output(journey.cores)
            patches = collect(model, buffer, grid, tile, out, report)
    return VecaOutput(core_features[:, 0], patches[None], core_features, journey.coords, grid)


def checked(
    model: Veca, cores: int | None, tile: int | None, tokens: str, out: str | os.PathLike[str] | None
) -> tuple[int, int]:
    """The budget and the size of a piece; what cannot be done is said before anything is."""
    if tile is not None and tile < 1:
        raise InputError(f"tile must be at least 1 patch, not {tile}")
    if tokens not in ("float32", "float16"):
        raise InputError(f"tokens are kept in float32 or float16, not {tokens!r}")
    if out is not None and Path(out).is_dir():
        raise InputError(f"{out} is a folder; the dense feature goes to an .npy file")
    refuse_changed(model)
    first = model.blocks[0]
    assert isinstance(first, Block)
    return model.budget(cores), tile or piece_size(first, dtype_of(model))


def grid_of(model: Veca, strips: Strips) -> tuple[int, int]:
    return strips.height // model.patch_size, strips.width // model.patch_size


def dtype_of(model: Veca) -> torch.dtype:
    return model.patch_embed.proj.weight.dtype


def verbs_of(model: Veca) -> list[Verbs]:
    """Read and look, of every block: the fused ones where they may stand in for it."""
    weight = model.patch_embed.proj.weight
    with torch.no_grad():
        if can_fuse(model.blocks, weight.detach()):
            space = Workspace(weight.dtype)
            return [FusedBlock(block, space) for block in model.blocks]  # type: ignore[arg-type]
    return list(model.blocks)  # type: ignore[arg-type]


def refuse_changed(model: Veca) -> None:
    """Parts of an image pass a block by its verbs: what a user did to its forward as a whole would be ignored."""
    if model.config.attention == "dense":
        raise InputError("the dense control arm cannot be streamed: there every patch reads every other")
    for block in model.blocks:
        for module, kind in ((block, Block), (block._modules["attn"], Attention)):
            assert module is not None
            changed = type(module) is not kind or "forward" in vars(module)
            if changed or module._forward_hooks or module._forward_pre_hooks:
                raise InputError(
                    "this model's blocks have hooks or a forward of their own; remove them before streaming or "
                    "scanning (those of the layers inside a block may stay)"
                )


def travel(
    model: Veca,
    strips: Strips,
    chosen: Tensor | None,  # numbers of the patches that are read, in order; None: all
    budget: int,
    tile: int,
    buffer: Buffer,
    report: Report | None,
    *,
    keep_path: bool = False,
    look_last: bool = True,  # whether the patches pass the last layer too: nobody reads them afterwards
) -> Journey:
    """Take one image through all layers, a pass over its patches each."""
    report = report or (lambda what, done, total: None)
    grid, device, dtype = grid_of(model, strips), buffer.device, dtype_of(model)
    for start, rows in embedded(model, strips, grid, chosen, tile, report):
        buffer.keep(start, rows)
    turns = GridTurns(model, grid, device) if model.config.turns else None
    path: list[CoreSide] = []
    tokens, state, pace = model.bank(budget, 1)
    tokens = tokens.to(dtype).clone()
    blocks, last = verbs_of(model), len(model.blocks) - 1
    for index, block in enumerate(blocks):
        if index > 0:
            state = model.bank.move(state, pace, tokens, index)
        position = state.tanh()
        side = block.ask(tokens, model.rotation(position))
        if keep_path:
            path.append(CoreSide(*(part.clone() for part in side)))
        seen: Read | None = None
        for start, stop in pieces(buffer.count, tile):
            rows = buffer.load(start, stop)[None].to(dtype)
            by = None if turns is None else turns.at(numbers(start, stop, chosen, device))
            view = block.norm_attn(rows)
            new = block.read(side, view, by)
            seen = new if seen is None else seen.merge(new)
            if index < last or look_last:
                buffer.keep(start, block.look(rows, view, by, side)[0])
            report(f"layer {index + 1} of {len(blocks)}", stop, buffer.count)
        assert seen is not None
        tokens = block.settle(tokens, side, seen)
    return Journey(tokens, position, path)


def numbers(start: int, stop: int, chosen: Tensor | None, device: torch.device) -> Tensor:
    """Where on the grid the patches lie that are kept from `start` to `stop`."""
    return torch.arange(start, stop, device=device) if chosen is None else chosen[start:stop].to(device)


def embedded(
    model: Veca, strips: Strips, grid: tuple[int, int], chosen: Tensor | None, tile: int, report: Report
) -> Iterator[tuple[int, Tensor]]:
    """Patch tokens of one strip after another (n×D), and the place of the first: rows of the grid, about `tile`
    patches."""
    weight = model.patch_embed.proj.weight
    across, down = axis_coords(grid[1], weight.device), axis_coords(grid[0], weight.device)
    step = max(1, tile // grid[1])
    start = 0
    for top in range(0, grid[0], step):
        bottom = min(top + step, grid[0])
        inside = None
        if chosen is not None:
            ends = torch.searchsorted(chosen, torch.tensor([top * grid[1], bottom * grid[1]]))
            inside = chosen[ends[0] : ends[1]] - top * grid[1]
        if inside is None or len(inside):
            strip = strips.read(top * model.patch_size, bottom * model.patch_size)
            rows = model.patch_embed(strip.to(weight.device, weight.dtype))[0][0]
            if model.config.positions == "table":
                rows = rows.float() + table.on_lattice(model.table, across, down[top:bottom])
            rows = rows if inside is None else rows[inside.to(rows.device)]
            yield start, rows
            start += len(rows)
        report("patches", bottom, grid[0])


class GridTurns:
    """The rotation of any patches of a grid, from h + w angles."""

    def __init__(self, model: Veca, grid: tuple[int, int], device: torch.device) -> None:
        each = frequencies(model.config.head_width, model.config.rope_zero_fraction, device)
        self.width = grid[1]
        self.x, self.y = (axis_coords(count, device)[:, None] * each for count in (grid[1], grid[0]))
        self.parts = [(part(self.x), part(self.y)) for part in (torch.cos, torch.sin)]

    def at(self, patches: Tensor) -> Rotation:  # n numbers
        column, row = patches % self.width, patches // self.width
        return Rotation(*(torch.cat((x[column], y[row]), dim=-1)[None, None] for x, y in self.parts))


def collect(
    model: Veca,
    buffer: Buffer,
    grid: tuple[int, int],
    tile: int,
    out: str | os.PathLike[str] | None,
    report: Report | None,
) -> Tensor:
    """The dense feature, N×D′: in memory, or from the .npy file `out` (h×w×D′), which the disk alone holds."""
    width, dtype = model.config.feature_width, buffer.dtype

    def features() -> Iterator[tuple[int, int, Tensor]]:
        for start, stop in pieces(buffer.count, tile):
            rows = model.output(buffer.load(start, stop).to(dtype_of(model)))
            yield start, stop, in_precision(rows, dtype)
            if report is not None:
                report("output", stop, buffer.count)

    if out is None:
        held = buffer.memory()  # nobody needs the tokens any more: the features take their place
        patches = torch.empty(buffer.count, width, dtype=dtype) if held is None or held.shape[1] != width else held
        for start, stop, rows in features():
            patches[start:stop] = rows
        return patches
    header = {"descr": np.dtype(str(dtype)[6:]).str, "fortran_order": False, "shape": (*grid, width)}
    with whole_file(Path(out)) as temporary, open(temporary, "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        reserve(file.fileno(), file.tell() + buffer.count * width * dtype.itemsize, Path(out))
        for _, _, rows in features():  # written, not mapped: pages of a map would count as the process's memory
            file.write(rows.contiguous().numpy().data)
    return torch.from_numpy(np.load(out, mmap_mode="c")).flatten(0, 1)


def in_precision(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """On the CPU in the buffer's precision; what does not fit in float16 is an error, not an infinity."""
    rows = rows.float()
    if dtype == torch.float16 and float(rows.abs().amax()) > torch.finfo(torch.float16).max:
        raise InputError("a value of this model's tokens is too large for float16; use tokens float32")
    return rows.to("cpu", dtype)


def reserve(descriptor: int, size: int, path: Path) -> None:
    """Take the room on the disk now: that it is full should not be known after an hour."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        else:
            os.truncate(descriptor, size)
    except OSError as error:
        raise InputError(f"cannot keep {size / 1e9:.1f} GB in {path}: {error.strerror}") from error


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
