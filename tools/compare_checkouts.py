"""The forward pass of two checkouts, interleaved: one process each, asked in turn, the best of several rounds.

    git worktree add ../before HEAD~1
    .venv/bin/python tools/compare_checkouts.py ../before . --models veca-s14 veca_small --sizes 224 1024 --cores 8 64

Prints one row a case: milliseconds of both, and their ratio. They are those of one thread on its CPU, which others on
the machine hardly change.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any


def answer(checkout: str) -> None:
    """Time one pass for every line that asks for one."""
    sys.path.insert(0, checkout)
    import torch

    import veca

    torch.set_num_threads(1)
    models: dict[str, Any] = {}
    for line in sys.stdin:
        name, size, cores = json.loads(line)
        if name not in models:
            torch.manual_seed(0)
            models[name] = (veca.load(name) if "-" in name else veca.create_model(name)).eval()
        model = models[name]
        side = size // model.patch_size * model.patch_size
        images = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            began = time.process_time()
            model(images, cores=cores)
            print(time.process_time() - began, flush=True)


def ask(process: subprocess.Popen[str], case: list[Any]) -> float:
    into: IO[str] | None = process.stdin
    out: IO[str] | None = process.stdout
    assert into is not None
    assert out is not None
    into.write(json.dumps(case) + "\n")
    into.flush()
    return float(out.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs=2, type=Path, help="before and after")
    parser.add_argument("--models", nargs="+", default=["veca-s14", "veca_small"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[224, 448, 1024, 2048])
    parser.add_argument("--cores", nargs="+", type=int, default=[8, 64])
    parser.add_argument("--rounds", type=int, default=7)
    settings = parser.parse_args()
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--answer", str(checkout.resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for checkout in settings.checkouts
    ]
    print("| model | image | cores | before, ms | after, ms | after / before |\n| --- | --- | --- | --- | --- | --- |")
    for name in settings.models:
        for size in settings.sizes:
            for cores in settings.cores:
                best = [float("inf")] * 2
                for round_ in range(settings.rounds + 1):
                    for index, process in enumerate(processes):
                        seconds = ask(process, [name, size, cores])
                        if round_:  # the first is for warming up
                            best[index] = min(best[index], seconds)
                before, after = (1e3 * seconds for seconds in best)
                print(f"| {name} | {size}² | {cores} | {before:.1f} | {after:.1f} | {after / before:.2f} |", flush=True)


if __name__ == "__main__":
    answer(sys.argv[2]) if sys.argv[1:2] == ["--answer"] else main()
