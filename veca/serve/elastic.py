"""Which budget and image size the service can afford now: pure arithmetic, no clock and no thread of its own.

The choices form a ladder. The first rung is what the operator set; each rung below costs less: first fewer cores, then,
where the operator allows it, a smaller image. The engine reports how long a request that arrives now would take at the
current rung, and the controller
- steps down at once, as far as the costs say is needed, when that is more than HIGH of the objective, and then lets
  what was decoded at the old size drain before it judges again;
- steps up a rung at a time, when one more rung would have kept it under LOW for a whole `patience`.
Between the two it stays where it is, so that it does not swing at every burst.
"""

from __future__ import annotations

from typing import NamedTuple

from veca.config import VecaConfig

HIGH, LOW = 0.8, 0.5  # shares of the objective


class Rung(NamedTuple):
    size: int  # the shorter side in pixels
    cores: int


def image_cost(config: VecaConfig, patches: int, cores: int) -> float:
    """FLOPs of one image: linear layers over all tokens, and attention's 2NC + C² comparisons (docs/mathematics.md)."""
    tokens = patches + cores
    pairs = tokens**2 if config.attention == "dense" else 2 * patches * cores + cores**2
    first = config.hidden_width * (2 if config.mlp == "swiglu" else 1)
    block = 2 * tokens * config.width * (4 * config.width + first + config.hidden_width) + 4 * pairs * config.width
    return float(config.depth * block + 6 * patches * config.patch_size**2 * config.width)


def ladder(size: int, cores: int, least_size: int, least_cores: int, patch_size: int) -> list[Rung]:
    """From what was set down to the least: cores in eighths of the budget, then sizes a fifth smaller each."""
    rungs = [Rung(size, cores)]
    for eighth in range(7, 0, -1):
        fewer = max(least_cores, cores * eighth // 8)
        if fewer < rungs[-1].cores:
            rungs.append(Rung(size, fewer))
    while rungs[-1].size > least_size:
        smaller = int(rungs[-1].size * 0.8) // patch_size * patch_size
        rungs.append(Rung(max(least_size, smaller), rungs[-1].cores))
    return rungs


class Controller:
    def __init__(self, rungs: list[Rung], costs: list[float], objective: float | None, patience: float) -> None:
        """`costs[i]` is what an image costs at `rungs[i]`; without an objective the first rung is kept forever."""
        self.rungs, self.costs = rungs, costs
        self.objective, self.patience = objective, patience
        self.index = 0
        self.calm_since: float | None = None  # since when one rung higher would have been affordable
        self.settled = float("-inf")  # from when on the last step down shows in the queue

    @property
    def rung(self) -> Rung:
        return self.rungs[self.index]

    def update(self, now: float, expected: float) -> Rung:
        """`expected`: seconds that a request arriving at `now` would take at the current rung."""
        if self.objective is None:
            return self.rung
        here = self.costs[self.index]
        if expected > HIGH * self.objective:
            self.calm_since = None
            if now < self.settled:
                return self.rung
            self.settled = now + min(expected, self.objective)
            while self.index + 1 < len(self.rungs):
                self.index += 1
                if expected * self.costs[self.index] / here <= HIGH * self.objective:
                    break
        elif self.index > 0 and expected * self.costs[self.index - 1] / here < LOW * self.objective:
            if self.calm_since is None:
                self.calm_since = now
            elif now - self.calm_since >= self.patience:
                # A long silence is many patiences at once: an idle service must not answer its next request poorly.
                self.index = max(0, self.index - int((now - self.calm_since) / self.patience))
                self.calm_since = now
        else:
            self.calm_since = None
        return self.rung
