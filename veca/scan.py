"""Scan an image once, look anywhere later (docs/scan.md).

    scan = model.scan("slide.tif", cores=64)
    scan.cls, scan.cores, scan.size
    scan.look(box=(x, y, width, height))            # as in the whole pass, whatever the image's size
    scan.look(points=[(x, y), …])                   # centred on any pixels
    scan.look(stride=7)                             # the whole image, twice as fine along each axis
    scan.save("slide.scan");  veca.open_scan("slide.scan", "slide.tif", model)

A patch reads only the cores. So whoever keeps the cores' keys and values of every layer can take any patch of that
image through the network later, exactly: 2·L·C·D numbers, whatever the image's size.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from fractions import Fraction
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from veca import mixed, table
from veca.block import CoreSide
from veca.buffers import Precision, token_buffer
from veca.errors import InputError, check_share
from veca.files import whole_file
from veca.fused import piece_size
from veca.large.picture import Strips, StripSource, open_strips
from veca.large.sinks import Sink
from veca.large.where import mask_of
from veca.mixed_strips import choose_in_strips
from veca.parallel import Patches, Together
from veca.rope import Rotation
from veca.streaming import (
    Report,
    band_of,
    check_sink,
    checked,
    collector,
    dtype_of,
    grid_of,
    told_apart,
    travel,
    verbs_of,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from veca.model import Veca, VecaOutput


class Look(NamedTuple):
    """Features of some patches of a scanned image."""

    features: Tensor
    """h×w×D′ of a box, n×D′ of points; zeros where `inside` is false"""
    centres: Tensor
    """h×w×2 or n×2: the middle of each patch, (x, y) in pixels of the source"""
    box: tuple[float, float, float, float]
    """(x, y, width, height) in pixels that the cells of a box cover, or that the points' patches span; whole numbers
    where the stride is one"""
    inside: Tensor
    """h×w or n: whether the mask of the scan includes it (all true without a mask)"""


class Scan:
    """What the cores went through on one image. `model.scan` makes it, `veca.open_scan` reads it back."""

    def __init__(
        self,
        model: Veca,
        strips: Strips,
        path: list[CoreSide],  # 1×H×C×d, per layer; the query is not needed any more
        cores: Tensor,  # C×D′
        coords: Tensor,  # C×2
        share: float,
        inside: Tensor | None,  # h×w
        patches: float = 1.0,
    ) -> None:
        self.model, self.strips, self.path = model, strips, path
        self.cores = cores
        """C×D′, the cores' features"""
        self.coords = coords
        """C×2, where they sat in the last layer: (x, y) in [−1, 1]"""
        self.share = share
        """how many of the patches were read"""
        self.patches = patches
        """how many there were of the grid's, where they were read at mixed scale"""
        self.inside = inside
        """h×w, which patches the mask includes; None: all"""
        self.size = strips.size
        """(width, height) of the source in pixels"""
        self.grid = grid_of(model, strips)
        """(h, w), in patches"""
        self.weights = weights_mark(model)  # the path is theirs only

    @property
    def cls(self) -> Tensor:
        """D′, the global feature: the first core"""
        return self.cores[0]

    @torch.inference_mode()
    def look(
        self,
        box: tuple[int, int, int, int] | None = None,
        points: Tensor | np.ndarray[Any, Any] | list[tuple[float, float]] | None = None,
        stride: float | None = None,
        report: Report | None = None,
    ) -> Look:
        """The dense feature of a part of the image, later, as the whole pass would give it.

        `box` is (x, y, width, height) in pixels of the source: one feature for each cell of stride×stride pixels that
        it touches; without it the whole image. A stride of the patch size (the default) is the model's own grid, a
        smaller one gives a finer map, of patches that overlap; it need not be whole (3.5), though each patch then lies
        at the nearest whole pixel. `points` are (x, y) instead: a feature centred on each,
        to the nearest whole pixel. Patches at the border are moved inside the image.
        """
        self.check_weights()
        step = self.checked_stride(stride)
        if points is not None:
            if box is not None:
                raise InputError("look at a box or at points, not both")
            return self.look_at_points(points, report)
        across, down, covered = self.cells(box, step)
        lefts, tops = (
            corners(axis, self.model.patch_size, length)
            for axis, length in ((across, self.strips.width), (down, self.strips.height))
        )
        inside = self.inside_of(lefts[None, :], tops[:, None])
        found = torch.zeros(*inside.shape, self.model.config.feature_width)
        rows = max(1, self.piece // len(lefts))
        for first in range(0, len(tops), rows):
            part = slice(first, first + rows)
            if inside[part].any():
                found[part][inside[part]] = self.features_of_cells(lefts, tops[part], inside[part])
            if report is not None:
                report("look", min(first + rows, len(tops)), len(tops))
        half = self.model.patch_size / 2
        centres = torch.stack(torch.meshgrid(lefts + half, tops + half, indexing="xy"), dim=-1)
        return Look(found, centres, covered, inside)

    def look_at_points(self, points: Any, report: Report | None) -> Look:
        try:
            given = torch.as_tensor(np.asarray(points, dtype=np.float64))
        except (TypeError, ValueError):
            raise InputError("points are pairs (x, y) of numbers, n×2") from None
        if given.ndim != 2 or given.shape[1] != 2 or not len(given):
            raise InputError(f"points are pairs (x, y), n×2, not {'×'.join(map(str, given.shape))}")
        width, height = self.strips.width, self.strips.height
        outside = ~((given >= 0) & (given <= torch.tensor([width, height]))).all(dim=1)
        if outside.any():
            x, y = given[outside][0].tolist()
            raise InputError(f"the point ({x:g}, {y:g}) is outside the image, whose patches cover {width}×{height}")
        patch = self.model.patch_size
        lefts, tops = corners(given[:, 0], patch, width), corners(given[:, 1], patch, height)
        inside = self.inside_of(lefts, tops)
        found = torch.zeros(len(given), self.model.config.feature_width)
        order = torch.argsort(tops * width + lefts)  # from top to bottom, as files are stored
        order = order[inside[order]]
        for first in range(0, len(order), self.piece):
            wanted = order[first : first + self.piece]
            squares = torch.cat(
                [
                    self.strips.read(top, top + patch, left, left + patch)
                    for left, top in zip(lefts[wanted].tolist(), tops[wanted].tolist(), strict=True)
                ]
            )
            coords = torch.stack((self.coordinate(lefts[wanted], width), self.coordinate(tops[wanted], height)), dim=-1)
            rows = self.tokens(squares)
            if self.model.config.positions == "table":
                rows = rows + table.at_points(self.model.table, coords.to(rows.device)).to(rows.dtype)
            found[wanted] = self.along(rows, self.model.rotation(coords.to(rows.device)[None]))
            if report is not None:
                report("look", min(first + self.piece, len(order)), len(order))
        left, top = int(lefts.min()), int(tops.min())
        covered = (left, top, int(lefts.max()) + patch - left, int(tops.max()) + patch - top)
        return Look(found, torch.stack((lefts, tops), dim=-1) + patch / 2, covered, inside)

    def features_of_cells(self, lefts: Tensor, tops: Tensor, inside: Tensor) -> Tensor:
        """Of the patches with these left and upper edges (w and h numbers) that are inside (h×w): n×D′."""
        patch, model = self.model.patch_size, self.model
        left, top = int(lefts.min()), int(tops.min())
        pixels = self.strips.read(top, int(tops.max()) + patch, left, int(lefts.max()) + patch)[0]
        row, column = inside.nonzero(as_tuple=True)
        if len(row) == len(lefts) * len(tops) and is_grid(lefts, patch) and is_grid(tops, patch):
            rows = model.patch_embed(pixels[None].to(self.device, dtype_of(model)))[0][0]
        else:
            window = torch.arange(patch)
            y, x = (tops - top)[row][:, None] + window, (lefts - left)[column][:, None] + window  # n×p
            rows = self.tokens(pixels[:, y[:, :, None], x[:, None, :]].transpose(0, 1))
        across = self.coordinate(lefts, self.strips.width).to(rows.device)
        down = self.coordinate(tops, self.strips.height).to(rows.device)
        row, column = row.to(rows.device), column.to(rows.device)
        if model.config.positions == "table":
            entries = table.on_lattice(model.table, across, down)
            rows = rows + entries[row * len(lefts) + column].to(rows.dtype)
        return self.along(rows, model.lattice_rotation(across, down, row * len(lefts) + column))

    def tokens(self, squares: Tensor) -> Tensor:
        """n×3×p×p pixels → n×D, without positions."""
        embedded: Tensor = self.model.patch_embed(squares.to(self.device, dtype_of(self.model)))[0][:, 0]
        return embedded

    def along(self, rows: Tensor, by: Rotation | None) -> Tensor:
        """Patch tokens (n×D) through all layers along the stored path: n×D′ float32 on the CPU."""
        x = rows[None].to(dtype_of(self.model)).contiguous()
        for block, side in zip(verbs_of(self.model), self.path, strict=True):
            x = block.look(x, block.norm_attn(x), by, side)
        return self.model.output(x)[0].float().cpu()

    @property
    def device(self) -> torch.device:
        return self.model.patch_embed.proj.weight.device

    @property
    def piece(self) -> int:
        return piece_size(self.model.blocks[0], dtype_of(self.model))  # type: ignore[arg-type]

    def check_weights(self) -> None:
        if weights_mark(self.model) != self.weights:
            raise InputError("the model's weights, precision or device changed after this scan: scan the image again")

    def checked_stride(self, stride: float | None) -> Fraction:
        patch = self.model.patch_size
        if stride is None:
            return Fraction(patch)
        if isinstance(stride, bool) or not isinstance(stride, Real) or not 1 <= stride <= patch:
            raise InputError(f"stride is a number of pixels from 1 to the patch size {patch}, not {stride!r}")
        return Fraction(stride).limit_denominator(1000)  # so that three strides of p/3 are p

    def cells(
        self, box: tuple[int, int, int, int] | None, stride: Fraction
    ) -> tuple[Tensor, Tensor, tuple[float, float, float, float]]:
        """Centres of the cells that a box touches, along x and along y, and the pixels that they cover."""
        width, height = self.strips.width, self.strips.height
        if box is None:
            box = (0, 0, width, height)
        if len(box) != 4 or any(not isinstance(value, Real) or value != value // 1 for value in box):
            raise InputError(f"a box is (x, y, width, height) in whole pixels, not {box!r}")
        x, y, wide, high = (int(value) for value in box)
        if wide < 1 or high < 1 or x < 0 or y < 0 or x + wide > self.size[0] or y + high > self.size[1]:
            raise InputError(f"the box {x},{y},{wide},{high} is not inside the image of {self.size[0]}×{self.size[1]}")
        if x >= width or y >= height:
            raise InputError(f"the box {x},{y},{wide},{high} lies beyond the last whole patch ({width}×{height})")
        columns = range(x // stride, -(-min(x + wide, width) // stride))
        rows = range(y // stride, -(-min(y + high, height) // stride))
        left, top = columns.start * stride, rows.start * stride
        right, bottom = min(columns.stop * stride, Fraction(width)), min(rows.stop * stride, Fraction(height))
        across, down = ((torch.tensor(list(axis)).double() + 0.5) * float(stride) for axis in (columns, rows))
        return across, down, (tidy(left), tidy(top), tidy(right - left), tidy(bottom - top))

    def coordinate(self, edges: Tensor, length: int) -> Tensor:
        """Of patches with these left (or upper) edges in an image so many pixels long: in [−1, 1]."""
        return ((edges.double() + self.model.patch_size / 2) / length * 2 - 1).float()

    def inside_of(self, lefts: Tensor, tops: Tensor) -> Tensor:
        """Whether the grid's patch below the middle of each of these is inside the mask."""
        half = self.model.patch_size // 2
        column, row = (lefts + half) // self.model.patch_size, (tops + half) // self.model.patch_size
        column, row = torch.broadcast_tensors(column, row)
        return torch.ones(column.shape, dtype=torch.bool) if self.inside is None else self.inside[row, column]

    def save(self, file: str | Path, **more: Any) -> None:
        """About a megabyte: keys and values in float16, and what tells the model and the image again.

        `more` goes to the file's header.
        """
        from veca.scan_file import digest_of, pack

        self.check_weights()
        data = pack(self, digest_of(self.model), **more)
        with whole_file(file) as temporary:
            temporary.write_bytes(data)


def tidy(number: float | Fraction) -> float:
    """The same, an int where it is whole."""
    return int(number) if number == int(number) else float(number)


def weights_mark(model: Veca) -> list[tuple[Any, ...]]:
    """By what a change of a model's weights is noticed without reading them all: where each parameter lies, how often
    PyTorch counted a write to it, and, as writes through `.data` are not counted, its last number.
    """
    marks: list[tuple[Any, ...]] = []
    for each in model.parameters():
        if type(each) is not nn.Parameter or each.is_meta or not each.numel():  # quantised, on disk, nothing
            marks.append((id(each),))
            continue
        writes, last = 0 if each.is_inference() else each._version, float(each.detach()[(-1,) * each.ndim])
        marks.append((each.dtype, each.device, each.data_ptr(), writes, last))
    return marks


def is_grid(edges: Tensor, patch: int) -> bool:
    """Whether patches at these edges lie side by side."""
    return bool((edges.diff() == patch).all())


def corners(centres: Tensor, patch: int, length: int) -> Tensor:
    """Left (or upper) edges, in whole pixels inside the image, of patches with these centres."""
    return (centres - patch / 2 + 0.5).floor().long().clamp(0, length - patch)


@torch.inference_mode()
def scan(
    model: Veca,
    source: StripSource,
    cores: int | None = None,
    tile: int | None = None,
    share: float = 1.0,
    where: Any = None,
    tokens: Precision = "float32",
    spill: str | os.PathLike[str] | None = None,
    out: str | os.PathLike[str] | Sink | None = None,
    report: Report | None = None,
    group: ProcessGroup | None = None,
    patches: float | str | None = None,
) -> Scan:
    """See `Veca.scan`."""
    budget, tile = checked(model, cores, tile, tokens, out)
    check_share(share)
    if patches is not None:
        check_share(patches, "patches")
        if float(patches) < 1 and (share < 1 or where is not None or out is not None or group is not None):
            raise InputError("patches= goes with no share=, where=, out= or group=: the cores read cells of all of it")
    if out is not None and share < 1:
        raise InputError("a file for the dense feature needs all patches: scan without it, then look")
    ranks = Together(group)
    check_sink(out, ranks)
    with ExitStack() as held, ExitStack() as opened:  # the scan keeps the source open
        with ranks.agreed():
            strips = opened.enter_context(open_strips(source, model.patch_size))
            grid = grid_of(model, strips)
            inside = None if where is None else mask_of(where, grid, strips)
            chosen = choose(grid, share, inside)
            mine = ranks.part(chosen, grid[1], band_of(out, grid, ranks))
            cells, count = None, len(mine)
            if patches is not None and (spent := mixed.tokens_of(grid, float(patches))) < grid[0] * grid[1]:
                cells, count = choose_in_strips(model, strips, grid, float(patches), tile), spent
            buffer = held.enter_context(token_buffer(model, count, tokens, spill))
        ranks.same(size=strips.size, patches=len(chosen), **told_apart(model, budget, tokens, out))
        collect = None if out is None else collector(model, buffer, grid, mine, tile, out, report, ranks, held)
        journey = travel(
            model, strips, cells or mine, budget, tile, buffer, report, ranks, keep_path=True, look_last=out is not None
        )
        if collect is not None:
            collect()
        opened.pop_all()
    features = model.output(journey.cores)[0].float().cpu()
    return Scan(model, strips, journey.path, features, journey.coords[0].cpu(), share, inside, float(patches or 1))


def scanned(
    model: Veca,
    images: Tensor,
    cores: int | None,
    share: float = 1.0,
    stride: float | None = None,
    patches: float | str | None = None,
) -> VecaOutput:
    """What `model(images)` answers when only a share of the patches is read, or on a finer lattice: one by one, each
    image (B×3×H×W) is scanned and then looked at as a whole.
    """
    from veca.model import VecaOutput

    scans = [scan(model, image, cores, share=share, patches=patches) for image in images]
    found = [one.look(stride=stride).features for one in scans]
    height, width = found[0].shape[:2]
    core_features = torch.stack([one.cores for one in scans]).to(images.device)
    return VecaOutput(
        cls=core_features[:, 0],
        patches=torch.stack(found).flatten(1, 2).to(images.device),
        cores=core_features,
        coords=torch.stack([one.coords for one in scans]).to(images.device),
        grid=(height, width),
    )


def choose(grid: tuple[int, int], share: float, inside: Tensor | None) -> Patches:
    """The patches to read: all, or an even share of those inside the mask."""
    if share == 1 and inside is None:
        return range(grid[0] * grid[1])
    candidates = torch.arange(grid[0] * grid[1]) if inside is None else inside.flatten().nonzero()[:, 0]
    if not len(candidates):
        raise InputError("the mask leaves no patch to read")
    if share == 1:
        return candidates
    return spread(candidates, grid)[: max(1, round(share * len(candidates)))].sort().values


def spread(patches: Tensor, grid: tuple[int, int]) -> Tensor:
    """The numbers of some patches in an order of which every stretch is spread evenly over the image.

    Ranked by the fractional part of x·g⁻¹ + y·g⁻² (g the plastic number): no lattice that could fall in step with what
    is on the image.
    """
    row, column = patches // grid[1], patches % grid[1]
    rank = torch.frac(column.double() * 0.7548776662466927 + row.double() * 0.5698402909980532).argsort(stable=True)
    return patches[rank]
