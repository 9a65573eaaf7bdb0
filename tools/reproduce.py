"""`make results`: every command behind docs/results.md that fits on one machine, in order.

    python tools/reproduce.py --list              # the steps, their commands, how long each takes, what is done
    python tools/reproduce.py                     # all that is not done yet
    python tools/reproduce.py --only probe-pets   # one step (may be repeated)
    python tools/reproduce.py --quick             # a small version of each, in minutes, on copies of the pages

The steps are listed in steps.py. A finished one leaves `done.json` in its folder, with its command; it runs again when
the command changes or the file is deleted. Ctrl-C at any time: training and probes continue inside their step.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from plots import draw_all
from sections import put_section
from steps import STEPS, Rows, Step, read_csv, write_csv

from veca.bench.measure import machine
from veca.errors import InputError
from veca.files import file_digest, write_json, write_text
from veca.weights import bundled_models, find

ROOT = Path(__file__).parents[1]


@dataclass
class Settings:
    """Run the steps that are not done yet."""

    only: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """this step; may be repeated"""
    quick: tyro.conf.FlagCreatePairsOff[bool] = False
    """a small version of each, on a cut of the data and copies of the pages, in results/quick"""
    list: tyro.conf.FlagCreatePairsOff[bool] = False
    """print the steps and stop"""
    shared: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("../shared")
    """where the teacher and the data are"""
    data: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("../data")
    """where data of public repositories is, a folder each, as tools/judged.py lays them out"""
    model: str = "veca-s14"
    """the model that is judged"""
    results: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("results")
    """where the steps keep what they make"""


class Run:
    """Where things are in this run."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.quick = settings, settings.quick
        self.results = settings.results / "quick" if self.quick else settings.results
        self.docs = self.results / "docs" if self.quick else Path("docs")
        self.shared = self.results / "shared" if self.quick else settings.shared

    def prepare(self) -> None:
        if not self.quick:
            return
        for page in (*Path("docs").glob("*.md"), Path("docs/numbers/commands.csv")):
            write_text(self.docs / page.relative_to("docs"), page.read_text(encoding="utf-8"))
        if (self.settings.shared / "data").is_dir() and not self.shared.exists():
            cut(self.settings.shared, self.shared)

    def out(self, step: Step) -> Path:
        return self.results / step.name

    def fill(self, text: str, step: Step) -> str:
        return text.format(
            out=self.out(step),
            docs=self.docs,
            results=self.results,
            shared=self.shared,
            data=self.settings.data,
            model=self.settings.model,
            name=Path(self.settings.model).name,
            teacher=self.shared / "teacher/dav2-small-encoder",
        )

    def command(self, step: Step) -> list[str]:
        return shlex.split(self.fill(f"{step.command} {step.quick}" if self.quick else step.command, step))

    def missing(self, step: Step) -> str:
        """What the step needs and is not there."""
        uses_shared = "{shared}" in step.command or "{teacher}" in step.command
        if uses_shared and not (self.shared / "data").is_dir():
            return f"the data and the teacher in {self.settings.shared}"
        for word in shlex.split(step.command):
            if word.startswith("{data}") and not (place := Path(self.fill(word, step))).exists():
                return f"{place} (CONTRIBUTING.md says how to lay it out)"
        name = self.settings.model
        if "{model}" in step.command and name not in bundled_models() and not Path(name).exists():
            return f"the model {name}"
        return ""

    def outputs(self, step: Step) -> list[Path]:
        return [
            Path(self.fill(name, step)) if name.startswith("{docs}") else self.out(step) / name for name in step.outputs
        ]

    def done(self, step: Step) -> dict[str, Any] | None:
        """What a finished step left, if it was this command on these weights and everything is still there."""
        path = self.out(step) / "done.json"
        if not path.is_file() or not all(output.exists() for output in self.outputs(step)):
            return None
        left: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        same = left["command"] == shlex.join(self.command(step)) and left.get("weights") == self.weights(step)
        return left if same else None

    def weights(self, step: Step) -> str | None:
        """A digest of the weights that the step shows; new ones make it due again."""
        if "{model}" not in step.command:
            return None
        try:
            return file_digest(find(self.settings.model))
        except InputError:  # none are bundled yet
            return None


def main() -> int:
    settings = tyro.cli(Settings)
    os.chdir(ROOT)
    run = Run(settings)
    steps = chosen(settings.only)
    if settings.list:
        for step in steps:
            state = "done" if run.done(step) else f"about {step.minutes:g} min"
            print(f"{step.name} ({state})\n    {shlex.join(run.command(step))}")
        return 0
    run.prepare()
    failed, left_out = [], []
    todo = [step for step in steps if not run.done(step)]
    for step in steps:
        if step not in todo:
            print(f"{step.name}: done before", flush=True)
            continue
        if missing := run.missing(step):
            print(f"{step.name}: left out, it needs {missing}", flush=True)
            left_out.append(step.name)
            continue
        number, rest = todo.index(step), sum(item.minutes for item in todo[todo.index(step) :])
        estimate = "quick" if run.quick else f"about {step.minutes:g} min of {rest:g} left"
        print(f"\n[{number + 1}/{len(todo)}] {step.name} ({estimate})", flush=True)
        if not perform(step, run):
            failed.append(step.name)
    print(f"\n{len(steps) - len(failed) - len(left_out)} of {len(steps)} steps are done")
    for words, names in (("failed", failed), ("left out", left_out)):
        if names:
            print(f"{words}: {', '.join(names)}")
    return 1 if failed else 0


def chosen(names: tuple[str, ...]) -> list[Step]:
    """The named steps, in the order of the list; all without names."""
    known = {step.name: step for step in STEPS}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"no step is called {unknown[0]!r}; there are {', '.join(known)}")
    return [step for step in STEPS if not names or step.name in names]


def perform(step: Step, run: Run) -> bool:
    """Run the command, then put what it made where the pages show it."""
    command, began = run.command(step), time.monotonic()
    print(shlex.join(command), flush=True)
    program = {"veca": [sys.executable, "-m", "veca.cli"], "python": [sys.executable]}[command[0]]
    run.out(step).mkdir(parents=True, exist_ok=True)
    with subprocess.Popen([*program, *command[1:]]) as child:
        try:
            status = child.wait()
        except KeyboardInterrupt:  # the child has it too, and may need a moment to save
            child.wait()
            raise
    absent = [path for path in run.outputs(step) if not path.exists()]
    if status or absent:
        print(f"{step.name} failed: " + (f"status {status}" if status else f"no {absent[0]}"), flush=True)
        return False
    if step.rows is not None:
        publish(step, run)
    seconds = time.monotonic() - began
    write_json(
        run.out(step) / "done.json",
        {
            "command": shlex.join(command),
            "weights": run.weights(step),
            "minutes": round(seconds / 60, 2),
            "machine": machine(),
        },
    )
    print(f"{step.name}: {seconds / 60:.1f} min", flush=True)
    return True


def publish(step: Step, run: Run) -> None:
    """The step's rows and its command into docs/numbers, its section on its page, and the plots drawn again."""
    assert step.rows is not None
    about, numbers, rows = machine(), run.docs / "numbers", step.rows(run.out(step))
    write_csv(numbers / f"{step.name}.csv", rows)
    threads = f"{about['threads']} thread{'s' if about['threads'] > 1 else ''}"
    entry = {
        "step": step.name,
        "command": shlex.join(run.command(step)),
        "machine": f"{about['cpu']}, {threads}, torch {about['torch']}",
        "date": about["date"],
    }
    commands = numbers / "commands.csv"
    others = [row for row in read_csv(commands) if row["step"] != step.name] if commands.is_file() else []
    order = [known.name for known in STEPS]
    write_csv(commands, sorted([*others, entry], key=lambda row: order.index(row["step"])))
    for page in run.docs.glob("*.md"):
        if f"<!-- {step.name}:begin -->" in page.read_text(encoding="utf-8"):
            put_section(page, step.name, section(step, entry, rows))
    if not run.quick:  # a small version has too few rows to draw
        draw_all(numbers, run.docs / "images")


def section(step: Step, entry: dict[str, Any], rows: Rows) -> str:
    """A step on its page: its command, where and when it ran, its rows, and a table of those that it shows."""
    link = f"[Rows](numbers/{entry['step']}.csv)"
    said = f"`{entry['command']}`; {entry['machine']}, {entry['date']}. {link}."
    if not step.shown:
        return said
    means = [row for row in rows if row.get("sequence", "mean") == "mean"]
    main, teacher = step.shown[0], not means[0].get("cores")
    whole = float(means[0][main])  # 0 where a quick run has learned nothing
    lines = [["model", "cores", *step.shown, *(["of teacher"] if teacher else [])]]
    for row in means:
        scores = [f"{float(row[metric]):.3f}" for metric in step.shown]
        share = [f"{100 * float(row[main]) / whole:.1f} %" if whole else "–"] if teacher else []
        name = "teacher" if teacher and row is means[0] else row["model"]
        lines.append([name, row.get("cores") or "–", *scores, *share])
    head, *body = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join((said, "", head, "|" + "---|" * len(lines[0]), *body))


def cut(shared: Path, target: Path) -> None:
    """A little of the data, laid out alike: enough to run every step."""
    shared = shared.resolve()

    def link(name: str) -> None:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).symlink_to(shared / name)

    link("teacher")
    for shard in sorted((shared / "data/photos").glob("*.tar")):
        (target / "data/photos").mkdir(parents=True, exist_ok=True)
        with tarfile.open(shard) as whole, tarfile.open(target / "data/photos" / shard.name, "w") as few:
            for member in itertools.islice(whole, 8):
                few.addfile(member, whole.extractfile(member))
    for part, count in (("train", 4), ("test", 2)):
        for breed in sorted((shared / f"data/pets/{part}").iterdir())[:4]:
            for photo in sorted(breed.iterdir())[:count]:
                link(str(photo.relative_to(shared)))
    for folder, labels, parts in (("voc-seg", "masks", ("train", "val")), ("nyu-depth", "depth", ("train", "test"))):
        for part in parts:
            for photo in sorted((shared / f"data/{folder}/{part}/images").iterdir())[: 8 if part == "train" else 4]:
                link(str(photo.relative_to(shared)))
                link(f"data/{folder}/{part}/{labels}/{photo.stem}.png")
    for extra in sorted((shared / "data/voc-seg").glob("*.txt")):
        link(str(extra.relative_to(shared)))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from here", file=sys.stderr)
        sys.exit(130)
