"""A budget that chooses itself: `model(images, cores="auto", patches="auto", tolerance=0.98)`.

For a ladder of settings, `veca calibrate` has measured on photographs how near the dense features stay to the full
pass (all cores, all patches), and fitted that cosine as a line that falls with the logarithm of a signal that costs
next to nothing: how much of an image's pixels the cells of that share lose; and rises with that of how much the
coarsest would lose, because where all is busy the same loss counts for less. A line is lowered until only a quarter of
the photographs lie below. Between two shares, and between two sizes, lies what lies between their lines. An image gets
the setting with the fewest tokens that is still expected above the tolerance.

What the first layers' cores say was tried as a signal, too: it costs two layers of twelve and tells less
(rank correlation with the cosine 0.2 to 0.4, of the pixels lost 0.6 to 0.7).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from veca.errors import InputError, check_share
from veca.files import read_json
from veca.mixed import LARGER, detail, split_order, splits_of, tokens_of

if TYPE_CHECKING:
    from veca.model import Veca, VecaOutput

NAME = "calibration.json"  # in the model folder
AUTO = "auto"
LONGEST = 1_000_000  # bytes of such a file
LITTLE = 0.005  # of the pixels lost: below it, less hardly matters
STEP = 0.005  # between shares


class Line(NamedTuple):
    """What is known of one setting."""

    size: int
    """of the photographs, pixels of the shorter side"""
    cores: int
    patches: float
    cosine: float
    """to the full pass, of an image that loses nothing"""
    slope: float
    """how much less, by the logarithm of the pixels lost (`signal`)"""
    relief: float = 0.0
    """how much more, by that of what the coarsest cells lose"""

    def at(self, lost: float, most: float) -> float:
        return min(1.0, self.cosine - self.slope * signal(lost) + self.relief * signal(most))


def signal(lost: float) -> float:
    """Of pixels lost (`Busy.lost`): 0 for nothing, then as its logarithm."""
    return math.log1p(lost / LITTLE)


class Calibration(NamedTuple):
    lines: tuple[Line, ...]
    photos: int
    """on how many photographs"""

    def to_dict(self) -> dict[str, Any]:
        return {"photos": self.photos, "settings": [line._asdict() for line in self.lines]}

    def choose(
        self, busy: Busy, image: int, tolerance: float, cores: int | None = None, patches: float | None = None
    ) -> tuple[int, float]:
        """The cores and share of the least tokens for an image, by number; what is given is kept, cores judged as the
        next smaller budget that was measured.
        """
        budgets = sorted({line.cores for line in self.lines})
        if cores is not None:
            budgets = [max([budget for budget in budgets if budget <= cores], default=budgets[0])]
        found = []
        for budget in budgets:
            share = least(self.ladder(busy, image, budget), tolerance, patches)
            if share is not None:
                found.append((budget + tokens_of(busy.grid, share), -budget, share))
        if not found:
            return cores or budgets[-1], patches or 1.0
        _, budget, share = min(found)
        return cores or -budget, share

    def ladder(self, busy: Busy, image: int, budget: int) -> list[tuple[float, float]]:
        """Every share that was measured with so many cores, and the cosine to expect of it for an image."""
        lines = [line for line in self.lines if line.cores == budget]
        most, steps = float(busy.lost(1.0)[image]), []
        for share in sorted({line.patches for line in lines}):
            lost = float(busy.lost(share)[image])
            here = sorted((math.log(line.size), line.at(lost, most)) for line in lines if line.patches == share)
            sizes, cosines = zip(*here, strict=True)
            steps.append((share, float(np.interp(math.log(busy.side), sizes, cosines))))
        return steps


def least(ladder: Sequence[tuple[float, float]], tolerance: float, given: float | None = None) -> float | None:
    """The smallest share above which all are expected to be within the tolerance, or the share `given`, if it is."""
    if given is not None:
        shares, cosines = zip(*ladder, strict=True)
        return given if np.interp(given, shares, cosines) >= tolerance else None
    above = None
    for share, cosine in reversed(ladder):
        if cosine < tolerance:
            if above is None:
                return None
            whole = share + (tolerance - cosine) / (above[1] - cosine) * (above[0] - share)
            return min(above[0], math.ceil(whole / STEP - 1e-6) * STEP)
        above = share, cosine
    return above and above[0]


class Busy:
    """How much is to be seen in images (B×3×H×W), and in which order their cells are split."""

    def __init__(self, images: Tensor, patch: int) -> None:
        self.grid = (images.shape[-2] // patch, images.shape[-1] // patch)
        self.side = patch * min(self.grid)
        gains = detail(images, patch)
        self.order = split_order(gains, self.grid)
        small, large = (gain.flatten(1).double().square() for gain in gains)
        saved = torch.cat((16 / LARGER**2 * large, 4 * small), dim=1).gather(1, self.order).cumsum(1)
        self.left = saved[:, -1:] - torch.cat((torch.zeros_like(saved[:, :1]), saved), dim=1)  # after each split

    def lost(self, share: float) -> Tensor:  # B
        """The root of the mean square that the cells of this share lose of the pixels; with all patches nothing is
        lost, and it is that of the coarsest cells: how busy the image is.
        """
        splits = splits_of(self.grid, share) if share < 1 else 0
        return (self.left[:, splits].clamp_min(0) / (self.grid[0] * self.grid[1])).sqrt()


def run(model: Veca, images: Tensor, cores: Any, patches: Any, tolerance: float) -> VecaOutput:
    """The pass with what is chosen where `cores`, `patches` or both are "auto". A batch has one budget of cores, the
    largest that any of its images needs, so that `out.cores` is one tensor; every image has its own share.
    """
    if isinstance(tolerance, bool) or not isinstance(tolerance, Real) or not 0 < tolerance <= 1:
        raise InputError(f"tolerance must be a cosine above 0 and at most 1, not {tolerance!r}")
    budget = model.check(images, None if cores == AUTO else cores)
    given = None if patches == AUTO else 1.0 if patches is None else patches
    if given is not None:
        check_share(given, "patches")
    if model.calibration is None:
        raise InputError("this model is not calibrated, so 'auto' cannot choose: run `veca calibrate MODEL --photos …`")
    choose = model.calibration.choose
    with torch.no_grad():
        busy = Busy(images.float(), model.config.patch_size)
        if cores == AUTO:
            budget = max(choose(busy, image, tolerance, None, given)[0] for image in range(len(images)))
        shares = [choose(busy, image, tolerance, budget, given)[1] for image in range(len(images))]
    out = model.forward_each(images, budget, shares, busy.order)
    return out._replace(chosen=[(budget, own) for own in shares])


def read(folder: Path, bank: int) -> Calibration | None:
    """Of a model folder; None where it has none. Whatever the file holds, it is numbers or one line."""
    path = folder / NAME
    if not path.is_file():
        return None
    if path.stat().st_size > LONGEST:
        raise InputError(f"{path} is no calibration: it is larger than {LONGEST} bytes")
    values = read_json(path)
    try:
        lines = [Line(**setting) for setting in values["settings"]]
        for line in lines:
            whole = type(line.cores) is type(line.size) is int and 1 <= line.cores <= bank and line.size >= 1
            numbers = all(type(value) in (int, float) and math.isfinite(value) for value in line)
            if not whole or not numbers or not 0 < line.patches <= 1 or min(line.slope, line.relief) < 0:
                raise ValueError(f"a setting of {line.cores!r:.20} cores and {line.patches!r:.20} of the patches")
        if not lines or type(values["photos"]) is not int:
            raise ValueError("no settings, or no number of photographs")
    except (KeyError, TypeError, ValueError) as error:
        again = "delete it, or run `veca calibrate` again"
        raise InputError(f"{path} is no calibration of this model ({str(error)[:120]}): {again}") from None
    return Calibration(tuple(lines), values["photos"])
