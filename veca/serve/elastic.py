"""Which image size the service can afford now: pure arithmetic, no clock and no thread of its own.

The sizes form a ladder, from what the operator set down to the least that was allowed; an image costs as its square.
(Fewer cores would be another step, but they gained nothing: docs/results.md.) The engine reports how long a request
that arrives now would take at the present size, and the controller
- steps down at once, as far as the costs say is needed, when that is more than HIGH of the objective, and then lets
  what was decoded at the old size drain before it judges again;
- steps up a size at a time, when one more would have kept it under LOW for a whole `patience`.
Between the two it stays where it is, so that it does not swing at every burst.
"""

from __future__ import annotations

HIGH, LOW = 0.8, 0.5  # shares of the objective


def ladder(size: int, least: int, patch_size: int) -> list[int]:
    """Shorter sides in pixels, each a fifth smaller than the one before."""
    sizes = [size]
    while sizes[-1] > least:
        sizes.append(max(least, int(sizes[-1] * 0.8) // patch_size * patch_size))
    return sizes


class Controller:
    def __init__(self, sizes: list[int], objective: float | None, patience: float) -> None:
        """Without an objective the first size is kept forever."""
        self.sizes, self.objective, self.patience = sizes, objective, patience
        self.index = 0
        self.calm_since: float | None = None  # since when one size larger would have been affordable
        self.settled = float("-inf")  # from when on the last step down shows in the queue

    @property
    def size(self) -> int:
        return self.sizes[self.index]

    def update(self, now: float, expected: float) -> int:
        """`expected`: seconds that a request arriving at `now` would take at the present size."""
        if self.objective is None:
            return self.size
        if expected > HIGH * self.objective:
            self.calm_since = None
            if now < self.settled:
                return self.size
            self.settled = now + min(expected, self.objective)
            here = self.size
            while self.index + 1 < len(self.sizes):
                self.index += 1
                if expected * (self.size / here) ** 2 <= HIGH * self.objective:
                    break
        elif self.index > 0 and expected * (self.sizes[self.index - 1] / self.size) ** 2 < LOW * self.objective:
            if self.calm_since is None:
                self.calm_since = now
            elif now - self.calm_since >= self.patience:
                # A long silence is many patiences at once: an idle service must not answer its next request poorly.
                self.index = max(0, self.index - int((now - self.calm_since) / self.patience))
                self.calm_since = now
        else:
            self.calm_since = None
        return self.size
