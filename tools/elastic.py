"""How near the dense features stay to the full pass, against milliseconds, for every knob: patches, size, cores, auto.

    python tools/elastic.py --photos ../data/davis_frames --out results/elastic         # on a machine at rest
    python tools/elastic.py --photos ../data/large-0000.tar --sizes 448 896 --out results/elastic

A size is the side of a square from the middle, of the photograph's shorter side; photographs that have fewer pixels
are left out, so all pixels are real. `cosine` is the mean over patches and photographs, `worst` that of the worst tenth
of the photographs, `tokens` the mean number of patches and cores, `ms` the mean over photographs of the best of
--rounds. "smaller" is the honest rival of patches: the photograph reduced to about as many tokens, its features brought
back to the grid. A model that was not calibrated has no rows of auto. The --teacher is only timed: its features are
another network's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import tyro
from steps import Rows, write_csv
from torch import Tensor
from torch.nn.functional import cosine_similarity, interpolate

import veca
from veca.extract.sources import find_entries
from veca.images import open_image
from veca.mixed import tokens_of
from veca.model import Veca
from veca.progress import progress
from veca.tabulate import markdown
from veca.teachers import Teacher, load_teacher

PATCHES = (0.85, 0.7, 0.5, 0.35, 0.2)
Item = TypeVar("Item")
Pass = Callable[[Tensor], tuple[Tensor, int]]  # 1×3×H×W → N×D on the whole grid, and tokens


def passes(model: Veca, tolerances: tuple[float, ...]) -> dict[tuple[str, str], Pass]:
    """Every way to see a photograph, by knob and setting; the first is the full pass."""
    bank, patch = model.config.bank, model.patch_size

    def seen(image: Tensor, cores: int, share: float) -> tuple[Tensor, int]:
        out = model(image, cores=cores, patches=share)
        return out.patches[0].float(), cores + tokens_of(out.grid, share)

    def smaller(image: Tensor, share: float) -> tuple[Tensor, int]:
        sides = [max(1, round(side // patch * share**0.5)) for side in image.shape[-2:]]
        reduced = interpolate(image, [side * patch for side in sides], mode="bicubic", antialias=True)
        out = model(reduced)
        grid = (image.shape[-2] // patch, image.shape[-1] // patch)
        dense = out.patches.transpose(1, 2).unflatten(-1, out.grid).float()
        return interpolate(dense, grid, mode="bilinear").flatten(2)[0].T, bank + sides[0] * sides[1]

    def auto(image: Tensor, tolerance: float) -> tuple[Tensor, int]:
        out = model(image, cores="auto", patches="auto", tolerance=tolerance)
        assert out.chosen is not None
        cores, share = out.chosen[0]
        return out.patches[0].float(), cores + tokens_of(out.grid, share)

    found: dict[tuple[str, str], Pass] = {("full", ""): lambda image: seen(image, bank, 1)}
    for share in PATCHES:
        found["patches", f"{share:g}"] = lambda image, share=share: seen(image, bank, share)  # type: ignore[misc]
        found["smaller", f"{share:g}"] = lambda image, share=share: smaller(image, share)  # type: ignore[misc]
    for cores in (bank // 8, bank // 4, bank // 2):
        found["cores", str(cores)] = lambda image, cores=cores: seen(image, cores, 1)  # type: ignore[misc]
    for tolerance in tolerances if model.calibration else ():
        found["auto", f"{tolerance:g}"] = lambda image, tolerance=tolerance: auto(image, tolerance)  # type: ignore[misc]
    return found


def middle(image: Tensor) -> Tensor:  # 1×3×H×W
    side = min(image.shape[-2:])
    top, left = ((length - side) // 2 for length in image.shape[-2:])
    return image[..., top : top + side, left : left + side]


def taught(teacher: Teacher) -> Pass:
    def see(image: Tensor) -> tuple[Tensor, int]:
        grid = (image.shape[-2] // teacher.patch_size, image.shape[-1] // teacher.patch_size)
        return teacher(image, grid).patches[0], 1 + grid[0] * grid[1]

    return see


def spread(items: list[Item], count: int) -> list[Item]:
    """At most so many, evenly."""
    count = min(count, len(items))
    return [items[number * len(items) // count] for number in range(count)]


@torch.inference_mode()
def measure(ways: dict[tuple[str, str], Pass], photos: list[Tensor], rounds: int, size: int) -> Rows:
    found: dict[tuple[str, str], list[tuple[float, float, float]]] = {way: [] for way in ways}
    for photo in progress(photos, f"{size} pixels", len(photos)):
        full = ways["full", ""](photo)[0]
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(rounds):  # interleaved, so that a busy moment is shared by all
            for way, see in ways.items():
                started = time.perf_counter()
                see(photo)
                best[way] = min(best[way], time.perf_counter() - started)
        for way, see in ways.items():
            dense, tokens = see(photo)
            found[way].append((float(cosine_similarity(dense, full, dim=-1).mean()), tokens, 1000 * best[way]))
    rows = []
    for (knob, setting), values in found.items():
        cosines, tokens, times = (sorted(column) for column in zip(*values, strict=True))
        worst = cosines[: max(1, len(cosines) // 10)]
        rows.append(
            {
                "size": size,
                "knob": knob,
                "setting": setting,
                "photos": len(values),
                "cosine": "" if knob == "teacher" else f"{sum(cosines) / len(cosines):.4f}",
                "worst": "" if knob == "teacher" else f"{sum(worst) / len(worst):.4f}",
                "tokens": f"{sum(tokens) / len(tokens):.0f}",
                "ms": f"{sum(times) / len(times):.1f}",
            }
        )
    return rows


def main(
    photos: tuple[str, ...],
    model: str = "veca-s14",
    teacher: str = "",
    images: int = 40,
    sizes: tuple[int, ...] = (448,),
    tolerances: tuple[float, ...] = (0.99, 0.985, 0.98, 0.975, 0.97, 0.95),
    rounds: int = 3,
    out: Path = Path("results/elastic"),
) -> None:
    """Measure `images` photographs at each size, those that have its pixels among four times as many."""
    net, rows = veca.load(model), []
    ways = passes(net, tolerances)
    if teacher:
        ways["teacher", ""] = taught(load_teacher(teacher))
    opened = [open_image(entry.read()) for entry in spread(find_entries(photos), 4 * images)]
    for size in sizes:
        if chosen := spread([photo for photo in opened if min(photo.size) >= size], images):
            rows += measure(ways, [middle(net.preprocess(photo, size)) for photo in chosen], rounds, size)
    if not rows:
        raise SystemExit("no photograph has so many pixels")
    write_csv(out / "elastic.csv", rows)
    print(markdown([list(rows[0]), *([str(value) for value in row.values()] for row in rows)]))


if __name__ == "__main__":
    tyro.cli(main)
