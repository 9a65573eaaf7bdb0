"""Features by overlapping windows of the size that a model was trained on, blended without seams (`--window`).

A model that has seen 448² photographs sees a picture of 4000² as one photograph: what lies in it is too small for it.
In windows everything keeps the scale that the model knows; what it loses is the image as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from veca.errors import InputError
from veca.large.picture import Picture, Strips, micrometres
from veca.large.source import Array
from veca.model import Veca
from veca.streaming import Report, dtype_of, grid_of

BATCH = 8  # windows that pass the model together


def window_pixels(given: str, picture: Picture) -> int:
    """Of "448" (pixels), or of a length: "500um", "200m"."""
    if re.fullmatch("[0-9]{1,6}", given):
        pixels = int(given)
    else:
        length = micrometres(given, "--window")
        if picture.mpp is None:
            raise InputError(
                f"{picture.name}: the file does not tell its physical scale (mpp); give --window in pixels"
            )
        pixels = round(length / picture.mpp)
    if not 1 <= pixels <= 1 << 16:
        raise InputError(f"--window is a number of pixels, or a length such as 500um or 200m, not {given!r}")
    return pixels


@torch.inference_mode()
def windowed(
    model: Veca,
    strips: Strips,
    window: int,
    cores: int | None = None,
    inside: Tensor | None = None,  # h×w
    report: Report | None = None,
) -> Iterator[tuple[int, Array]]:
    """Rows of the grid, from top to bottom, and the number of the first: h×w×D′ float32, zeros outside the mask.

    Windows overlap by half; each patch is the mean of its windows' features, weighted by how far inside it lies.
    """
    grid, patch = grid_of(model, strips), model.patch_size
    high, wide = (min(max(1, round(window / patch)), side) for side in grid)
    tops, lefts = starts(grid[0], high), starts(grid[1], wide)
    weight = (tent(high)[:, None] * tent(wide))[..., None]
    total = np.zeros((high, grid[1], model.config.feature_width), np.float32)
    weights = np.zeros((high, grid[1], 1), np.float32)
    device, dtype = model.patch_embed.proj.weight.device, dtype_of(model)
    for number, top in enumerate(tops):
        wanted = [left for left in lefts if inside is None or inside[top : top + high, left : left + wide].any()]
        if wanted:  # what lies left and right of them is not read
            end = wanted[-1] + wide
            pixels = strips.read(top * patch, (top + high) * patch, wanted[0] * patch, end * patch)[0]
        for first in range(0, len(wanted), BATCH):
            part = wanted[first : first + BATCH]
            begins = [(left - wanted[0]) * patch for left in part]
            images = torch.stack([pixels[:, :, begin : begin + wide * patch] for begin in begins])
            found = model(images.to(device, dtype), cores=cores).patches.float().cpu().unflatten(1, (high, wide))
            for left, features in zip(part, found.numpy(), strict=True):
                total[:, left : left + wide] += features * weight
                weights[:, left : left + wide] += weight
        done = (tops[number + 1] if number + 1 < len(tops) else grid[0]) - top
        rows = total[:done] / np.maximum(weights[:done], 1e-12)
        if inside is not None:
            rows[~inside[top : top + done].numpy()] = 0
        yield top, rows
        total, weights = (np.concatenate([part[done:], np.zeros_like(part[:done])]) for part in (total, weights))
        if report is not None:
            report("windows", number + 1, len(tops))


def starts(length: int, window: int) -> list[int]:
    """Where windows begin along an axis: half of one apart, the last at the end."""
    return [*range(0, length - window, max(1, window // 2)), length - window]


def tent(count: int) -> Array:
    """Weights of a window's patches along an axis: highest in the middle, above zero at the border."""
    place = np.arange(count)
    return np.asarray(np.minimum(place + 1, count - place), dtype=np.float32)
