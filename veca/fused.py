"""The verbs of a block on a CPU without gradients: the same computation with fewer passes over memory.

    view = block.norm_attn(patches)                      # a piece of the patches, small enough for the caches
    seen = fused.read(side, view, by_patch)
    patches = fused.look(patches, view, by_patch, side)  # in place

Results of products go to memory that is there already and are changed in place; residuals are summed by the products.
Nothing is prepared and nothing is remembered: products read the block's own parameters, so that there is no copy to
grow stale. `can_fuse` tells where this may stand in for a block at all: hooks, adapters, replaced layers and methods,
other devices and gradients see the block's own forward.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from veca import block as plain
from veca.block import Attention, Block, CoreSide, Read, read
from veca.devices import fast_bfloat16
from veca.rope import Rotation

KINDS = (Block, Attention, nn.Linear, nn.LayerNorm)
METHODS = {name for kind in KINDS[:2] for name, value in vars(kind).items() if callable(value)}
AS_WRITTEN: dict[tuple[Any, str], Any] = {
    (owner, name): getattr(owner, name)  # of a class, its bases' too
    for owner, names in (
        *((kind, METHODS & vars(kind).keys() | {"forward", "__call__"}) for kind in KINDS),
        (plain, ("attend", "read", "rotate")),
        (nn.functional, ("linear", "layer_norm", "silu", "gelu", "scaled_dot_product_attention")),
    )
    for name in names
}


MIXING = ((plain, "attend"), (nn.functional, "scaled_dot_product_attention"))  # not how the cores read in parts


class Workspace:
    """Memory for the results of products, used again for every piece of every layer."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.held, self.views = dtype, dict[str, Tensor](), dict[tuple[str, tuple[int, ...]], Tensor]()

    def take(self, name: str, *shape: int) -> Tensor:
        """Memory of this name and shape, the same every time."""
        known = self.views.get((name, shape))
        if known is not None:
            return known
        size = math.prod(shape)
        if name not in self.held or self.held[name].numel() < size:
            self.views = {key: view for key, view in self.views.items() if key[0] != name}
            self.held[name] = torch.empty(size, dtype=self.dtype)
        self.views[name, shape] = self.held[name][:size].view(shape)
        return self.views[name, shape]


class FusedBlock:
    """The verbs of one block; `patches` and `cores` are changed in place."""

    def __init__(self, block: Block, space: Workspace) -> None:
        self.block, self.attn, self.space = block, block.attn, space
        self.norm_attn, self.scale = block.norm_attn, (block.fc2.out_features // block.attn.heads) ** -0.5

    def ask(self, cores: Tensor, by: Rotation | None) -> CoreSide:
        return CoreSide(*self.project("core", self.norm_attn(cores), by))

    def read(self, side: CoreSide, view: Tensor, by: Rotation | None) -> Read:
        """What the cores take from these patches, of which `view` is the norm (B×n×D)."""
        return self.weigh(side.query, self.keys("", view, by), lambda: self.values("", view))

    def look(self, patches: Tensor, view: Tensor, by: Rotation | None, side: CoreSide) -> Tensor:
        """These patches (B×n×D) after the block, in place; `view` is their norm."""
        query = self.queries("", view, by)
        mixed = self.space.take("mixed", *view.shape[:2], *query.shape[1::2])
        self.mix(query, side, mixed)
        return self.finish(patches, mixed)

    def settle(self, cores: Tensor, side: CoreSide, seen: Read) -> Tensor:
        mixed = read(*side).merge(seen).result().to(cores.dtype)  # B×H×C×d
        return self.finish(cores, mixed.transpose(1, 2).contiguous())

    def layer(self, x: Tensor, cores: int, by: list[Rotation | None], bounds: list[tuple[int, int]]) -> None:
        """All verbs for tokens that lie in memory (B×(C+N)×D, cores first), in pieces of which the first has the cores.

        There the cores share every product with patches: alone, so few rows would read all the weights once more.
        """
        (start, stop), *others = bounds
        first = x[:, start:stop]
        query, key, value = self.project("first", self.norm_attn(first), by[0])
        side = CoreSide(query[:, :, :cores], key[:, :, :cores], value[:, :, :cores])
        seen = self.weigh(side.query, key, lambda: value)
        for (start, stop), turn in zip(others, by[1:], strict=True):
            part = x[:, start:stop]
            view = self.norm_attn(part)
            seen = seen.merge(self.read(side, view, turn))
            self.look(part, view, turn, side)
        mixed = self.space.take("mixed", *first.shape[:2], *query.shape[1::2])
        mixed[:, :cores] = seen.result().transpose(1, 2)
        self.mix(query[:, :, cores:], side, mixed[:, cores:])
        self.finish(first, mixed)

    def project(self, name: str, view: Tensor, by: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        return self.queries(name, view, by), self.keys(name, view, by), self.values(name, view)

    def queries(self, name: str, view: Tensor, by: Rotation | None) -> Tensor:
        return self.product(f"{name} query", self.attn.q_proj, view, by)

    def keys(self, name: str, view: Tensor, by: Rotation | None) -> Tensor:
        return self.product(f"{name} key", self.attn.k_proj, view, by)

    def values(self, name: str, view: Tensor) -> Tensor:
        return self.product(f"{name} value", self.attn.v_proj, view, None)

    def product(self, name: str, layer: nn.Linear, x: Tensor, by: Rotation | None) -> Tensor:
        """B×T×D → B×H×T×d, rotated where `by` says how."""
        flat = x.flatten(0, 1)
        into = self.space.take(name, len(flat), layer.weight.shape[0])
        split = torch.addmm(layer.bias, flat, layer.weight.t(), out=into).view(*x.shape[:2], self.attn.heads, -1)
        if by is not None:
            pairs = split.float().unflatten(-1, (-1, 2))  # in float32 this is `split` itself
            torch.view_as_complex(pairs).mul_(by.turns)
            if split.dtype != torch.float32:
                split.copy_(pairs.flatten(-2))
        return split.transpose(1, 2)

    def weigh(self, query: Tensor, key: Tensor, values: Callable[[], Tensor]) -> Read:
        """`block.read` of queries (B×H×C×d) over tokens (B×H×n×d); values are computed after the weights, which are
        then still in the cache.
        """
        query = query * self.scale
        images, heads, cores, _ = query.shape
        logits = self.space.take("core logits", images, heads, cores, key.shape[2])
        for image in range(images):
            torch.bmm(query[image], key[image].transpose(1, 2), out=logits[image])
        weights = logits.float()
        peak = weights.amax(-1, keepdim=True)
        total = weights.sub_(peak).exp_().sum(-1, keepdim=True)
        value = values()
        weights = weights.to(value.dtype)
        if images == 1:
            mixed = torch.bmm(weights[0], value[0])[None]
        else:
            mixed = torch.stack([torch.bmm(*both) for both in zip(weights, value, strict=True)])
        return Read(peak, total, mixed.float())

    def mix(self, query: Tensor, side: CoreSide, into: Tensor) -> None:
        """softmax(q kᵀ/√d) v of patches (B×H×n×d) over the cores, into B×n×H×d."""
        key = (side.key * self.scale).transpose(2, 3)
        for image in range(len(query)):
            logits = self.space.take("patch logits", *query.shape[1:3], key.shape[-1])
            torch.bmm(query[image], key[image], out=logits)
            torch.softmax(logits, -1, out=logits)
            torch.bmm(logits, side.value[image], out=into[image].transpose(0, 1))

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Output projection and MLP, added to x (B×T×D); mixed: B×T×H×d."""
        block, rows = self.block, x.flatten(0, 1)
        add_product(rows, mixed.flatten(2).flatten(0, 1), self.attn.out_proj)
        view = block.norm_mlp(rows)
        hidden = block.fc2.in_features
        first, bias = block.fc1.weight, block.fc1.bias
        inner = self.space.take("hidden", len(rows), hidden)
        torch.addmm(bias[:hidden], view, first[:hidden].t(), out=inner)
        if block.gated:
            nn.functional.silu(inner, inplace=True)
            up = self.space.take("up", len(rows), hidden)
            inner.mul_(torch.addmm(bias[hidden:], view, first[hidden:].t(), out=up))
        else:
            torch.ops.aten.gelu_(inner)
        add_product(rows, inner, block.fc2)
        return x


def add_product(rows: Tensor, x: Tensor, layer: nn.Linear) -> None:
    torch.addmm(rows, x, layer.weight.t(), out=rows)
    rows.add_(layer.bias)


class FusedPass:
    """The layers of one forward pass over tokens in memory, changed in place."""

    def __init__(self, blocks: Iterable[Block], cores: Tensor, patches: Tensor) -> None:
        space = Workspace(patches.dtype)
        self.blocks = [FusedBlock(block, space) for block in blocks]
        self.x, self.count = torch.cat((cores, patches), dim=1), cores.shape[1]  # B×(C+N)×D
        piece = piece_size(self.blocks[0].block, patches.dtype)
        self.group = max(1, piece // self.x.shape[1])  # small images go together
        cut = [self.count + end for _, end in pieces(patches.shape[1], piece)]
        self.bounds = list(zip([0, *cut], cut, strict=False))
        self.by_patch: dict[int, list[Rotation | None]] = {}  # of each piece's patches, by the first image of a group

    @classmethod
    def start(cls, blocks: nn.ModuleList, cores: Tensor, patches: Tensor) -> FusedPass | None:
        """None where the blocks must run by themselves."""
        if not patches.numel() or not can_fuse(blocks, patches):
            return None
        return cls(blocks, cores, patches)  # type: ignore[arg-type]

    def layer(self, index: int, by_core: Rotation | None, by_patch: Rotation | None) -> tuple[Tensor, Tensor]:
        """The cores and the patches after block `index`; `by_patch` is the same in every layer."""
        for first in range(0, len(self.x), self.group):
            images = slice(first, first + self.group)
            if first not in self.by_patch:
                spans = ((max(0, start - self.count), stop - self.count) for start, stop in self.bounds)
                own = by_patch and by_patch.of(images)
                self.by_patch[first] = [own and own.at(slice(*span)) for span in spans]
            turns = self.by_patch[first]
            if by_core is not None and turns[0] is not None:
                turns = [joined(by_core.of(images), turns[0]), *turns[1:]]
            self.blocks[index].layer(self.x[images], self.count, turns, self.bounds)
        return self.x[:, : self.count], self.x[:, self.count :]


def joined(cores: Rotation, patches: Rotation) -> Rotation:
    """Of cores (B×1×C×d/2) and then patches, which may share theirs (1×1×n×d/2)."""
    pairs = ((cores.cos, patches.cos), (cores.sin, patches.sin))
    return Rotation(*(torch.cat((a, b.expand(a.shape[0], *b.shape[1:])), dim=-2) for a, b in pairs))


def pieces(count: int, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of patches of nearly equal length, at most `most` each."""
    parts = -(-count // most)
    ends = [count * part // max(1, parts) for part in range(parts + 1)]
    yield from itertools.pairwise(ends)


def piece_size(block: Block, dtype: torch.dtype) -> int:
    """How many patches go through a layer together: all that is computed of them should fit the last cache."""
    row = (block.fc1.out_features + 6 * block.fc2.out_features) * dtype.itemsize
    return min(max(cache_size() // row, 512), 4096)


@functools.cache
def cache_size(told: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Bytes of the last cache that the first CPU sees (Linux tells); 32 MB where nobody tells."""
    sizes = []
    for path in told.glob("index*/size"):
        try:
            text = path.read_text().strip()
            sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20, "G": 2**30}[text[-1]])
        except (OSError, ValueError, KeyError, IndexError):
            continue
    return max(sizes, default=2**25)


def can_fuse(blocks: nn.ModuleList, x: Tensor) -> bool:
    """Whether the fused verbs may stand in for these blocks: no gradients, on a CPU, blocks as they were written."""
    if (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or x.device.type != "cpu"
    ):
        return False
    if type(x) is not Tensor or torch.is_autocast_enabled("cpu") or modules._has_any_global_hook():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:  # vmap: `x` stands for many
        return False
    if x.dtype != torch.float32 and not (x.dtype == torch.bfloat16 and fast_bfloat16(x.device)):
        return False
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():  # somebody watches every call
        return False
    if any(getattr(owner, name) is not written for (owner, name), written in AS_WRITTEN.items()):
        return False
    return all(_as_built(block, x.dtype) for block in blocks)


def _as_built(block: nn.Module, dtype: torch.dtype) -> bool:
    if type(block) is not Block or type(block._modules["attn"]) is not Attention or block.attn.dense:
        return False
    layers = [layer for layer in (*block.attn._modules.values(), *block._modules.values()) if layer is not block.attn]
    if len(layers) != 8 or any(type(layer) is not nn.Linear and type(layer) is not nn.LayerNorm for layer in layers):
        return False
    for layer in layers:
        for name in ("weight", "bias"):
            own = layer._parameters.get(name)  # type: ignore[union-attr]
            if type(own) is not nn.Parameter or own.dtype != dtype or own.is_meta:  # quantised, pruned, on disk, none
                return False
    return all(_untouched(module) for module in (block, block.attn, *layers))  # type: ignore[arg-type]


def _untouched(module: nn.Module) -> bool:
    """No hooks, and no method of this one object replaced."""
    return not (module._forward_hooks or module._forward_pre_hooks) and METHODS.isdisjoint(module.__dict__)
