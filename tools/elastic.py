"""How near the dense features stay to the full pass, against milliseconds, for every knob: patches, size, cores, auto.

    python tools/elastic.py --photos ../data/varied/judging --sizes 448 896 --out results/elastic  # at rest

A size is the side of a square from the middle, of the photograph's shorter side; photographs that have fewer pixels
are left out, so all pixels are real. `cosine` is the mean over patches and photographs, `worst` that of the worst tenth
of the photographs, `tokens` the mean number of patches and cores, `ms` the mean over photographs of the best of
--rounds. "smaller" is the honest rival of patches: the photograph reduced to about as many tokens, its features brought
back to the grid. Rows with `reaches` are the cheapest setting of a knob, in fine steps, whose mean cosine is at least
that: what `auto` must beat. A model that was not calibrated has no rows of auto. The --teacher is only timed: its
features are another network's.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

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
TOLERANCES = (0.99, 0.985, 0.98, 0.975, 0.97, 0.95)
FINE = {  # settings of a knob, the cheapest first
    "patches": [share / 100 for share in range(20, 101)],
    "smaller": [share / 100 for share in range(20, 101)],
    "auto": [tolerance / 2000 for tolerance in range(1880, 2000)],
}
Item = TypeVar("Item")
Pass = Callable[[Tensor], tuple[Tensor, int]]  # 1×3×H×W → N×D on the whole grid, and tokens
Knob = Callable[[Tensor, float], tuple[Tensor, int]]  # the same, with a setting


class Way(NamedTuple):
    """One way to see a photograph."""

    knob: str
    setting: str
    reaches: str = ""


def knobs(model: Veca) -> dict[str, Knob]:
    bank, patch = model.config.bank, model.patch_size

    def seen(image: Tensor, cores: int, share: float) -> tuple[Tensor, int]:
        out = model(image, cores=cores, patches=share)
        return out.patches[0].float(), cores + tokens_of(out.grid, share)

    def smaller(image: Tensor, share: float) -> tuple[Tensor, int]:
        sides = [max(1, round(side // patch * share**0.5)) for side in image.shape[-2:]]
        reduced = interpolate(image.float(), [side * patch for side in sides], mode="bicubic", antialias=True)
        out = model(reduced.to(image.dtype))
        grid = (image.shape[-2] // patch, image.shape[-1] // patch)
        dense = out.patches.transpose(1, 2).unflatten(-1, out.grid).float()
        return interpolate(dense, grid, mode="bilinear").flatten(2)[0].T, bank + sides[0] * sides[1]

    def auto(image: Tensor, tolerance: float) -> tuple[Tensor, int]:
        out = model(image, cores="auto", patches="auto", tolerance=tolerance)
        assert out.chosen is not None
        cores, share = out.chosen[0]
        return out.patches[0].float(), cores + tokens_of(out.grid, share)

    found: dict[str, Knob] = {
        "patches": lambda image, share: seen(image, bank, share),
        "smaller": smaller,
        "cores": lambda image, cores: seen(image, int(cores), 1),
    }
    return found | ({"auto": auto} if model.calibration else {})


def passes(model: Veca) -> dict[Way, Pass]:
    """Every knob at some of its settings; the first is the full pass."""
    bank, turned = model.config.bank, knobs(model)
    settings = {
        "patches": PATCHES,
        "smaller": PATCHES,
        "cores": (bank // 8, bank // 4, bank // 2),
        "auto": TOLERANCES,
    }
    found: dict[Way, Pass] = {Way("full", ""): lambda image: turned["patches"](image, 1.0)}
    return found | {
        Way(knob, f"{setting:g}"): lambda image, see=see, setting=setting: see(image, setting)  # type: ignore[misc]
        for knob, see in turned.items()
        for setting in settings[knob]
    }


@torch.inference_mode()
def reaching(model: Veca, photos: list[Tensor], cosine: float) -> dict[Way, Pass]:
    """The cheapest setting of every knob that keeps this mean cosine, by bisection."""
    fulls = [model(photo).patches[0].float() for photo in photos]
    found: dict[Way, Pass] = {}
    for knob, see in knobs(model).items():
        if knob not in FINE:
            continue

        def kept(setting: float, see: Knob = see) -> float:
            pairs = zip(photos, fulls, strict=True)
            return sum(near(see(photo, setting)[0], full) for photo, full in pairs) / len(photos)

        place = bisect_left(FINE[knob], cosine, key=kept)
        if place < len(FINE[knob]):
            setting = FINE[knob][place]
            found[Way(knob, f"{setting:g}", f"{cosine:g}")] = lambda image, see=see, setting=setting: see(
                image, setting
            )  # type: ignore[misc]
    return found


def near(dense: Tensor, full: Tensor) -> float:
    return float(cosine_similarity(dense, full, dim=-1).mean())


def middle(image: Tensor) -> Tensor:  # 1×3×H×W
    side = min(image.shape[-2:])
    top, left = ((length - side) // 2 for length in image.shape[-2:])
    return image[..., top : top + side, left : left + side]


def taught(teacher: Teacher) -> Pass:
    def see(image: Tensor) -> tuple[Tensor, int]:
        grid = (image.shape[-2] // teacher.patch_size, image.shape[-1] // teacher.patch_size)
        patches = teacher(image, grid).patches[0]
        return patches, 1 + len(patches)

    return see


def spread(items: list[Item], count: int) -> list[Item]:
    """At most so many, evenly."""
    count = min(count, len(items))
    return [items[number * len(items) // count] for number in range(count)]


@torch.inference_mode()
def measure(ways: dict[Way, Pass], photos: list[Tensor], rounds: int, size: int) -> Rows:
    found: dict[Way, list[tuple[float, float, float]]] = {way: [] for way in ways}
    for photo in progress(photos, f"{size} pixels", len(photos)):
        full = ways[Way("full", "")](photo)[0]
        best = dict.fromkeys(ways, float("inf"))
        for turn in range(rounds):  # interleaved, so that a busy moment is shared by all
            for way, see in ways.items():
                started = time.perf_counter()
                dense, tokens = see(photo)
                best[way] = min(best[way], time.perf_counter() - started)
                if not turn:
                    found[way].append((near(dense, full) if way.knob != "teacher" else 0.0, tokens, 0.0))
        for way in ways:
            found[way][-1] = (*found[way][-1][:2], 1000 * best[way])
    rows = []
    for way, values in found.items():
        cosines, tokens, times = (sorted(column) for column in zip(*values, strict=True))
        worst = cosines[: max(1, len(cosines) // 10)]
        rows.append(
            {
                "size": size,
                **way._asdict(),
                "photos": len(values),
                "cosine": "" if way.knob == "teacher" else f"{sum(cosines) / len(cosines):.4f}",
                "worst": "" if way.knob == "teacher" else f"{sum(worst) / len(worst):.4f}",
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
    reach: float = 0.98,
    rounds: int = 3,
    dtype: str = "float32",
    out: Path = Path("results/elastic"),
) -> None:
    """Measure `images` photographs at each size, those that have its pixels among four times as many."""
    precision: torch.dtype = getattr(torch, dtype)
    net, rows = veca.load(model, dtype=precision), []
    opened = [open_image(entry.read()) for entry in spread(find_entries(photos), 4 * images)]
    for size in sizes:
        large = spread([photo for photo in opened if min(photo.size) >= size], images)
        if chosen := [middle(net.preprocess(photo, size)) for photo in large]:
            ways = passes(net) | reaching(net, chosen, reach)
            if teacher:
                ways[Way("teacher", "")] = taught(load_teacher(teacher, dtype=precision))
            rows += measure(ways, chosen, rounds, size)
    if not rows:
        raise SystemExit("no photograph has so many pixels")
    write_csv(out / "elastic.csv", rows)
    print(markdown([list(rows[0]), *([str(value) for value in row.values()] for row in rows)]))


if __name__ == "__main__":
    tyro.cli(main)
