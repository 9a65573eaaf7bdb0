"""What the service can afford to see of an image now: pure arithmetic, no clock and no thread of its own.

The levels form a ladder. First an image keeps its size and is seen with fewer, coarser patches where there is little to
see (`veca.mixed`), down to half of them; then it is made smaller, down to the least that was allowed. A level costs as
many tokens as it has. (Fewer cores would be another step, but they gained nothing: docs/results.md.) The engine reports
how long a request that arrives now would take at the present level, and the controller
- steps down at once, as far as the costs say is needed, when that is more than HIGH of the objective, and then lets
  what was decoded at the old level drain before it judges again;
- steps up a level at a time, when one more would have kept it under LOW for a whole `patience`.
Between the two it stays where it is, so that it does not swing at every burst.
"""

from __future__ import annotations

from typing import NamedTuple

from veca.mixed import tokens_of

HIGH, LOW = 0.8, 0.5  # shares of the objective
SHARES = (1.0, 0.7, 0.5)  # of the patches, before the size falls


class Level(NamedTuple):
    size: int  # shorter side in pixels
    patches: float = 1.0  # share of the grid's patches

    @property
    def cost(self) -> float:
        """Of an image of any shape, in proportion."""
        return self.size**2 * self.patches

    def tokens(self, grid: tuple[int, int]) -> int:
        """What an image with this grid costs, for all that the layers do is linear in them."""
        return tokens_of(grid, self.patches)


def ladder(size: int, least: int, patch_size: int) -> list[Level]:
    """From the dearest level to the cheapest: all patches, fewer, then sizes, each a fifth smaller than the last."""
    levels = [Level(size, share) for share in SHARES]
    while levels[-1].size > least:
        smaller = max(least, int(levels[-1].size * 0.8) // patch_size * patch_size)
        levels.append(Level(smaller, SHARES[-1]))
    return levels


class Controller:
    def __init__(self, levels: list[Level], objective: float | None, patience: float) -> None:
        """Without an objective the first level is kept forever."""
        self.levels, self.objective, self.patience = levels, objective, patience
        self.index = 0
        self.calm_since: float | None = None  # since when one level more would have been affordable
        self.settled = float("-inf")  # from when on the last step down shows in the queue

    @property
    def level(self) -> Level:
        return self.levels[self.index]

    def update(self, now: float, expected: float) -> Level:
        """`expected`: seconds that a request arriving at `now` would take at the present level."""
        if self.objective is None:
            return self.level
        if expected > HIGH * self.objective:
            self.calm_since = None
            if now < self.settled:
                return self.level
            self.settled = now + min(expected, self.objective)
            here = self.level
            while self.index + 1 < len(self.levels):
                self.index += 1
                if expected * self.level.cost / here.cost <= HIGH * self.objective:
                    break
        elif self.index > 0 and expected * self.levels[self.index - 1].cost / self.level.cost < LOW * self.objective:
            if self.calm_since is None:
                self.calm_since = now
            elif now - self.calm_since >= self.patience:
                # A long silence is many patiences at once: an idle service must not answer its next request poorly.
                self.index = max(0, self.index - int((now - self.calm_since) / self.patience))
                self.calm_since = now
        else:
            self.calm_since = None
        return self.level
