"""Exact inference on images that do not fit in memory (`model.stream`, and the first half of `model.scan`).

Patches need only the cores, so every layer is one pass over the patches, piece by piece, and what the cores read of
each piece is merged on the way (`veca.block.Read`). What must be kept between layers is one buffer of tokens: in
memory, in float16, or in a file. Dense attention has no such pass: there every patch reads every other.
Several ranks can share one image (`veca.parallel`): then each has its own part of the patches in its own buffer.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from veca import table
from veca.block import Attention, Block, CoreSide, Read
from veca.buffers import Buffer, Precision, in_precision, token_buffer
from veca.errors import InputError
from veca.fused import AS_WRITTEN, MIXING, FusedBlock, Workspace, can_fuse, piece_size, pieces
from veca.large.picture import Strips, StripSource, open_strips
from veca.large.sinks import NpySink, Put, SharedSink, Sink, boxes
from veca.large.source import Array
from veca.mixed import Cells
from veca.mixed_strips import embedded_cells
from veca.parallel import Patches, Together
from veca.rope import axis_coords

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from veca.model import Veca, VecaOutput

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
    out: str | os.PathLike[str] | Sink | None = None,
    report: Report | None = None,
    where: Any = None,
    group: ProcessGroup | None = None,
) -> VecaOutput:
    """The forward pass of one image of any size; see `Veca.stream`."""
    from veca.large.where import mask_of
    from veca.model import VecaOutput
    from veca.scan import choose

    budget, tile = checked(model, cores, tile, tokens, out)
    ranks = Together(group)
    if group is not None and out is None:
        raise InputError("over several ranks the dense feature goes to a file: give out=, or scan and look")
    check_sink(out, ranks)
    with ExitStack() as held:
        with ranks.agreed():
            strips = held.enter_context(open_strips(source, model.patch_size))
            grid = grid_of(model, strips)
            chosen = choose(grid, 1.0, None if where is None else mask_of(where, grid, strips))
            mine = ranks.part(chosen, grid[1], band_of(out, grid, ranks))
            buffer = held.enter_context(token_buffer(model, len(mine), tokens, spill))
        ranks.same(size=strips.size, patches=len(chosen), **told_apart(model, budget, tokens, out))
        collect = None if out is None else collector(model, buffer, grid, mine, tile, out, report, ranks, held)
        journey = travel(model, strips, mine, budget, tile, buffer, report, ranks)
        core_features = model.output(journey.cores)
        patches = torch.empty(0, model.config.feature_width, dtype=buffer.dtype)
        if collect is None:
            patches = in_memory(model, buffer, grid, mine, output_of(model, buffer, tile, report))
        else:
            collect()
    if isinstance(sink := sink_of(out), NpySink):
        patches = torch.from_numpy(np.load(sink.path, mmap_mode="c")).flatten(0, 1)
    return VecaOutput(core_features[:, 0], patches[None], core_features, journey.coords, grid)


def checked(
    model: Veca, cores: int | None, tile: int | None, tokens: str, out: str | os.PathLike[str] | Sink | None
) -> tuple[int, int]:
    """The budget and the size of a piece; what cannot be done is said before anything is."""
    if tile is not None and tile < 1:
        raise InputError(f"tile must be at least 1 patch, not {tile}")
    if tokens not in ("float32", "float16"):
        raise InputError(f"tokens are kept in float32 or float16, not {tokens!r}")
    if isinstance(out, (str, os.PathLike)) and Path(out).is_dir():
        raise InputError(f"{out} is a folder; the dense feature goes to an .npy file")
    refuse_changed(model)
    first = model.blocks[0]
    assert isinstance(first, Block)
    return model.budget(cores), tile or piece_size(first, dtype_of(model))


def check_sink(out: str | os.PathLike[str] | Sink | None, ranks: Together) -> None:
    if ranks.group is not None and isinstance(out, Sink) and not isinstance(out, SharedSink):
        raise InputError("several ranks write one .npy or Zarr together, no other format: give out= a path or ZarrSink")


def band_of(out: str | os.PathLike[str] | Sink | None, grid: tuple[int, int], ranks: Together) -> int:
    """Rows of the grid that no two ranks may write into; 0: any patch is its own."""
    return ranks.band(grid[0], out.rows) if isinstance(out, SharedSink) and out.bands else 0


def told_apart(model: Veca, budget: int, tokens: str, out: str | os.PathLike[str] | Sink | None) -> dict[str, Any]:
    """What must be the same on all ranks; of the weights some are enough to tell that they were drawn anew."""
    # Their bytes: machines of several kinds add the same numbers up to slightly different sums.
    weights = hashlib.sha256(model.bank.tokens.detach().float().cpu().numpy().tobytes()).hexdigest()[:8]
    place, dtype = sink_of(out), str(dtype_of(model)).removeprefix("torch.")
    told = {"cores": budget, "dtype": dtype, "tokens": tokens}
    kind = None if place is None else f"{type(place).__name__} at {place.path}"
    return {**told, "out": kind, "the model's weights": weights}


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
    if any(type(weight) is nn.Parameter and weight.is_meta for weight in model.parameters()):
        raise InputError(
            "this model's weights are not in memory (accelerate offloaded them?): streaming and scanning read them in "
            "every layer; load the model without offloading, or use model(x)"
        )
    patched = any(getattr(owner, name) is not AS_WRITTEN[owner, name] for owner, name in MIXING)
    for block in model.blocks:
        for module, kind in ((block, Block), (block._modules["attn"], Attention)):
            assert module is not None
            changed = type(module) is not kind or any(
                name in vars(module) or vars(kind)[name] is not AS_WRITTEN[kind, name]
                for name in ("forward", "attend")  # the latter is not how the cores read in parts
                if (kind, name) in AS_WRITTEN
            )
            if patched or changed or module._forward_hooks or module._forward_pre_hooks:
                raise InputError(
                    "this model's blocks have hooks or a forward of their own; remove them before streaming or "
                    "scanning (those of the layers inside a block may stay)"
                )


def travel(
    model: Veca,
    strips: Strips,
    chosen: Patches | Cells,  # those that are read, by this rank; or squares of several sizes
    budget: int,
    tile: int,
    buffer: Buffer,
    report: Report | None,
    ranks: Together,
    *,
    keep_path: bool = False,
    look_last: bool = True,  # whether the patches pass the last layer too: nobody reads them afterwards
) -> Journey:
    """Take one image through all layers, a pass over its patches each."""
    report = report or (lambda what, done, total: None)
    grid, device, dtype = grid_of(model, strips), buffer.device, dtype_of(model)
    with ranks.agreed():
        rows_in_order = (
            embedded_cells(model, strips, chosen, tile, report)
            if isinstance(chosen, Cells)
            else embedded(model, strips, grid, chosen, tile, report)
        )
        for start, rows in rows_in_order:
            buffer.keep(start, rows)
    across, down = axis_coords(grid[1], device), axis_coords(grid[0], device)
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
            if isinstance(chosen, Cells):
                by = model.rotation(chosen.centres[:, start:stop])
            else:
                by = model.lattice_rotation(across, down, numbers(start, stop, chosen, device))
            view = block.norm_attn(rows)
            new = block.read(side, view, by)
            seen = new if seen is None else seen.merge(new)
            if index < last or look_last:
                buffer.keep(start, block.look(rows, view, by, side)[0])
            report(f"layer {index + 1} of {len(blocks)}", stop, buffer.count)
        tokens = block.settle(tokens, side, ranks.merge(Read.of_nothing(side.query) if seen is None else seen))
    return Journey(tokens, position, path)


def numbers(start: int, stop: int, chosen: Patches, device: torch.device) -> Tensor:
    """Where on the grid the patches lie that are kept from `start` to `stop`."""
    part = chosen[start:stop]
    return torch.arange(part.start, part.stop, device=device) if isinstance(part, range) else part.to(device)


def embedded(
    model: Veca, strips: Strips, grid: tuple[int, int], chosen: Patches, tile: int, report: Report
) -> Iterator[tuple[int, Tensor]]:
    """Patch tokens of one strip after another (n×D), and the place of the first: rows of the grid, about `tile`
    patches."""
    if not len(chosen):
        return
    weight = model.patch_embed.proj.weight
    across, down = axis_coords(grid[1], weight.device), axis_coords(grid[0], weight.device)
    step = max(1, tile // grid[1])
    start, first, last = 0, int(chosen[0]) // grid[1], int(chosen[-1]) // grid[1] + 1
    for top in range(first, last, step):
        bottom = min(top + step, last)
        inside, left, right = None, 0, grid[1]  # of chosen patches, those of this strip; of a range, always whole rows
        if isinstance(chosen, Tensor):
            ends = torch.searchsorted(chosen, torch.tensor([top * grid[1], bottom * grid[1]]))
            here = chosen[ends[0] : ends[1]] - top * grid[1]
            row, column = here // grid[1], here % grid[1]
            if len(row):  # what lies left and right of them is not read
                left, right = int(column.min()), int(column.max()) + 1
            inside = row * (right - left) + column - left
        if inside is None or len(inside):
            patch = model.patch_size
            strip = strips.read(top * patch, bottom * patch, left * patch, right * patch)
            rows = model.patch_embed(strip.to(weight.device, weight.dtype))[0][0]
            if model.config.positions == "table":
                rows = rows.float() + table.on_lattice(model.table, across[left:right], down[top:bottom])
            rows = rows if inside is None else rows[inside.to(rows.device)]
            yield start, rows
            start += len(rows)
        report("patches", bottom - first, last - first)


def output_of(model: Veca, buffer: Buffer, tile: int, report: Report | None) -> Iterator[tuple[int, int, Tensor]]:
    """The dense feature, a piece after another."""
    for start, stop in pieces(buffer.count, tile):
        rows = model.output(buffer.load(start, stop).to(dtype_of(model)))
        yield start, stop, in_precision(rows, buffer.dtype)
        if report is not None:
            report("output", stop, buffer.count)


def in_memory(
    model: Veca, buffer: Buffer, grid: tuple[int, int], mine: Patches, features: Iterator[tuple[int, int, Tensor]]
) -> Tensor:
    """N×D′, zeros where no patch was chosen."""
    width, held = model.config.feature_width, buffer.memory()
    if isinstance(mine, Tensor):
        patches = torch.zeros(grid[0] * grid[1], width, dtype=buffer.dtype)
    elif held is None or held.shape[1] != width:
        patches = torch.empty(buffer.count, width, dtype=buffer.dtype)
    else:
        patches = held  # nobody needs the tokens any more: the features take their place
    for start, stop, rows in features:
        patches[mine[start:stop] if isinstance(mine, Tensor) else slice(start, stop)] = rows
    return patches


def sink_of(out: str | os.PathLike[str] | Sink | None) -> Sink | None:
    return NpySink(out) if isinstance(out, (str, os.PathLike)) else out


def collector(
    model: Veca,
    buffer: Buffer,
    grid: tuple[int, int],
    mine: Patches,
    tile: int,
    out: str | os.PathLike[str] | Sink,
    report: Report | None,
    ranks: Together,
    held: ExitStack,
) -> Callable[[], None]:
    """What writes the dense feature when all layers are passed. Its room on the disk is taken now, hours before."""
    sink = sink_of(out)
    assert sink is not None
    opened = destination(sink, grid, model.config.feature_width, np.dtype(str(buffer.dtype)[6:]), ranks)
    put = held.enter_context(opened) if ranks.group is None else None  # ranks cannot hold one file between them so long

    def collect() -> None:
        features, cpu = output_of(model, buffer, tile, report), torch.device("cpu")
        numbered = ((numbers(start, stop, mine, cpu).numpy(), rows.numpy()) for start, stop, rows in features)
        (put or held.enter_context(opened))(numbered)

    return collect


@contextmanager
def destination(sink: Sink, grid: tuple[int, int], width: int, dtype: np.dtype[Any], ranks: Together) -> Iterator[Put]:
    """A sink that is open, as what takes patches in their order."""
    if isinstance(sink, NpySink) or (isinstance(sink, SharedSink) and ranks.group is not None):
        rows = band_of(sink, grid, ranks)
        with (
            ranks.whole(sink.whole, sink.path, lambda place: sink.prepare(place, grid, width, dtype, rows)) as place,
            sink.part(place, grid, width, dtype, rows) as put,
        ):
            yield put
        return
    with sink.opened(grid, width, dtype) as write:

        def put_boxes(numbered: Iterator[tuple[Array, Array]]) -> None:
            for top, box in boxes(numbered, grid, sink.rows):
                write(0, top, box)

        yield put_boxes
