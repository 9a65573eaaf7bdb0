"""What changes from step to step: the rate, the budget, the resolution and the order of the images.

Every draw is a pure function of the seed and of where we are (a step, an epoch, an image), never of a generator's
state. So a run continued anywhere, on any number of ranks and workers, draws what the uninterrupted run would have.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def learning_rate(step: int, total: int, warmup: int, base: float, minimum: float) -> float:
    """Linear from the minimum to `base` over `warmup` steps, then a cosine back to the minimum at `total`."""
    if step < warmup:
        return minimum + (base - minimum) * step / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return minimum + (base - minimum) * 0.5 * (1 + math.cos(math.pi * progress))


def random_at(seed: int, *where: object) -> random.Random:
    """A generator for one place of a run; a string seed is hashed by Python in a way that is the same everywhere."""
    return random.Random("/".join(map(str, (seed, *where))))


def choose(choices: Sequence[int], weights: Sequence[float], seed: int, *where: object) -> int:
    """One of `choices`, by weight; the same on every rank. A single choice needs no weights."""
    return choices[0] if len(choices) == 1 else random_at(seed, *where).choices(choices, weights)[0]


def epoch_order(groups: Sequence[int], seed: int, epoch: int, window: int = 16) -> NDArray[np.int64]:
    """The order of the images of one epoch: every image exactly once.

    `groups` are the sizes of the shards (a folder is one shard). Shards are shuffled, and images are shuffled within
    `window` consecutive shards, so that at any time all ranks together read from a few files only.
    """
    generator = np.random.default_rng([seed, epoch, 0x0DE5])
    starts = np.concatenate(([0], np.cumsum(groups)))
    shards = generator.permutation(len(groups))
    order = []
    for begin in range(0, len(shards), window):
        chosen = [np.arange(starts[shard], starts[shard + 1]) for shard in shards[begin : begin + window]]
        order.append(generator.permutation(np.concatenate(chosen)))
    return np.concatenate(order).astype(np.int64) if order else np.zeros(0, np.int64)
