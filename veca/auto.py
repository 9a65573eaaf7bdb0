"""A budget that chooses itself: `model(images, cores="auto", patches="auto", tolerance=0.98)`.

For a ladder of settings, `veca calibrate` has measured on photographs how near the dense features stay to the full pass
(all cores, all patches), and fitted that cosine as a falling line over one signal that costs next to nothing: how much
of an image's pixels the cells of that share lose. A line is lowered until only a quarter of the photographs lie below.
An image gets the setting with the fewest tokens whose line is still above the tolerance.

What the first layers' cores say was tried as a signal, too: it costs two layers of twelve and tells less
(rank correlation with the cosine 0.2 to 0.4, of the pixels lost 0.6 to 0.7).
"""

from __future__ import annotations

import math
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from veca.errors import InputError, check_share
from veca.files import read_json
from veca.mixed import LARGER, detail, halved, refined, tokens_of

if TYPE_CHECKING:
    from veca.model import Veca, VecaOutput

NAME = "calibration.json"  # in the model folder
AUTO = "auto"
LONGEST = 1_000_000  # bytes of such a file


class Line(NamedTuple):
    """What is known of one setting."""

    cores: int
    patches: float
    cosine: float
    """to the full pass, of an image that loses nothing"""
    slope: float
    """how much less, for every unit of pixels lost (`Busy.lost`)"""

    def at(self, lost: float) -> float:
        return self.cosine - self.slope * lost


class Calibration(NamedTuple):
    lines: tuple[Line, ...]
    size: int
    """of the photographs, pixels of the shorter side"""
    photos: int
    """how many they were"""

    def to_dict(self) -> dict[str, Any]:
        return {"size": self.size, "photos": self.photos, "settings": [line._asdict() for line in self.lines]}

    def choose(
        self, image: Tensor, patch: int, tolerance: float, cores: int | None = None, patches: float | None = None
    ) -> tuple[int, float]:  # image: 1×3×H×W
        """The cores and share of the least tokens; what is given is kept, and judged as the next smaller measured."""
        busy = Busy(image, patch)
        budgets, shares = sorted({line.cores for line in self.lines}), sorted({line.patches for line in self.lines})
        if cores is not None:
            budgets = [max([budget for budget in budgets if budget <= cores], default=budgets[0])]
        if patches is not None:
            shares = [max([share for share in shares if share <= patches], default=shares[0])]
        lines = [line for line in self.lines if line.cores in budgets and line.patches in shares]
        for line in sorted(lines, key=lambda line: (line.cores + tokens_of(busy.grid, line.patches), -line.cores)):
            if line.at(busy.lost(line.patches)) >= tolerance:
                return cores or line.cores, patches or line.patches
        return cores or budgets[-1], patches or 1.0


class Busy:
    """How much is to be seen in an image (1×3×H×W)."""

    def __init__(self, image: Tensor, patch: int) -> None:
        self.grid = (image.shape[-2] // patch, image.shape[-1] // patch)
        self.gains = detail(image, patch)
        small, large = (gain.square() for gain in self.gains)
        large = large / LARGER**2 + halved(small[:, None], 1)[:, 0]  # on the way to 2 patches, and from there to 4
        nothing = small.new_zeros(1, self.grid[0] * self.grid[1])
        self.of_cells = torch.cat((nothing, 4 * small.flatten(1), 16 * large.flatten(1)), dim=1).double()

    def lost(self, share: float) -> float:
        """The root of the mean square that the cells of this share lose of the pixels; with all patches nothing is
        lost, and it is that of the coarsest cells: how busy the image is.
        """
        cells = refined(self.gains, self.grid, share if share < 1 else 0)
        return math.sqrt(float(self.of_cells.gather(1, cells).sum()) / (self.grid[0] * self.grid[1]))


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
    choose, patch = model.calibration.choose, model.config.patch_size
    with torch.no_grad():
        each = images.float().split(1)
        if cores == AUTO:
            budget = max(choose(image, patch, tolerance, None, given)[0] for image in each)
        shares = [choose(image, patch, tolerance, budget, given)[1] for image in each]
    out: VecaOutput = model(images, cores=budget, patches=shares)
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
            whole = type(line.cores) is int and 1 <= line.cores <= bank
            numbers = all(type(value) in (int, float) and math.isfinite(value) for value in line)
            if not whole or not numbers or not 0 < line.patches <= 1 or line.slope < 0:
                raise ValueError(f"a setting of {line.cores!r:.20} cores and {line.patches!r:.20} of the patches")
        size, photos = values["size"], values["photos"]
        if not lines or type(size) is not int or type(photos) is not int:
            raise ValueError("no settings, size or number of photographs")
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} is no calibration of this model: {str(error)[:120]}") from None
    return Calibration(tuple(lines), size, photos)
