"""The referee's question: does removing patch-to-patch attention cost accuracy when all else is equal?

    python tools/referee.py --data ../shared/data --teacher ../shared/teacher/dav2-small-encoder \
        --out runs/referee --page docs/research/referee.md

`veca_tiny` and its dense twin, both from fresh weights, distilled from one cached teacher with the same images, order,
budgets, optimiser and seeds (recipe `referee`); then three probes and the locality of their features. The same command
again continues what was stopped: runs resume, finished parts are skipped. docs/research/referee.md has the answer.
"""

from __future__ import annotations

import inspect
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import tyro
from referee_recipe import Referee

from veca.errors import InputError
from veca.files import write_json
from veca.tasks.base.options import Flag, default_cache

Arm = Literal["core", "dense"]
ARMS: tuple[Arm, ...] = ("core", "dense")
BUDGETS = (64, 8)  # of the core arm; its twin always has all 64 tokens
PHOTOS = 64  # whose features are looked at for locality


@dataclass
class Experiment:
    """Train both arms, probe them, measure the locality of their features, and write the page's table and plot.

    Example: python tools/referee.py --out runs/referee --page docs/research/referee.md
    """

    data: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("../shared/data")
    """holds photos/photos-000.tar … 006.tar (the last for validation), pets/, voc-seg/ and nyu-depth/"""
    teacher: str = "../shared/teacher/dav2-small-encoder"
    """a transformers vision model: a hub id or a folder"""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("runs/referee")
    """folder of the runs, the probes and the results"""
    page: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """also write the table into this page, and the plot into images/ beside it"""
    seeds: int = 2
    """runs of each arm"""
    quick: Flag = False
    """a few steps of tiny pictures: shows that everything works, and says nothing about the question"""
    device: str = "auto"
    """auto, cpu, cuda or mps"""
    cache: Annotated[Path, tyro.conf.arg(metavar="DIR")] = field(default_factory=default_cache)
    """folder of the probes' features"""


class Scale(NamedTuple):
    """What --quick makes smaller."""

    train: dict[str, Any]  # settings of the recipe
    size: int  # of the pictures, in training, probes and locality
    epochs: int  # of classification heads
    steps: int  # of dense heads
    heads: int  # per model and probe
    photos: int


FULL = Scale({}, 128, 100, 500, 3, PHOTOS)
QUICK = Scale(
    {"steps": 4, "warmup_steps": 1, "batch": 4, "resolutions": (32,), "standardise_images": 8, "val_every": 2,
     "val_images": 4, "views": 1, "workers": 0, "log_every": 2},
    32, 2, 2, 1, 2,
)  # fmt: skip


def run(settings: Experiment) -> dict[str, Any]:
    """Everything from the teacher's cache to the results; what is there already is not made again."""
    scale = QUICK if settings.quick else FULL
    if settings.seeds < 1:
        raise InputError("--seeds must be at least 1")
    for name in ("photos", "pets", "voc-seg", "nyu-depth"):
        if not (settings.data / name).is_dir():
            raise InputError(f"{settings.data} holds no {name}/: see `python tools/referee.py --help`")
    from referee_report import gather, write

    # Parts are skipped when they are there, so a folder must hold one experiment only.
    identity = {"teacher": settings.teacher, "data": str(settings.data), "quick": settings.quick}
    about = settings.out / "experiment.json"
    if about.is_file() and (found := json.loads(about.read_text(encoding="utf-8"))) != identity:
        raise InputError(f"{settings.out} holds another experiment ({found}): use another --out")
    write_json(about, identity)
    train_arms(settings, scale)
    probe_arms(settings, scale)
    locality_of_arms(settings, scale)
    results = gather(settings.out, settings.seeds, command_of(settings), settings.quick)
    write(results, settings.out, settings.page)
    return results


def run_folder(out: Path, arm: str, seed: int) -> Path:
    return out / f"{arm}-{seed}"


def train_arms(settings: Experiment, scale: Scale) -> None:
    """The runs, one after another: seed by seed, so that a stopped experiment has pairs."""
    from veca.distill.engine import train

    runs = [(arm, seed) for seed in range(settings.seeds) for arm in ARMS]
    left = [pair for pair in runs if not finished(run_folder(settings.out, *pair))]
    began = time.monotonic()
    for number, (arm, seed) in enumerate(left):
        spent = (time.monotonic() - began) / 60
        estimate = f", about {spent / number * (len(left) - number):.0f} min left for training" if number else ""
        say(f"run {len(runs) - len(left) + number + 1} of {len(runs)}: {arm}, seed {seed}{estimate}")
        photos = settings.data / "photos"
        recipe = Referee(
            train=(str(photos / "photos-{000..005}.tar"),), val=(str(photos / "photos-006.tar"),),
            teacher=settings.teacher, out=run_folder(settings.out, arm, seed), attention=arm, seed=seed,
            cache_teacher=settings.out / "teacher", device=settings.device, **scale.train,
        )  # fmt: skip
        train(recipe)
        if not finished(recipe.out):
            raise InputError("stopped; the same command continues")


def finished(run: Path) -> bool:
    return (run / "last" / "model.safetensors").is_file()


def probe_arms(settings: Experiment, scale: Scale) -> None:
    """Each probe of each model is a `veca probe` command of its own; the teacher and random weights are for scale."""
    from veca.probes.command import main as probe

    common = [
        *("--size", scale.size, "--cores", ",".join(map(str, BUDGETS)), "--seeds", scale.heads),
        *("--device", settings.device, "--cache", settings.cache),
    ]
    tasks: dict[str, list[Any]] = {
        "pets": ["classify", "--data", settings.data / "pets", "--epochs", scale.epochs],
        "voc-seg": ["segment", "--data", settings.data / "voc-seg", "--preset", "voc2012", "--steps", scale.steps],
        "nyu-depth": ["depth", "--data", settings.data / "nyu-depth", "--preset", "nyu", "--steps", scale.steps],
    }
    models = subjects(settings)
    left = [
        (task, name) for task in tasks for name in models
        if not probed(settings.out / "probes" / f"{task}-{name}", budgets_of(name))
    ]  # fmt: skip
    began = time.monotonic()
    for number, (task, name) in enumerate(left):
        estimate = (time.monotonic() - began) / 60 / number * (len(left) - number) if number else None
        say(f"probe {number + 1} of {len(left)}: {task}, {name}"
            + (f", about {estimate:.0f} min left" if estimate is not None else ""))  # fmt: skip
        out = settings.out / "probes" / f"{task}-{name}"
        probe([str(word) for word in (*tasks[task], *common, "--model", models[name], "--out", out)])


def subjects(settings: Experiment) -> dict[str, str]:
    """What is probed, by name."""
    pairs = [(arm, seed) for seed in range(settings.seeds) for arm in ARMS]
    arms = {f"{arm}-{seed}": str(run_folder(settings.out, arm, seed) / "last") for arm, seed in pairs}
    return {**arms, "teacher": settings.teacher, "untrained": "random:veca_tiny"}


def budgets_of(name: str) -> tuple[int | None, ...]:
    return BUDGETS if name.startswith("core") or name == "untrained" else (None,)


def probed(folder: Path, budgets: Sequence[int | None]) -> bool:
    """Whether the table is complete: `veca probe` writes it after every row."""
    path = folder / "results.json"
    return path.is_file() and len(json.loads(path.read_text(encoding="utf-8"))["rows"]) == len(budgets)


def locality_of_arms(settings: Experiment, scale: Scale) -> None:
    """How the similarity of two patches falls with their distance: one JSON per model."""
    from veca.analysis.metrics import find_examples, locality
    from veca.backbones import load_backbone
    from veca.devices import pick_device

    photos = find_examples(settings.data / "voc-seg", scale.photos)
    for name, source in subjects(settings).items():
        path = settings.out / "locality" / f"{name}.json"
        if not path.is_file():
            say(f"locality: {name}")
            backbone = load_backbone(source, pick_device(settings.device))
            budgets = budgets_of(name)
            write_json(path, {str(cores): locality(backbone, photos, scale.size, cores) for cores in budgets})


def command_of(settings: Experiment) -> str:
    """What to type to get the results again."""
    words: list[Any] = ["python", "tools/referee.py", "--data", settings.data, "--teacher",
                        settings.teacher, "--out", settings.out, "--seeds", settings.seeds]  # fmt: skip
    words += ["--page", settings.page] if settings.page else []
    return shlex.join(map(str, [*words, *(["--quick"] if settings.quick else [])]))


def say(text: str) -> None:
    print(f"== {text}", flush=True)


def main(arguments: list[str]) -> int:
    settings = tyro.cli(
        Experiment, args=arguments, prog="python tools/referee.py", description=inspect.getdoc(Experiment)
    )
    try:
        run(settings)
    except InputError as error:
        print(f"referee: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
