"""What a trained model can grow into before it learns on: more cores, and a network that turns."""

from __future__ import annotations

from dataclasses import replace

import torch

from veca import table
from veca.cores import farther_points
from veca.errors import InputError
from veca.model import Veca


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
def wake_rotation(model: Veca, rope_zero_fraction: float) -> Veca:
    """The same weights in a network that turns, whose cores may move as in a fresh one."""
    turning = Veca(replace(model.config, rope_zero_fraction=rope_zero_fraction))
    pace = turning.bank.alpha.clone()
    turning.load_state_dict(model.state_dict())
    turning.bank.alpha.copy_(pace)
    turning.card = model.card
    return turning
