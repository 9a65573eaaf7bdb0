"""The steps of `make results` (docs/reproduce.py runs them): one command each, and where its table goes.

To add one, add a `Step` to STEPS; if it has a `table`, put `<!-- NAME:begin -->` and `<!-- NAME:end -->` into its page.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Step:
    """One command. {out} is its own folder, {docs} the folder of the pages, {results} that of all steps."""

    name: str
    command: str  # may also hold {shared}, {model}, its {name}, and {teacher}
    minutes: float  # on two CPU cores
    outputs: tuple[str, ...]  # what it leaves in {out}, or {docs}/…
    quick: str = ""  # arguments that make it short; the last of two equal flags holds
    page: str = ""  # the page whose section of the step's name is rewritten from {out}, where the command does not
    table: Callable[[Path], str] | None = None  # {out} → that section
    pictures: tuple[tuple[str, str, str], ...] = ()  # from {out}, into {docs}, what it shows


def probe_table(out: Path, shares: bool = True) -> str:
    """The table of `veca probe` and `veca finetune`, from results.json; `shares`: what a row keeps of the first."""
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    metrics = list(dict.fromkeys(name for row in results["rows"] for name in row["metrics"]))
    kept = shares and any(row["share_of_first"] is not None for row in results["rows"])
    heads = ["model", "cores", "pixels", *metrics, *([f"of {results['rows'][0]['model']}"] if kept else [])]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for row in results["rows"]:
        cells = [row["model"], str(row["cores"] or "–"), str(row["pixels"])]
        for name in metrics:
            score = row["metrics"].get(name)
            several = score is not None and len(score["values"]) > 1
            spread = f" ± {score['deviation']:.4f}" if several else ""
            cells.append("–" if score is None else f"{score['mean']:.4f}{spread}")
        if kept:
            cells.append("–" if row["share_of_first"] is None else f"{row['share_of_first']:.1%}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plain_table(out: Path) -> str:
    """The same where the first row is nobody's measure: floors, and before and after fine-tuning."""
    return probe_table(out, shares=False)


def huge_table(out: Path) -> str:
    """What docs/huge_image.py measured."""
    found = json.loads((out / "huge.json").read_text(encoding="utf-8"))
    lines = [
        ("patches", f"{found['patches']:,}"),
        ("time", f"{found['seconds']:.0f} s"),
        ("peak resident memory", f"{found['peak_gb']:.2f} GB"),
        ("features, a memory-mapped .npy", f"{found['features_gb']:.2f} GB"),
    ]
    lines += [
        (f"{kind} tokens beside the ordinary pass of a {found['part']}² part", f"cosine ≥ {floor(found[name]):.5f}")
        for kind, name in (("float32", "cosine_float32"), ("float16", "cosine_float16"))
    ]
    side = found["pixels"]
    return "\n".join([f"| {side}×{side} pixels | |", "| --- | --- |", *(f"| {what} | {how} |" for what, how in lines)])


def floor(cosine: float) -> float:
    """Five digits, never rounded up."""
    return math.floor(cosine * 1e5) / 1e5


def core_table(out: Path) -> str:
    """What `veca explore --metrics` says, a column a model."""
    from veca.analysis.metrics import summary

    results = json.loads((out / "metrics.json").read_text(encoding="utf-8"))
    columns = [dict(summary(result)) for result in results]
    names = list(dict.fromkeys(name for column in columns for name in column))
    lines = ["| | " + " | ".join(Path(result["model"]).name for result in results) + " |"]
    lines.append("|" + " --- |" * (1 + len(results)))
    lines += [f"| {name} | " + " | ".join(column.get(name, "–") for column in columns) + " |" for name in names]
    return "\n".join(lines)


def rate_table(out: Path) -> str:
    """The figures of `veca bench distill`."""
    figures: dict[str, float] = json.loads((out / "distill.json").read_text(encoding="utf-8"))
    lines = ["| | images/s, or ratio |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {name} | {value:.2f} |" for name, value in figures.items())])


BOTH = "--model {teacher} --model {model} --cores 8,16,32,64"
UNTRAINED = "--model {results}/start/untrained --cores 64"  # what training had to improve on
RANDOM = "--model random:veca_small --cores 64"  # what no training at all gives
SHORT = "--size 112 --cores 8,64 --seeds 1"
BENCH = "--rounds 1 --seconds 1 --no-memory"

STEPS = (
    Step(
        "small",
        "veca bench --sizes 224 512 1024 2048 --cores 8 64 --seconds 40 --out {docs}/bench/small "
        "--page {docs}/performance.md small",
        12,
        ("{docs}/bench/small/bench.json",),
        f"--sizes 64 128 {BENCH}",
    ),
    Step(
        "base",
        "veca bench --model veca_base --sizes 512 1024 --cores 64 --seconds 30 --out {docs}/bench/base "
        "--page {docs}/performance.md base",
        3,
        ("{docs}/bench/base/bench.json",),
        f"--model veca_tiny --sizes 64 128 {BENCH}",
    ),
    Step(
        "attention",
        "veca bench --paths attention --sizes 224 512 1024 2048 --cores 8 64 --seconds 15 --out {docs}/bench/attention "
        "--page {docs}/performance.md attention",
        4,
        ("{docs}/bench/attention/bench.json",),
        f"--sizes 64 128 {BENCH}",
    ),
    Step(
        "ways",
        "veca bench --sizes 512 --cores 64 --rounds 15 --against products stream compile onnx int8 "
        "--out {docs}/bench/ways --page {docs}/performance.md ways",
        2,
        ("{docs}/bench/ways/bench.json",),
        f"--model veca_tiny --sizes 64 --against products stream onnx int8 {BENCH}",  # compiling takes minutes
    ),
    Step(
        "stream",
        "veca bench --sizes 2048 --cores 64 --rounds 5 --against stream products "
        "--out {docs}/bench/stream --page {docs}/performance.md stream",
        2,
        ("{docs}/bench/stream/bench.json",),
        f"--model veca_tiny --sizes 64 {BENCH}",
    ),
    Step(
        "huge",
        "python docs/huge_image.py --out {out}",
        7,
        ("huge.json",),
        "--side 1024 --part 512",
        "performance.md",
        huge_table,
    ),
    Step(
        "training",
        "veca bench --paths training --sizes 512 1024 1536 --cores 64 --against dinov3 --rounds 1 --seconds 10 "
        "--out {docs}/bench/training --page {docs}/performance.md training",
        9,
        ("{docs}/bench/training/bench.json",),
        f"--model veca_tiny --sizes 64 {BENCH}",
    ),
    Step(
        "serve",
        "veca bench serve --model veca_small --out {docs}/bench/serve --page {docs}/performance.md",
        4,
        ("{docs}/bench/serve/serve.json",),
        "--model veca_tiny --clients 1 --seconds 2s --size 64 --min-size 32",
    ),
    Step(
        "distill",
        "veca bench distill --train {shared}/data/photos/photos-000.tar --teacher {teacher} --out {out}/distill.json",
        10,
        ("distill.json",),
        "--size 32 --batch 4 --steps 2 --rounds 1",
        "performance.md",
        rate_table,
    ),
    Step(
        "train",
        "veca distill convert --train '{shared}/data/photos/photos-{{000..005}}.tar' "
        "--val {shared}/data/photos/photos-006.tar --teacher {teacher} --cache-teacher {out}/teacher "
        "--cache-resolutions 196 --views 3 --out {out}/run",
        360,
        ("run/last/model.safetensors", "run/curves.png"),  # a run that was stopped has no last/
        "--steps 4 --batch 2 --warmup-steps 1 --late-from 1 --resolutions 56 "
        "--cache-resolutions 56 --views 1 --val-resolutions 56 --val-every 2 --val-images 2 --val-budgets 8 64 "
        "--log-every 1 --standardise-images 4",
    ),
    Step(
        "start",
        "veca import {teacher} {out}/untrained",
        0.2,
        ("untrained/model.safetensors",),
    ),
    Step(
        "cost",
        "veca bench --model {model} --sizes 224 448 896 1344 2016 --cores 8 64 --seconds 30 --against dinov2 "
        "--out {docs}/bench/s14 --page {docs}/results.md cost",
        6,
        ("{docs}/bench/s14/bench.json",),
        f"--sizes 56 112 {BENCH}",
    ),
    Step(
        "fidelity",
        "veca probe teacher --data {shared}/data/photos/photos-006.tar --teacher {teacher} --model {model} "
        "--images 64 --out {out}",
        15,
        ("results.json",),
        "--size 112 --cores 8,64 --images 4",
        "results.md",
        probe_table,
        (("fidelity.png", "images/results-fidelity.png", "Cosine to the teacher over budget"),),
    ),
    Step(
        "probe-pets",
        f"veca probe classify --data {{shared}}/data/pets {BOTH} --size 252 --out {{out}}",
        20,
        ("results.json",),
        f"{SHORT} --epochs 5",
        "results.md",
        probe_table,
        (("budget.png", "images/results-pets.png", "Score over budget"),),
    ),
    Step(
        "untrained-pets",
        f"veca probe classify --data {{shared}}/data/pets {UNTRAINED} --size 252 --out {{out}}",
        4,
        ("results.json",),
        f"{SHORT} --epochs 5",
        "results.md",
        plain_table,
    ),
    Step(
        "random-pets",
        f"veca probe classify --data {{shared}}/data/pets {RANDOM} --size 252 --out {{out}}",
        4,
        ("results.json",),
        f"{SHORT} --epochs 5",
        "results.md",
        plain_table,
    ),
    Step(
        "knn-pets",
        f"veca probe knn --data {{shared}}/data/pets {BOTH} --size 252 --out {{out}}",
        5,
        ("results.json",),
        SHORT,
        "results.md",
        probe_table,
    ),
    Step(
        "probe-voc",
        f"veca probe segment --data {{shared}}/data/voc-seg --preset voc2012 {BOTH} --size 448 --out {{out}}",
        60,
        ("results.json",),
        f"{SHORT} --steps 5",
        "results.md",
        probe_table,
        (("budget.png", "images/results-voc.png", "Score over budget"),),
    ),
    Step(
        "untrained-voc",
        f"veca probe segment --data {{shared}}/data/voc-seg --preset voc2012 {UNTRAINED} --size 448 --out {{out}}",
        9,
        ("results.json",),
        f"{SHORT} --steps 5",
        "results.md",
        plain_table,
    ),
    Step(
        "random-voc",
        f"veca probe segment --data {{shared}}/data/voc-seg --preset voc2012 {RANDOM} --size 448 --out {{out}}",
        9,
        ("results.json",),
        f"{SHORT} --steps 5",
        "results.md",
        plain_table,
    ),
    Step(
        "probe-nyu",
        f"veca probe depth --data {{shared}}/data/nyu-depth --preset nyu {BOTH} --size 336 --out {{out}}",
        45,
        ("results.json",),
        f"{SHORT} --steps 5",
        "results.md",
        probe_table,
        (("budget.png", "images/results-nyu.png", "Score over budget"),),
    ),
    Step(
        "untrained-nyu",
        f"veca probe depth --data {{shared}}/data/nyu-depth --preset nyu {UNTRAINED} --size 336 --out {{out}}",
        7,
        ("results.json",),
        f"{SHORT} --steps 5",
        "results.md",
        plain_table,
    ),
    Step(
        "random-nyu",
        f"veca probe depth --data {{shared}}/data/nyu-depth --preset nyu {RANDOM} --size 336 --out {{out}}",
        7,
        ("results.json",),
        f"{SHORT} --steps 5",
        "results.md",
        plain_table,
    ),
    Step(
        "regression-nyu",
        "veca probe depth --data {shared}/data/nyu-depth --preset nyu --model {teacher} --head regression "
        "--size 336 --out {out}",
        6,
        ("results.json",),
        f"{SHORT} --steps 5",
        "results.md",
        plain_table,
    ),
    Step(
        "frozen-pets",
        "veca probe classify --data {shared}/data/pets --model {model} --cores 8,64 --size 112 --seeds 1 --out {out}",
        3,
        ("results.json",),
        "--size 56 --epochs 5",
        "results.md",
        plain_table,
    ),
    Step(
        "finetune-pets",
        "veca finetune classify --data {shared}/data/pets --model {model} --size 112 --epochs 4 --lr 2e-4 "
        "--head-lr 2e-4 --layer-decay 0.8 --start-head {results}/frozen-pets/heads/{name}-112px-64cores --out {out}",
        12,
        ("results.json",),
        "--size 56 --epochs 1 --batch 4 --workers 1 --start-head {results}/frozen-pets/heads/{name}-56px-64cores",
        "results.md",
        plain_table,
    ),
    Step(
        "frozen-voc",
        "veca probe segment --data {shared}/data/voc-seg --preset voc2012 --model {model} --cores 8,64 --size 168 "
        "--seeds 1 --out {out}",
        5,
        ("results.json",),
        "--size 112 --steps 5",
        "results.md",
        plain_table,
    ),
    Step(
        "finetune-voc",
        "veca finetune segment --data {shared}/data/voc-seg --preset voc2012 --model {model} --size 168 --epochs 2 "
        "--lr 2e-5 --head-lr 2e-4 --layer-decay 0.8 --start-head {results}/frozen-voc/heads/{name}-168px-64cores "
        "--out {out}",
        6,
        ("results.json",),
        "--size 112 --epochs 1 --batch 4 --workers 1 --start-head {results}/frozen-voc/heads/{name}-112px-64cores",
        "results.md",
        plain_table,
    ),
    Step(
        "cores",
        "veca explore --metrics {shared}/data/voc-seg --model {model} --out {out}",
        10,
        ("metrics.json",),
        "--limit 2 --size 112",
        "results.md",
        core_table,
    ),
    Step(
        "demo",
        "veca demo --out {out}",
        0.5,
        ("features.png",),
        "--size 112",
        pictures=(("features.png", "images/demo.png", "What the model sees"),),
    ),
    Step(
        "pictures",
        "python docs/inside_pictures.py --model {model} --teacher {teacher} --images {docs}/images",
        8,
        ("{docs}/images/inside-positions.webp",),
        "--only positions",
    ),
)
