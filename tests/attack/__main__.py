"""All rounds for as long as wanted, and one table (`make attack MINUTES=60`).

python -m attack --minutes 60                        # in tests/
python -m attack --only images --seed 123            # one case again, with what it was answered
"""

from __future__ import annotations

import platform
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from veca.cli import parse
from veca.errors import InputError

from .rounds import ROUNDS, attempt

Kind = Literal["images", "weights", "configurations", "large", "commands", "requests"]


@dataclass
class Attack:
    """Hostile input of every kind for so many minutes; the table of what was tried and what failed.

    Example:
      python -m attack --minutes 60
    """

    minutes: float = 1.0
    """shared evenly by the kinds"""
    only: tuple[Kind, ...] = tuple(ROUNDS)  # type: ignore[assignment]
    """some of the kinds"""
    seed: int | None = None
    """just this one case of each, printed"""
    first: int = 0
    """the seed to begin with; a later round tries others"""


def main() -> int:
    try:
        settings = parse(Attack, sys.argv[1:], "python -m attack")
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    rows, failures = [], []
    for kind in settings.only:
        counts, seed = {"taken": 0, "refused": 0, "failed": 0}, settings.first
        end = time.monotonic() + 60 * settings.minutes / len(settings.only)
        with tempfile.TemporaryDirectory() as folder, ROUNDS[kind](Path(folder)) as case:
            while settings.seed is not None or time.monotonic() < end:
                how, words = attempt(case, seed if settings.seed is None else settings.seed)
                counts[how] += 1
                if settings.seed is not None:
                    print(f"{kind} {settings.seed}: {how} {words}")
                    break
                if how == "failed":
                    failures.append(f"make attack ONLY={kind} SEED={seed}    # {words}")
                    print(failures[-1], file=sys.stderr, flush=True)
                seed += 1
        rows.append((kind, counts))
    print(f"{time.strftime('%Y-%m-%d')}, {settings.minutes:g} minutes, {platform.processor() or platform.machine()}\n")
    print("| kind | tried | taken | refused | failed |\n| --- | --- | --- | --- | --- |")
    for kind, counts in rows:
        print(f"| {kind} | {sum(counts.values())} | {counts['taken']} | {counts['refused']} | {counts['failed']} |")
    print("\nEach failure again:" if failures else "\nNothing failed.", *failures, sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
