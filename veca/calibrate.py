"""`veca calibrate`: how near each setting of cores and patches stays to the full pass, for `veca.auto` to choose by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import tyro
from torch import Tensor

from veca.auto import NAME, Busy, Calibration, Line, signal
from veca.cli import parse
from veca.devices import Dtype, pick_dtype
from veca.errors import InputError
from veca.extract.sources import find_entries
from veca.files import refuse_file, write_json
from veca.images import SIZE
from veca.model import Veca
from veca.progress import progress
from veca.weights import bundled_models, load

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.35, 0.2)
SAFETY = 0.25  # of the photographs lie below the line
FEWEST = 8  # photographs


@dataclass
class Calibrate:
    """Measure on unlabelled photographs how near cheaper settings of a model stay to its full pass.

    Afterwards model(images, cores="auto", patches="auto", tolerance=0.98) chooses for each image. The photographs
    should be like those that will come, with real pixels at these sizes. Takes about 20 passes a photograph and size;
    the same photographs give the same file.

    Examples:
      veca calibrate models/mine --photos photos/
      veca calibrate veca-s14 --photos photos/ more.tar --size 448 896 --out models/calibrated
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """a model folder, which then holds calibration.json; with --out anything veca.load takes"""
    photos: Annotated[tuple[str, ...], tyro.conf.arg(metavar="PHOTOS")]
    """images, folders of them, lists, tar shards"""
    size: tuple[int, ...] = (SIZE,)
    """shorter side in pixels; of several, what lies between them is expected of sizes between them"""
    images: int = 48
    """photographs to measure, evenly spread over what is there"""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """write a copy of the model with its calibration there"""
    dtype: Dtype = "auto"
    """to compute in; auto: bfloat16 where the CPU computes in it, which is quicker"""


def budgets(bank: int) -> list[int]:
    """The whole bank, and halves of it down to an eighth."""
    return sorted({max(1, bank >> halvings) for halvings in range(4)}, reverse=True)


@torch.inference_mode()
def calibrate(model: Veca, photos: Iterable[Tensor], size: int) -> list[Line]:  # photos: 1×3×H×W each, float32
    patch, bank = model.config.patch_size, model.config.bank
    settings = [(cores, share) for cores in budgets(bank) for share in SHARES if (cores, share) != (bank, 1.0)]
    found: list[list[float]] = []  # a photo: its cosines, by settings
    lost: list[dict[float, float]] = []  # a photo: its losses, by share
    for photo in photos:
        busy = Busy(photo, patch)
        photo = photo.to(model.patch_embed.proj.weight.dtype)
        full = model(photo, cores=bank).patches[0].float()
        lost.append({share: float(busy.lost(share)) for share in SHARES})
        outs = (model(photo, cores=cores, patches=share).patches[0].float() for cores, share in settings)
        found.append([float(torch.cosine_similarity(out, full, dim=-1).mean()) for out in outs])
    lines = [Line(size, bank, 1.0, 1.0, 0.0)]
    for (cores, share), cosines in zip(settings, zip(*found, strict=True), strict=True):
        lines.append(Line(size, cores, share, *fit([own[share] for own in lost], [own[1.0] for own in lost], cosines)))
    return lines


def fit(lost: Sequence[float], most: Sequence[float], cosines: Sequence[float]) -> tuple[float, float, float]:
    """Cosine at no loss, slope and relief by least squares, lowered until only SAFETY lie below.

    What has the wrong sign, or cannot be told from so few photographs, is left out.
    """
    y = np.asarray(cosines, np.float64)
    falls, rises = (np.asarray([signal(own) for own in values]) for values in (lost, most))
    slope = relief = 0.0
    for columns in ([-falls, rises], [-falls]) if len(y) >= 2 * FEWEST else ([-falls],):
        centred = np.stack([column - column.mean() for column in columns], axis=1)
        found, _, rank, _ = np.linalg.lstsq(centred, y - y.mean(), rcond=None)
        if rank == len(columns) and found.min() >= 0:
            slope, relief = float(found[0]), float(found[1]) if len(columns) > 1 else 0.0
            break
    level = float(np.quantile(y + slope * falls - relief * rises, SAFETY))
    return round(level, 6), round(slope, 6), round(relief, 6)


def main(arguments: list[str]) -> None:
    settings = parse(Calibrate, arguments, "veca calibrate")
    folder = Path(settings.model).expanduser()
    if settings.out is not None:
        refuse_file(settings.out)
    elif settings.model in bundled_models() or not folder.is_dir():
        raise InputError(f"{settings.model} is no model folder to write to: name one for a copy with --out")
    for name, given, least in (("size", min(settings.size, default=0), 1), ("images", settings.images, FEWEST)):
        if given < least:
            raise InputError(f"--{name} must be at least {least}, not {given}")
    entries = find_entries(settings.photos)
    if len(entries) < FEWEST:
        raise InputError(f"{len(entries)} photographs are too few to calibrate with: at least {FEWEST}")
    count = min(settings.images, len(entries))
    chosen = [entries[number * len(entries) // count] for number in range(count)]
    model = load(settings.model)
    judged = load(settings.model, dtype=pick_dtype(settings.dtype, torch.device("cpu")))
    lines: list[Line] = []
    for size in settings.size:
        shown = progress(chosen, f"photographs at {size} pixels", count)
        lines += calibrate(judged, (model.preprocess(entry.read(), size) for entry in shown), size)
    model.calibration = Calibration(tuple(lines), count)
    if settings.out is not None:
        model.save(settings.out)
    else:
        write_json(folder / NAME, model.calibration.to_dict())
    print(f"{(settings.out or folder) / NAME}: {len(model.calibration.lines)} settings on {count} photographs")
