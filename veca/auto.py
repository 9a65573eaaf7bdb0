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

from veca.errors import InputError
from veca.files import read_json
from veca.mixed import LARGER, check_share, choose_cells, detail, halved

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
    """how much less, for every unit of pixels lost (`losses`)"""

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
        count = (image.shape[-2] // patch) * (image.shape[-1] // patch)
        budgets, shares = sorted({line.cores for line in self.lines}), sorted({line.patches for line in self.lines})
        if cores is not None:
            budgets = [max([budget for budget in budgets if budget <= cores], default=budgets[0])]
        if patches is not None:
            shares = [max([share for share in shares if share <= patches], default=shares[0])]
        lines = [line for line in self.lines if line.cores in budgets and line.patches in shares]
        lost: dict[float, float] = {}
        for line in sorted(lines, key=lambda line: (line.cores + round(line.patches * count), -line.cores)):
            if line.patches not in lost:
                lost[line.patches] = losses(image, patch, line.patches)
            if line.at(lost[line.patches]) >= tolerance:
                return cores or line.cores, patches or line.patches
        return cores or budgets[-1], patches or 1.0


def losses(image: Tensor, patch: int, share: float) -> float:  # 1×3×H×W
    """The root of the mean square that the cells of this share lose of the pixels; with all patches nothing is lost,
    and it is that of the coarsest cells: how busy the image is.
    """
    small, large = (gain.square() for gain in detail(image, patch))
    large = large / LARGER**2 + halved(small[:, None], 1)[:, 0]  # on the way to 2 patches, and from there to 4
    cells = choose_cells(image, patch, share if share < 1 else 1e-9)
    h, w = cells.grid
    rows = torch.cat((small.new_zeros(1, h * w), 4 * small.flatten(1), 16 * large.flatten(1)), dim=1)
    return math.sqrt(float(rows.gather(1, cells.numbers).double().sum()) / (h * w))


def run(
    model: Veca, images: Tensor, cores: int | str | None, patches: float | str | None, tolerance: float
) -> VecaOutput:
    """The pass with what is chosen for each image. A batch has one budget of cores, the largest that any of its images
    needs; images with one share of the patches go through together.
    """
    if isinstance(tolerance, bool) or not isinstance(tolerance, Real) or not 0 < tolerance <= 1:
        raise InputError(f"tolerance must be a cosine above 0 and at most 1, not {tolerance!r}")
    for name, value in (("cores", cores), ("patches", patches)):
        if isinstance(value, str) and value != AUTO:
            raise InputError(f"{name} must be a number, None or 'auto', not {value!r}")
    if model.calibration is None:
        raise InputError("this model is not calibrated, so 'auto' cannot choose: run `veca calibrate MODEL --photos …`")
    if isinstance(patches, (int, float)):
        check_share(patches)
    budget = model.check(images, None if isinstance(cores, str) else cores)
    share = None if isinstance(patches, str) else patches or 1.0
    choose, patch = model.calibration.choose, model.config.patch_size
    with torch.no_grad():
        one_by_one = images.float().split(1)
        if isinstance(cores, str):
            budget = max(choose(image, patch, tolerance, None, share)[0] for image in one_by_one)
        shares = [choose(image, patch, tolerance, budget, share)[1] for image in one_by_one]
    groups = {value: [number for number, own in enumerate(shares) if own == value] for value in sorted(set(shares))}
    outs = [model(images[numbers], cores=budget, patches=value) for value, numbers in groups.items()]
    order = torch.tensor([number for numbers in groups.values() for number in numbers], device=images.device).argsort()
    names = ("cls", "patches", "cores", "coords")
    whole = {name: torch.cat([getattr(out, name) for out in outs])[order] for name in names}
    cells = outs[0].cells if len(outs) == 1 else None
    return outs[0]._replace(**whole, cells=cells, chosen=[(budget, own) for own in shares])


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
