"""What a trained model can grow into before it learns on: more cores, and a network that turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from veca import table
from veca.cores import farther_points
from veca.errors import InputError
from veca.model import Veca
from veca.rope import frequencies


@torch.no_grad()
def grow_bank(model: Veca, size: int) -> Veca:
    """The same model with further cores: grey patches at points as far as can be from those before them, each with
    what the nearest old core learned beyond a grey patch of its own.
    """
    if size < model.config.bank:
        raise InputError(
            f"--bank {size}: {model.config.bank} cores are there already, and a smaller budget needs no bank"
        )
    old = model.bank
    places = farther_points(old.states.tanh(), size)
    nearest = torch.cdist(places, places[: len(old.tokens)]).argmin(-1)  # of an old core: itself
    assert model.patch_embed.proj.bias is not None
    grey = model.patch_embed.proj.bias.expand(size, -1)
    if model.config.positions == "table":
        grey = grey + table.at_points(model.table, places)
    grown = Veca(replace(model.config, bank=size))
    tensors = model.state_dict()
    tensors["bank.tokens"] = torch.cat(
        (old.tokens, (grey + (old.tokens - grey[: len(old.tokens)])[nearest])[len(old.tokens) :])
    )
    tensors["bank.states"] = torch.cat((old.states, places[len(old.states) :].atanh()))
    grown.load_state_dict(tensors)
    grown.card = model.card
    return grown


@torch.no_grad()
def wake_rotation(model: Veca, rope_zero_fraction: float, images: Tensor) -> Veca:  # images: B×3×H×W
    """The same model in a network that turns, whose cores may move as in a fresh one.

    Turned as they are, queries and keys that were learned without rotation find nothing. But only their products
    matter, so each head may be written in other coordinates first (`balanced`): what carries most of the logits on
    `images` comes to lie in the channels that turn slowest or not at all, and what turns fast carried next to nothing.
    """
    turning = Veca(replace(model.config, rope_zero_fraction=rope_zero_fraction))
    pace = turning.bank.alpha.clone()
    turning.load_state_dict(model.state_dict())
    turning.bank.alpha.copy_(pace)
    turning.card = model.card
    seen: dict[nn.Module, list[Tensor]] = {}
    hooks = [
        block.get_submodule(f"attn.{name}").register_forward_hook(
            lambda part, _, out: seen.setdefault(part, []).append(out)
        )
        for block in model.blocks
        for name in ("q_proj", "k_proj")
    ]
    was = model.training
    model.eval().forward_layers(images, last_only=True)
    model.train(was)
    for hook in hooks:
        hook.remove()
    heads, d = model.config.heads, model.config.head_width
    speed = frequencies(d, rope_zero_fraction).repeat(2).repeat_interleave(2)  # of each channel
    slowest = speed.sort(stable=True).indices
    for theirs, ours in zip(model.blocks, turning.blocks, strict=True):
        old, new = (block.attn for block in (theirs, ours))
        projections = [(getattr(old, name), getattr(new, name)) for name in ("q_proj", "k_proj")]
        # Cores and patches count alike, however many there are.
        queries, keys = ([out.double().flatten(0, 1).unflatten(-1, (heads, d)) for out in seen[part]]
                         for part, _ in projections)  # fmt: skip
        for head in range(heads):
            rows = slice(head * d, (head + 1) * d)
            changes, centre = balanced([part[:, head] for part in queries], [part[:, head] for part in keys])
            for (source, target), change, shift in zip(projections, changes, (0.0, centre), strict=True):
                target.weight[rows][slowest] = (change @ source.weight[rows].double()).float()
                target.bias[rows][slowest] = (change @ (source.bias[rows].double() - shift)).float()
    return turning


def balanced(queries: Sequence[Tensor], keys: Sequence[Tensor]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Changes of coordinates of one head's queries and keys (parts of T×d each) that leave every product what it was,
    the coordinates in order of what they carry; and the mean key, which softmax does not see.

    In the new coordinates both have the same diagonal covariance, as in the balanced truncation of linear systems.
    """
    centre = torch.stack([part.mean(0) for part in keys]).mean(0)

    def root(parts: Sequence[Tensor]) -> Tensor:
        moment = torch.stack([part.T @ part / len(part) for part in parts]).mean(0)
        ridge = 1e-6 * moment.trace() / len(moment) * torch.eye(len(moment)).to(moment)
        factor: Tensor = torch.linalg.cholesky(moment + ridge)
        return factor

    of_queries, of_keys = root(queries), root([part - centre for part in keys])
    left, carried, right = torch.linalg.svd(of_queries.T @ of_keys)
    scale = carried.rsqrt()[:, None]
    return (scale * (right @ of_keys.T), scale * (left.T @ of_queries.T)), centre
