"""A block in inference, through the patches piece by piece: nothing is kept for gradients (paper, section 3.1).

Patches read only the cores, so a piece of them can pass a whole layer alone; the cores' softmax over all patches is
accumulated on the way. One pass over the tokens makes one layer, wherever the tokens lie: the ordinary forward pass on
a CPU keeps them in memory and uses pieces that fit its caches, `veca.streaming` keeps them in float16 or on disk.

It computes what `Block.forward` computes, with fewer passes over memory between the matrix products:
- a normalised token sums to zero, so the direction (1, …, 1) is free to carry the biases: norm gain and bias, bias and
  the softmax's 1/√d are folded into each weight once, and a linear layer after a norm is one product without a bias;
- the other biases are one more row of their weights, which meets a channel that is always 1;
- the neighbouring channels that turn together are one complex number, turned in place;
- products are followed at once by what changes their result in place, and residuals are summed by the products.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from veca.attention import Attention
from veca.errors import InputError
from veca.rope import Rotation

if TYPE_CHECKING:
    from veca.model import Block, Veca

PADDING = 16  # a row of memory stays a multiple of 64 bytes when a channel is added to it
PATCHES = 2048  # a piece: its widest tensors, 8 MB each for the small model, stay in a CPU's last cache


class FoldedWeights(NamedTuple):
    """A block's weights as the products take them: one row per input channel."""

    query: Tensor  # D×D, like key and value: takes the normalised token plus one
    key: Tensor
    value: Tensor
    out: Tensor  # (D+1)×D: its last row is the bias
    gate: Tensor | None  # D×hidden, with SwiGLU
    up: Tensor  # D×hidden
    down: Tensor  # (hidden+1)×D: its last row is the bias
    eps: float


class Tokens(Protocol):
    """The tokens of one image, or of a few of the same size: cores first, then patches."""

    images: int
    count: int  # C+N, of each image

    def load(self, start: int, stop: int) -> Tensor:
        """These tokens of every image, one row each (float32, contiguous): (images·(stop−start))×D."""

    def keep(self, start: int, stop: int, rows: Tensor) -> None:
        """Put the rows back that `load` gave, changed."""


class InMemory:
    """Tokens of a tensor, B×(C+N)×D, whose own memory `load` gives."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.images, self.count = x, x.shape[0], x.shape[1]

    def load(self, start: int, stop: int) -> Tensor:
        return self.x[:, start:stop].flatten(0, 1)

    def keep(self, start: int, stop: int, rows: Tensor) -> None:
        own = self.load(start, stop)
        if rows.data_ptr() != own.data_ptr():
            own.copy_(rows)


class Workspace:
    """Memory for the results of products, used again for every piece of every layer."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.held, self.views = device, dict[str, Tensor](), dict[tuple[str, tuple[int, ...]], Tensor]()

    def take(self, name: str, *shape: int, fill: float | None = None) -> Tensor:
        """Memory of this name and shape, the same every time; `fill` is what it holds when it is new."""
        known = self.views.get((name, shape))
        if known is not None:
            return known
        size = math.prod(shape)
        if name not in self.held or self.held[name].numel() < size:
            self.views = {key: view for key, view in self.views.items() if key[0] != name}
            self.held[name] = torch.empty(size, device=self.device)
            if fill is not None:
                self.held[name].fill_(fill)
        self.views[name, shape] = self.held[name][:size].view(shape)
        return self.views[name, shape]

    def take_beside_one(self, name: str, rows: int, width: int) -> Tensor:
        """rows×(width+1), whose last channel is 1 and stays so as long as only the others are written."""
        return self.take(name, rows, width + PADDING, fill=1.0)[:, : width + 1]


class CoreRead:
    """What the cores of one image have read so far: softmax(q kᵀ) v over the tokens seen, accumulated online."""

    def __init__(self, query: Tensor, space: Workspace) -> None:
        self.query, self.space = query, space  # H×C×d
        self.peak: Tensor | None = None  # H×C×1, the largest logit so far
        self.total: Tensor  # H×C×1, Σ exp(logit − peak)
        self.mixed: Tensor  # H×C×d, Σ exp(logit − peak) · value

    def weigh(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """exp(logit − peak) of these tokens, H×C×t, and their own peak."""
        heads, cores, _ = self.query.shape
        logits = self.space.take("core logits", heads, cores, key.shape[1])
        torch.bmm(self.query, key.transpose(1, 2), out=logits)
        peak = logits.amax(-1, keepdim=True)
        return logits.sub_(peak).exp_(), peak

    def add(self, weights: Tensor, peak: Tensor, value: Tensor) -> None:
        """Add the tokens that were weighed, by their values (H×t×d)."""
        total, mixed = weights.sum(-1, keepdim=True), torch.bmm(weights, value)
        if self.peak is None:
            self.peak, self.total, self.mixed = peak, total, mixed
            return
        higher = torch.maximum(self.peak, peak)
        before, now = (self.peak - higher).exp_(), (peak - higher).exp_()
        self.peak = higher
        self.total.mul_(before).addcmul_(total, now)
        self.mixed.mul_(before).addcmul_(mixed, now)

    def result(self) -> Tensor:
        return self.mixed / self.total


def pass_layer(
    weights: FoldedWeights,
    tokens: Tokens,
    cores: int,
    heads: int,
    turns: Callable[[int, int], Tensor],  # (start, stop) → (images·t)×1×d/2 complex: how those tokens turn
    space: Workspace,
    patches: int = PATCHES,
    passed: Callable[[int], None] | None = None,  # told after each piece how many tokens have passed
) -> None:
    """Take all tokens through one block, at most `patches` patches at a time (whole images where there are several).

    The first piece holds the cores: its keys and values serve every piece, and it ends the layer, when the cores have
    read all the others.
    """
    width = weights.out.shape[1]

    def project(name: str, matrix: Tensor, rows: Tensor, turn: Tensor | None = None) -> Tensor:
        """images×H×t×d, rotated where `turn` says how."""
        flat = torch.mm(rows, matrix, out=space.take(name, len(rows), width))
        if turn is not None:
            torch.view_as_complex(flat.view(len(rows), heads, -1, 2)).mul_(turn)
        return flat.view(tokens.images, -1, heads, width // heads).transpose(1, 2)

    first_rows: Tensor | None = None
    for start, stop in pieces(tokens.count, cores, patches if tokens.images == 1 else tokens.count):
        rows, turn = tokens.load(start, stop), turns(start, stop)
        normed = normalised(rows, weights.eps, space)
        mark = "first " if start == 0 else ""  # the first piece is needed until the end
        if start == 0:
            first_rows, query = rows, project("first query", weights.query, normed, turn)
            first_query, reads = query, [CoreRead(image[:, :cores], space) for image in query]
        key = project(mark + "key", weights.key, normed, turn)
        if tokens.images == 1:  # the value follows the weights, while these are in the cache
            weighed = reads[0].weigh(key[0])
            value = project(mark + "value", weights.value, normed)
            reads[0].add(*weighed, value[0])
        else:
            value = project(mark + "value", weights.value, normed)
            for read, image_key, image_value in zip(reads, key, value, strict=True):
                read.add(*read.weigh(image_key), image_value)
        if start == 0:
            core_key, core_value = key[:, :, :cores].transpose(2, 3), value[:, :, :cores]
        else:
            query = project("query", weights.query, normed, turn)
            mixed = mix(query, core_key, core_value, None, space)
            finish(weights, rows, mixed, space)
            tokens.keep(start, stop, rows)
            if passed is not None:
                passed(stop - first_query.shape[2])
    assert first_rows is not None
    mixed = mix(first_query, core_key, core_value, [read.result() for read in reads], space)
    finish(weights, first_rows, mixed, space)
    tokens.keep(0, first_query.shape[2], first_rows)
    if passed is not None:
        passed(tokens.count)


def pieces(count: int, cores: int, patches: int) -> Iterator[tuple[int, int]]:
    """Ranges of tokens of nearly equal length, at most `patches` patches each, the cores in the first."""
    total = count - cores
    parts = max(1, -(-total // patches))
    ends = [cores + total * (part + 1) // parts for part in range(parts)]
    yield from zip([0, *ends], ends, strict=False)


def normalised(rows: Tensor, eps: float, space: Workspace) -> Tensor:
    """(x − mean)/deviation + 1: what folded weights take."""
    width = rows.shape[1]
    ones = space.take("ones", width, fill=1.0)
    return torch.layer_norm(rows, (width,), ones, ones, eps)


def mix(
    query: Tensor,  # images×H×t×d
    core_key: Tensor,  # images×H×d×C
    core_value: Tensor,  # images×H×C×d
    core_reads: list[Tensor] | None,  # H×C×d for each image: what the cores read, where the tokens begin with cores
    space: Workspace,
) -> Tensor:
    """softmax(q kᵀ) v of the patches over the cores, the cores' own results before them, and 1: (images·t)×(D+1)."""
    images, heads, count, width = query.shape
    rows = space.take_beside_one("mixed", images * count, heads * width)
    mixed = rows[:, :-1].view(images, count, heads, width)
    for image in range(images):
        cores = 0
        if core_reads is not None:
            cores = core_reads[image].shape[1]
            mixed[image, :cores] = core_reads[image].transpose(0, 1)
        logits = space.take("patch logits", heads, count - cores, core_key.shape[-1])
        torch.bmm(query[image, :, cores:], core_key[image], out=logits)
        torch.softmax(logits, -1, out=logits)
        torch.bmm(logits, core_value[image], out=mixed[image, cores:].transpose(0, 1))
    return rows


def finish(weights: FoldedWeights, rows: Tensor, mixed: Tensor, space: Workspace) -> None:
    """Output projection and MLP, added to `rows` in place."""
    torch.addmm(rows, mixed, weights.out, out=rows)
    normed = normalised(rows, weights.eps, space)
    hidden = space.take_beside_one("hidden", len(rows), weights.up.shape[1])
    inner = hidden[:, :-1]
    if weights.gate is None:
        torch.ops.aten.gelu_(torch.mm(normed, weights.up, out=inner))
    else:
        nn.functional.silu(torch.mm(normed, weights.gate, out=inner), inplace=True)
        inner.mul_(torch.mm(normed, weights.up, out=space.take("up", *inner.shape)))
    torch.addmm(rows, hidden, weights.down, out=rows)


def complex_turns(by: Rotation) -> Tensor:
    """A rotation as complex numbers of length 1, …×T×1×d/2, so that one product turns a pair of channels."""
    return torch.complex(by.cos, by.sin).transpose(-3, -2)


class PieceRunner:
    """The layers of one forward pass over tokens in memory, B×(C+N)×D, changed in place."""

    def __init__(self, x: Tensor, cores: int, heads: int, by_patch: Rotation) -> None:
        self.cores, self.heads, self.space = cores, heads, Workspace(x.device)
        group = max(1, PATCHES // x.shape[1])  # small images go together
        self.groups = [InMemory(images) for images in x.split(group)]
        patch_turns = complex_turns(by_patch)  # 1×N×1×d/2
        self.turns = patch_turns.new_empty(x.shape[0], x.shape[1], 1, patch_turns.shape[-1])
        self.turns[:, cores:] = patch_turns

    def layer(self, block: Block, by_core: Rotation) -> None:
        weights = folded(block)
        self.turns[:, : self.cores] = complex_turns(by_core)
        for tokens, turns in zip(self.groups, self.turns.split(self.groups[0].images), strict=True):
            pass_layer(
                weights,
                tokens,
                self.cores,
                self.heads,
                lambda start, stop, turns=turns: turns[:, start:stop].flatten(0, 1),  # type: ignore[misc]
                self.space,
            )


def can_run(model: Veca, x: Tensor) -> bool:
    """Whether pieces may stand in for the blocks: no gradients, float32 on a CPU, blocks as they were built.

    Hooks, adapters and anything else that replaced a layer see the ordinary forward pass.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or x.device.type != "cpu" or x.dtype != torch.float32:
        return False
    if torch.is_autocast_enabled("cpu") or not x.numel():
        return False
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]  # folding would become part of the trace
        return False
    if next(model.blocks[0].parameters()).dtype != torch.float32:
        return False
    return all(_as_built(block) for block in model.blocks)


def refuse_changed(model: Veca) -> None:
    """Streaming has no other path to fall back to: it must not ignore what a user added to the blocks."""
    if model.config.attention == "dense":
        raise InputError("the dense control arm cannot be streamed: there every patch reads every other")
    if not all(_as_built(block) for block in model.blocks):
        raise InputError("this model's blocks have hooks or replaced layers; remove or merge them before streaming")


def _layers(block: nn.Module) -> list[nn.Module]:
    """The linear layers and norms of a block; this runs at every call, and `children` is slow."""
    attention = block._modules["attn"]
    assert attention is not None
    both = (*attention._modules.values(), *block._modules.values())
    return [layer for layer in both if layer is not None and layer is not attention]


def _as_built(block: nn.Module) -> bool:
    attention = block._modules["attn"]
    if type(attention) is not Attention or attention.dense:
        return False
    layers = _layers(block)
    if not all(type(layer) is nn.Linear or type(layer) is nn.LayerNorm for layer in layers):
        return False
    if not all(type(layer._parameters.get("weight")) is nn.Parameter for layer in layers):  # quantised or pruned
        return False
    return not any(layer._forward_hooks or layer._forward_pre_hooks for layer in (block, attention, *layers))


_folded: weakref.WeakKeyDictionary[Block, tuple[object, Tensor, FoldedWeights]] = weakref.WeakKeyDictionary()


def folded(block: Block) -> FoldedWeights:
    """The block's folded weights, made anew when its parameters have changed.

    Versions tell of every change PyTorch records. Changes through `.data` it does not record: the first row and the
    first column of each parameter are compared as well.
    """
    tensors = [tensor for layer in _layers(block) for tensor in layer._parameters.values() if tensor is not None]
    stamp = [(tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in tensors]
    rows = torch.cat(
        [part for tensor in tensors for part in ((tensor[0], tensor[:, 0]) if tensor.ndim > 1 else (tensor,))]
    )
    known = _folded.get(block)
    if known is not None and known[0] == stamp and torch.equal(known[1], rows):
        return known[2]
    attention, norm = block.attn, block.norm_attn
    with torch.inference_mode(False), torch.no_grad():
        into = fold(block.fc1, block.norm_mlp)
        gate, up = into.chunk(2, dim=1) if block.gated else (None, into)
        weights = FoldedWeights(
            query=fold(attention.q_proj, norm, (attention.q_proj.out_features // attention.heads) ** -0.5),
            key=fold(attention.k_proj, norm),
            value=fold(attention.v_proj, norm),
            out=with_bias(attention.out_proj),
            gate=gate,
            up=up,
            down=with_bias(block.fc2),
            eps=norm.eps,
        )
    _folded[block] = (stamp, rows.clone(), weights)
    return weights


def fold(linear: nn.Linear, norm: nn.LayerNorm, scale: float = 1.0) -> Tensor:
    """The D×out matrix M for which (n + 1) M = scale · linear(norm(x)), where n is x normalised, so that n·1 = 0."""
    weight, bias = linear.weight.cpu().double(), linear.bias.cpu().double()
    gain, shift = norm.weight.cpu().double(), norm.bias.cpu().double()
    gained = weight * gain
    rest = weight @ shift + bias - gained.sum(1)  # what the all-ones direction still has to carry
    return ((gained + rest[:, None] / weight.shape[1]) * scale).float().to(linear.weight.device).t()


def with_bias(linear: nn.Linear) -> Tensor:
    """The weight and, as its last row, the bias: (in+1)×out."""
    both = torch.zeros(linear.out_features, linear.in_features + PADDING, device=linear.weight.device)
    both[:, : linear.in_features], both[:, linear.in_features] = linear.weight, linear.bias
    return both[:, : linear.in_features + 1].t()
