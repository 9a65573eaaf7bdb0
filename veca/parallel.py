"""One image over several ranks (docs/parallel.md).

    model.stream("big.tif", out="features.npy", group=dist.group.WORLD)      # every rank reads and writes its own part
    split = parallel.SplitVeca(model, group)                                 # the same with gradients, for training

No patch meets another patch, so each rank can take its own part of them through the network. What the cores read of all
parts is merged once a layer: C·(D + 2H) numbers, whatever the image's size. The cores themselves are so few that every
rank computes them.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from veca import table
from veca.block import Block, Read
from veca.errors import InputError
from veca.rope import Rotation, axis_coords, jitter
from veca.training.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from veca.model import Veca, VecaOutput

Patches = range | Tensor  # numbers of patches on the grid, row by row, in order


class Sum(torch.autograd.Function):
    """The sum over ranks, on every rank. What is differentiated is the sum of all ranks' losses, so gradients, which
    come from every rank, are summed too.
    """

    @staticmethod
    def forward(context: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        context.group = group
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return total(gradient, context.group), None


def total(x: Tensor, group: ProcessGroup) -> Tensor:
    summed: Tensor = Sum.apply(x, group)  # type: ignore[no-untyped-call]
    return summed


def merge(seen: Read, group: ProcessGroup) -> Read:
    """What the cores read of the patches of all ranks; the same on every rank."""
    peak = seen.peak.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    packed = total(torch.cat((seen.total, seen.mixed), dim=-1) * (seen.peak - peak).exp(), group)
    return Read(peak, packed[..., :1], packed[..., 1:])


def share(count: int, group: ProcessGroup) -> slice:
    """Which of `count` rows of patches this rank takes: nearly as many as any other, none where there are too few."""
    return share_of(count, dist.get_rank(group), dist.get_world_size(group))


def share_of(count: int, rank: int, ranks: int) -> slice:
    return slice(count * rank // ranks, count * (rank + 1) // ranks)


def mean(values: Tensor, group: ProcessGroup) -> Tensor:
    """The mean of the values of all ranks, of which each may have another number, or none; for a loss over patches."""
    count = torch.tensor(float(values.numel()), device=values.device)
    dist.all_reduce(count, group=group)
    return total(values.float().sum(), group) / count


class SplitVeca(nn.Module):
    """A model that trains on images split over the ranks of a group, each of which has some rows of their patches.

    >>> rows = parallel.share(images.shape[2] // model.patch_size, group)
    >>> split = DistributedDataParallel(parallel.SplitVeca(model, group))
    >>> out = split(images[:, :, rows.start * model.patch_size : rows.stop * model.patch_size], cores=64)
    >>> loss = (1 - cosine(out.cls, cls)).mean() + parallel.mean(1 - cosine(out.patches, dense[:, rows]), group)

    `cls`, `cores` and `coords` come out the same on every rank, `patches` (and `grid`) are the rank's own. Write the
    loss so that it is one number on all ranks, as above: then the mean of the ranks' gradients, which is what
    DistributedDataParallel takes, is the gradient of one process that has the whole images.
    """

    def __init__(self, model: Veca, group: ProcessGroup) -> None:
        from veca.streaming import refuse_changed

        super().__init__()
        refuse_changed(model)
        self.model, self.group = model, group

    def forward(self, images: Tensor, cores: int | None = None) -> VecaOutput:
        """images: this rank's rows, B×3×h·p×W, from the first rank's at the top to the last one's at the bottom."""
        from veca.model import VecaOutput

        model = self.model
        budget = model.budget(cores)
        grid, rows = self.place(images, budget)
        across, down = axis_coords(grid[1], images.device), axis_coords(grid[0], images.device)
        patches, own = model.patch_embed(images)
        if model.config.positions == "table":
            patches = patches + table.on_lattice(model.table, across, down[rows]).to(patches.dtype)
        if model.training and model.config.turns:
            drawn = torch.cat(jitter(across, down))  # once for the image: the first rank's
            dist.broadcast(drawn, group=self.group, group_src=0)
            across, down = drawn.split([grid[1], grid[0]])
        by_patch = model.lattice_rotation(across, down[rows])
        tokens, state, pace = model.bank(budget, images.shape[0])
        tokens = tokens.to(patches.dtype)
        for index, block in enumerate(model.blocks):
            if index > 0:
                state = model.bank.move(state, pace, tokens, index)
            position = state.tanh()
            inputs = block, tokens, patches, model.rotation(position), by_patch
            if model.grad_checkpointing and torch.is_grad_enabled():
                tokens, patches = checkpoint(self.layer, *inputs, use_reentrant=False)
            else:
                tokens, patches = self.layer(*inputs)  # type: ignore[arg-type]
        features = model.output(tokens)
        return VecaOutput(features[:, 0], model.output(patches), features, position, own)

    def layer(
        self, block: Block, cores: Tensor, patches: Tensor, by_core: Rotation | None, by_patch: Rotation | None
    ) -> tuple[Tensor, Tensor]:
        side, view = block.ask(cores, by_core), block.norm_attn(patches)
        seen = block.read(side, view, by_patch) if patches.shape[1] else Read.of_nothing(side.query)
        seen = merge(seen, self.group)
        patches = block.look(patches, view, by_patch, side)
        return block.settle(cores, side, seen), patches

    def place(self, images: Tensor, budget: int) -> tuple[tuple[int, int], slice]:
        """The grid of the whole image, and which of its rows are this rank's; the same mistake is seen by all ranks."""
        patch = self.model.patch_size
        mine = torch.tensor([*images.shape, *[0] * 4][:4] + [images.ndim, budget], device=images.device)
        given = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(given, mine, group=self.group)
        shapes = [tuple(numbers.tolist()) for numbers in given]
        for batch, channels, height, width, dimensions, cores in shapes:
            if (dimensions, channels) != (4, 3) or height % patch or width % patch or not width or not batch:
                raise InputError(f"a rank's images must be B×3×H×W, whole rows of patches of {patch}, on every rank")
            if (batch, width, cores) != (shapes[0][0], shapes[0][3], shapes[0][5]):
                raise InputError("the ranks' images differ in number, width or cores: they are parts of the same ones")
        heights = [shape[2] // patch for shape in shapes]
        if not sum(heights):
            raise InputError("no rank has a row of patches")
        first = sum(heights[: dist.get_rank(self.group)])
        return (sum(heights), shapes[0][3] // patch), slice(first, first + images.shape[2] // patch)


class Together:
    """The ranks that take one image through the network without gradients; of one process alone (None), too."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group
        self.rank, self.count = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        if self.rank < 0:
            raise InputError("this process is not in the group that was given")
        self.first = self.rank == 0

    def part(self, patches: Patches, width: int, band: int = 0) -> Patches:
        """This rank's part of the patches of a grid so many wide: whole rows, or of chosen ones as many as others.

        Where a `band` of so many rows cannot be divided, whole bands.
        """
        if isinstance(patches, range):
            step = max(1, band) * width
            mine = share_of(-(-len(patches) // step), self.rank, self.count)
            return patches[mine.start * step : mine.stop * step]
        mine = share_of(len(patches), self.rank, self.count)
        if band:  # back to where the band begins that would be divided
            ends = torch.cat((patches, patches[-1:] + band * width))[[mine.start, mine.stop]] // (band * width)
            mine = slice(*torch.searchsorted(patches, ends * (band * width)).tolist())
        return patches[mine]

    def band(self, height: int, most: int) -> int:
        """Rows of a band, so many at most, of which every rank gets some of a grid so high, and nearly as many."""
        each = -(-height // self.count)
        return -(-each // -(-each // most))

    def merge(self, seen: Read) -> Read:
        if self.group is None:
            return seen
        with reaching():
            return merge(seen, self.group)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.count
        with reaching():
            dist.all_gather_object(values, value, group=self.group)
        return values

    def same(self, **settings: Any) -> None:
        """Refuse ranks that were given different things: they would wait for each other, or mix two images."""
        for name, values in {name: [given[name] for given in self.gather(settings)] for name in settings}.items():
            if other := next((rank for rank, value in enumerate(values) if value != values[0]), 0):
                raise InputError(f"the ranks disagree on {name}: {values[0]} on the first, {values[other]} on {other}")

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """What goes wrong on one rank ends all, with its own line. Nothing in here may wait for another rank."""
        if self.group is None:
            yield
            return
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        lines = self.gather(failure and (" ".join(str(failure).split()) or type(failure).__name__))
        if failure is not None:
            raise failure
        for rank, line in enumerate(lines):
            if line is not None:
                raise InputError(f"rank {rank} failed: {line}")

    @contextmanager
    def whole(
        self, make: Callable[[Path], AbstractContextManager[Path]], path: Path, prepare: Callable[[Path], None]
    ) -> Iterator[Path]:
        """One file or folder (`make`) into which every rank writes its part; it takes its place when all are done.

        The first rank makes and prepares it. Nothing in the context may wait for another rank.
        """
        temporary: Path | None = None
        with ExitStack() as held:
            try:
                with self.agreed():
                    if self.first:
                        temporary = held.enter_context(make(path))
                        prepare(temporary)
                temporary = self.gather(temporary)[0]
                assert temporary is not None
                with self.agreed():
                    if not temporary.exists():
                        raise InputError(f"{path}: all ranks must see the folder that the first one writes to")
                    yield temporary
                with self.agreed():
                    held.close()  # the first rank's gives it its name
            except BaseException:
                if temporary is not None and temporary.is_dir():  # the first rank may be the one that died
                    shutil.rmtree(temporary, ignore_errors=True)
                elif temporary is not None:
                    temporary.unlink(missing_ok=True)
                raise


@contextmanager
def launched(device: str) -> Iterator[Ranks]:
    """For a command: the ranks that `torchrun` started, which then share every image; without it, this process alone.

    When a rank ends early, torchrun stops the others by a signal: that too is one line, and leaves no partial file.
    """
    ranks = Ranks(device, patience=timedelta(minutes=30))

    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise InputError("stopped, by another rank's end or by hand")

    before = signal.signal(signal.SIGTERM, stop) if ranks.count > 1 else None
    yield ranks
    if before is not None:
        signal.signal(signal.SIGTERM, before)
    ranks.wait()  # who leaves while another still hears of it can take that one down
    ranks.close()


@contextmanager
def reaching() -> Iterator[None]:
    """That others do not answer is one line: gloo and NCCL have no kind of error in common."""
    try:
        yield
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:160]
        raise InputError(f"another rank ended or does not answer; its own message says why ({reason})") from error
