"""Whether weights reach the floors of veca-s14's second edition: one table, as shares of the teacher's scores.

    python tools/judge.py --model runs/second/last --quick      # one seed: minutes
    python tools/judge.py --model runs/second/last              # three seeds

Each part is a command of its own, in bfloat16; what is done for these weights is not done again (--out). The teacher's
rows of voc-seg, pets and nyu-depth are those in docs/numbers (float32, three seeds). Not in it, because they have no
floor: tools/cells.py (quality against milliseconds) and tools/stability.py. tools/judged.py lays out --data.
"""

from __future__ import annotations

import inspect
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import tyro
from steps import read_csv, write_csv

from veca import tabulate
from veca.analysis.metrics import find_examples, movement
from veca.backbones import load_backbone
from veca.files import write_json

ROOT = Path(__file__).parents[1]
BUDGETS = ("64", "8")


@dataclass
class Settings:
    """Judge weights by their floors."""

    model: str = "veca-s14"
    """the weights: a bundled name or a folder"""
    quick: tyro.conf.FlagCreatePairsOff[bool] = False
    """one seed, and fewer photographs for the share"""
    only: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """this part; may be repeated"""
    shared: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("../shared")
    """where the teacher and the shared data are"""
    data: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("../data")
    """what tools/judged.py laid out"""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("results/judge")
    """folder for what the parts leave, and judge.csv"""


class Line(NamedTuple):
    """One floor."""

    what: str
    cores: str
    value: float
    teacher: float | None
    floor: float
    lower: bool = False  # better below

    @property
    def share(self) -> float:
        return self.value if self.teacher is None else self.value / self.teacher

    def words(self) -> list[str]:
        reached = self.share <= self.floor if self.lower else self.share >= self.floor
        compared = f"{self.share:.2f} ×" if self.lower else f"{self.share:.1%}" if self.teacher else f"{self.share:.4f}"
        floor = f"{self.floor:.2f} ×" if self.lower else f"{self.floor:.0%}" if self.teacher else f"{self.floor:g}"
        teacher = "" if self.teacher is None else f"{self.teacher:.4f}"
        return [self.what, self.cores, f"{self.value:.4f}", teacher, compared, floor, "yes" if reached else "NO"]


class Part(NamedTuple):
    name: str
    command: str
    lines: Callable[[Path], Iterable[Line]]  # of what it left in {out}


def probed(step: str, what: str, metric: str, floors: tuple[float, float]) -> Callable[[Path], Iterable[Line]]:
    """Against the teacher's row of the same protocol in docs/numbers."""

    def lines(out: Path) -> Iterable[Line]:
        teacher = float(read_csv(ROOT / f"docs/numbers/{step}.csv")[0][metric])
        rows = {row["cores"]: row for row in read_csv(out / "results.csv")}
        for cores, floor in zip(BUDGETS, floors, strict=True):
            yield Line(what, cores, float(rows[cores][metric]), teacher, floor, lower=metric == "RMSE")

    return lines


def neighbours(out: Path) -> Iterable[Line]:
    rows = {row["cores"]: float(row["top1_k20"]) for row in read_csv(out / "results.csv")}
    for cores, floor in zip(BUDGETS, (0.92, 0.80), strict=True):
        yield Line("Caltech-101, nearest neighbours", cores, rows[cores], rows[""], floor)


def shares(out: Path) -> Iterable[Line]:
    for row in read_csv(out / "shares.csv"):
        photos = Path(row["photos"].removesuffix("/JPEGImages")).name
        yield Line(f"share 0.25, cosine, {photos}, {row['size']}", row["cores"], float(row["cosine"]), None, 0.985)


def moved(out: Path) -> Iterable[Line]:
    found = json.loads((out / "movement.json").read_text(encoding="utf-8"))
    yield Line("path of a core, sides of the image", "all", found["path_length"], None, 0.05)
    yield Line("… how far apart on different photographs", "all", found["parting"], None, 0.001)


PROBE = "--model {model} --cores 8,64 --seeds {seeds} --dtype bfloat16 --out {out}"
PARTS = (
    Part("movement", "", moved),
    Part(
        "caltech",
        "veca probe knn --data {data}/caltech --model {shared}/teacher/dav2-small-encoder --size 252 " + PROBE,
        neighbours,
    ),
    Part(
        "share",
        "python tools/scan_shares.py --photos {data}/davis_frames {data}/underwater/JPEGImages --images {images} "
        "--shares 0.25 --sizes 448 896 --model {model} --dtype bfloat16 --out {out}",
        shares,
    ),
    Part(
        "pets",
        "veca probe classify --data {shared}/data/pets --size 252 " + PROBE,
        probed("probe-pets", "pets, top-1", "top1", (0.94, 0.84)),
    ),
    Part(
        "nyu-depth",
        "veca probe depth --data {shared}/data/nyu-depth --preset nyu --size 336 " + PROBE,
        probed("probe-nyu", "nyu-depth, RMSE", "RMSE", (1.07, 1.25)),
    ),
    Part(
        "voc-seg",
        "veca probe segment --data {shared}/data/voc-seg --preset voc2012 --size 448 " + PROBE,
        probed("probe-voc", "voc-seg, mIoU", "mIoU", (0.95, 0.82)),
    ),
)


def main() -> int:
    settings = tyro.cli(Settings, prog="python tools/judge.py", description=inspect.getdoc(Settings))
    if unknown := set(settings.only) - {part.name for part in PARTS}:
        raise SystemExit(f"no part is called {unknown.pop()!r}; there are {', '.join(part.name for part in PARTS)}")
    weights = load_backbone(settings.model).digest[:12]
    top = settings.out / f"{Path(settings.model).name}-{weights}{'-quick' if settings.quick else ''}"
    found: list[Line] = []
    for part in PARTS:
        if settings.only and part.name not in settings.only:
            continue
        seconds = run(part, settings, top / part.name)
        if seconds is None:
            print(f"{part.name} failed", flush=True)
            continue
        print(f"{part.name}: {seconds / 60:.1f} min", flush=True)
        found += part.lines(top / part.name)
    names = ["what", "cores", "value", "teacher", "of the teacher", "floor", "reached"]
    write_csv(settings.out / "judge.csv", [dict(zip(names, line.words(), strict=True)) for line in found])
    print(tabulate.text([names, *(line.words() for line in found)]))
    return 0


def run(part: Part, settings: Settings, out: Path) -> float | None:
    """How long it took, now or before; None where it failed."""
    stamp = out / "done.json"
    if stamp.is_file():
        return float(json.loads(stamp.read_text(encoding="utf-8"))["seconds"])
    began = time.monotonic()
    if part.name == "movement":
        photos = find_examples(settings.data / "davis_frames", 20)
        write_json(out / "movement.json", movement(load_backbone(settings.model), photos, 448, None))
    else:
        filled = part.command.format(
            model=settings.model, shared=settings.shared, data=settings.data, out=out,
            seeds=1 if settings.quick else 3, images=6 if settings.quick else 20,
        )  # fmt: skip
        print(filled, flush=True)
        program, *words = shlex.split(filled)
        if subprocess.run([sys.executable, *(["-m", "veca.cli"] if program == "veca" else []), *words]).returncode:
            return None
    seconds = time.monotonic() - began
    write_json(stamp, {"seconds": seconds})
    return seconds


if __name__ == "__main__":
    sys.exit(main())
