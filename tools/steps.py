"""The steps of `make results` (tools/reproduce.py runs them): one command each, and the rows it leaves.

To add one, add a `Step` to STEPS. Its rows go to docs/numbers/NAME.csv, its command and machine to
docs/numbers/commands.csv; marks `<!-- NAME:begin -->` and `<!-- NAME:end -->` on a page of docs/ show both there.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from veca.files import write_text

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Step:
    """One command. {out} is its own folder, {docs} the folder of the pages, {results} that of all steps."""

    name: str
    command: str  # may also hold {shared}, {data} (public data), {model}, its {name}, and {teacher}
    minutes: float  # on two CPU cores
    outputs: tuple[str, ...]  # what it leaves in {out}, or {docs}/…
    quick: str = ""  # arguments that make it short; the last of two equal flags holds
    rows: Callable[[Path], Rows] | None = None  # {out} → what it measured
    shown: tuple[str, ...] = ()  # metrics that its page shows as a table, the first also as a share of the teacher's


def bench_rows(out: Path) -> Rows:
    """Of `veca bench`."""
    return kept(read_csv(out / "bench.csv"), {"gflops_closed_form", "batch"})


def probe_rows(out: Path) -> Rows:
    """Of `veca probe` and `veca finetune`."""
    return kept(read_csv(out / "results.csv"), {"source", "size"})


def sequence_rows(out: Path) -> Rows:
    """Of `veca probe video`: every sequence, and the mean."""
    return kept(read_csv(out / "sequences.csv"), set())


def read_csv(path: Path) -> Rows:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write_csv(path: Path, rows: Rows) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def kept(rows: Rows, left_out: Iterable[str]) -> Rows:
    """Without these columns, and those that are empty; numbers with six digits."""
    names = [name for name in rows[0] if name not in left_out and any(row[name] for row in rows)]
    return [{name: short(row[name]) for name in names} for row in rows]


def short(value: str) -> str:
    try:
        number = float(value)
    except ValueError:
        return value
    return value if number.is_integer() and "." not in value else f"{number:.6g}"


def huge_rows(out: Path) -> Rows:
    """Of tools/huge_image.py; cosines never rounded up."""
    found = json.loads((out / "huge.json").read_text(encoding="utf-8"))
    cosines = {name: math.floor(found[name] * 1e5) / 1e5 for name in ("cosine_float32", "cosine_float16")}
    rounded = {name: round(found[name], 2) for name in ("seconds", "peak_gb", "features_gb")}
    return [{**{name: found[name] for name in ("pixels", "patches")}, **rounded, "part": found["part"], **cosines}]


def core_rows(out: Path) -> Rows:
    """Of `veca explore --metrics`, a column a model."""
    from veca.analysis.metrics import summary

    results = json.loads((out / "metrics.json").read_text(encoding="utf-8"))
    columns = {Path(result["model"]).name: dict(summary(result)) for result in results}
    names = dict.fromkeys(name for column in columns.values() for name in column)
    return [{"measure": name, **{model: said.get(name, "") for model, said in columns.items()}} for name in names]


def rate_rows(out: Path) -> Rows:
    """Of `veca bench distill`."""
    figures: dict[str, float] = json.loads((out / "distill.json").read_text(encoding="utf-8"))
    figures.pop("noise", None)
    return [{"what": name, "images_per_second_or_ratio": round(value, 3)} for name, value in figures.items()]


def serve_rows(out: Path) -> Rows:
    """Of tools/serve_load.py: closed loops of clients, then the same overload for each service; seconds."""
    found = json.loads((out / "serve.json").read_text(encoding="utf-8"))
    loads = [("closed", service, row) for service, rows in found["closed"].items() for row in rows]
    loads += [("open", service, row) for service, row in found["open"].items()]
    names = ("clients", "rate", "requests", "answered", "refused", "failed", "per_second", "p50", "p99",
             "mean_size")  # fmt: skip
    return [{"load": load, "service": service, **{name: row.get(name, "") for name in names}}
            for load, service, row in loads]  # fmt: skip


def scan_rows(out: Path) -> Rows:
    """Of `veca bench scan`."""
    rows: Rows = json.loads((out / "scan.json").read_text(encoding="utf-8"))["rows"]
    return [{"what": row["what"], "ms": round(1000 * row["seconds"], 1), "note": row["note"]} for row in rows]


def rank_rows(out: Path) -> Rows:
    """Of `veca bench ranks`."""
    rows: Rows = json.loads((out / "ranks.json").read_text(encoding="utf-8"))["rows"]
    names = ("seconds", "cpu_seconds", "memory_mb")
    return [{name: round(row[name], 1) if name in names else row[name] for name in
             ("size", "ranks", "threads", *names, "layer_bytes")} for row in rows]  # fmt: skip


def own_rows(name: str) -> Callable[[Path], Rows]:
    """Of a tool that writes its rows as they are, as CSV or JSON."""

    def rows(out: Path) -> Rows:
        file = out / name
        found: Rows = json.loads(file.read_text(encoding="utf-8")) if file.suffix == ".json" else read_csv(file)
        return found

    return rows


def bench(name: str, flags: str, minutes: float, quick: str) -> Step:
    return Step(name, f"veca bench {flags} --out {{out}}", minutes, ("bench.csv",), f"{quick} {FAST}", bench_rows)


def ranks(name: str, flags: str, minutes: float) -> Step:
    return Step(name, f"veca bench ranks {flags} --out {{out}}", minutes, ("ranks.json",), TINY, rank_rows)


def judge(name: str, words: str, minutes: float, quick: str) -> Step:
    """A probe, or a run of fine-tuning."""
    return Step(name, f"veca {words} --out {{out}}", minutes, ("results.csv",), quick, probe_rows)


def video(name: str, words: str, minutes: float) -> Step:
    command = f"veca probe video --data {{data}}/davis --size 336 --dtype bfloat16 {words} --out {{out}}"
    return Step(name, command, minutes, ("sequences.csv",), "--size 56 --frames 3 --cores 8", sequence_rows, JF)


JF = ("J&F", "J", "F")
FAST = "--rounds 1 --seconds 1 --no-memory"
TINY = "--model veca_tiny --sizes 64"
PETS, VOC, NYU = (
    f"--data {{shared}}/data/{data}" for data in ("pets", "voc-seg --preset voc2012", "nyu-depth --preset nyu")
)
ENDS = "--model {teacher} --model {model} --cores 8,64"
HALF = "--dtype bfloat16"
BOTH = "--model {teacher} --model {model} --cores 8,16,32,64"
ELASTIC = "--model {model} --cores 8,64 --dtype bfloat16"  # what a share costs, and what a stride gives
UNTRAINED = "--model {results}/start/untrained --cores 64"  # what training had to improve on
RANDOM = "--model random:veca_small --cores 64"  # what no training at all gives
SHORT = "--size 112 --cores 8,64 --seeds 1"
EPOCHS, STEPS_5 = f"{SHORT} --epochs 5", f"{SHORT} --steps 5"
TUNED = "--layer-decay 0.8 --start-head {results}"

CELLS = "python tools/cells.py --data {data}/underwater --model {model} --teacher {teacher}"
FEWER_CELLS = "--patches 1 0.7 0.5 0.35 0.2"
FEW = "--sizes 448 --a-stretch 1"

STEPS = (
    bench("small", "--sizes 224 512 1024 2048 --cores 8 64 --seconds 40", 12, "--sizes 64 128"),
    bench("base", "--model veca_base --sizes 512 1024 --cores 64 --seconds 30", 3, f"{TINY} 128"),
    bench(
        "attention",
        "--paths attention --sizes 224 512 1024 2048 --cores 8 64 --seconds 15",
        4,
        "--sizes 64 128",
    ),
    bench(
        "ways",
        "--sizes 512 --cores 64 --rounds 15 --against products stream compile onnx int8",
        2,
        f"{TINY} --against products stream onnx int8",  # compiling takes minutes
    ),
    bench("stream", "--sizes 2048 --cores 64 --rounds 5 --against stream products", 2, TINY),
    Step("huge", "python tools/huge_image.py --out {out}", 7, ("huge.json",), "--side 1024 --part 512", huge_rows),
    Step(
        "blank",
        "python tools/blank_slide.py --model {model} --out {out}",
        15,
        ("blank.json",),
        "--side 1024",
        own_rows("blank.json"),
    ),
    Step(
        "windows",
        "python tools/windows_measured.py {shared}/data/voc-seg/val --model {model} --out {out}",
        10,
        ("windows.json",),
        "--mosaics 1 --cell 112",
        own_rows("windows.json"),
    ),
    bench(
        "training",
        "--paths training --sizes 512 1024 1536 --cores 64 --against dinov3 --rounds 1 --seconds 10",
        9,
        TINY,
    ),
    Step(
        "scan",
        "veca bench scan --rounds 4 --out {out}",
        15,
        ("scan.json",),
        "--sizes 56 --box 28 --share-sizes 56 --rounds 1",
        scan_rows,
    ),
    ranks("ranks", "--sizes 4096 8192", 6),
    ranks("ranks-training", "--training --sizes 1024 2048", 4),
    Step(
        "serve",
        "python tools/serve_load.py --model veca_small --out {out}",
        2,
        ("serve.json",),
        "--model veca_tiny --clients 1 --seconds 2 --size 64 --min-size 32",
        serve_rows,
    ),
    Step(
        "distill",
        "veca bench distill --train {shared}/data/photos/photos-000.tar --teacher {teacher} --out {out}/distill.json",
        10,
        ("distill.json",),
        "--size 32 --batch 4 --steps 2 --rounds 1",
        rate_rows,
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
    Step("start", "veca import {teacher} {out}/untrained", 0.2, ("untrained/model.safetensors",)),
    bench(
        "cost",
        "--model {model} --sizes 224 448 896 1344 2016 --cores 8 64 --seconds 30 --against dinov2",
        6,
        "--sizes 56 112",
    ),
    judge(
        "fidelity",
        "probe teacher --data {shared}/data/photos/photos-006.tar --teacher {teacher} --model {model} --images 64",
        15,
        "--size 112 --cores 8,64 --images 4",
    ),
    judge("probe-pets", f"probe classify {PETS} {BOTH} --size 252 {HALF}", 8, EPOCHS),
    judge("untrained-pets", f"probe classify {PETS} {UNTRAINED} --size 252", 4, EPOCHS),
    judge("random-pets", f"probe classify {PETS} {RANDOM} --size 252", 4, EPOCHS),
    judge("knn-pets", f"probe knn {PETS} {BOTH} --size 252 {HALF}", 3, SHORT),
    judge("probe-voc", f"probe segment {VOC} {ENDS} --size 448 {HALF}", 20, STEPS_5),
    judge("untrained-voc", f"probe segment {VOC} {UNTRAINED} --size 448", 9, STEPS_5),
    judge("random-voc", f"probe segment {VOC} {RANDOM} --size 448", 9, STEPS_5),
    *(
        judge(f"{name}-voc", f"probe segment {VOC} {ELASTIC} {flags}", minutes, "--cores 8 --seeds 1 --steps 5")
        for name, flags, minutes in (
            ("grid", "--size 224", 6),
            ("finer", "--size 224 --stride 7", 20),
            ("larger", "--size 448", 20),
            ("half", "--size 448 --share 0.5", 25),
            ("quarter", "--size 448 --share 0.25", 25),
            ("eighth", "--size 448 --share 0.125", 25),
        )
    ),
    judge("probe-nyu", f"probe depth {NYU} {ENDS} --size 336 {HALF}", 15, STEPS_5),
    judge("untrained-nyu", f"probe depth {NYU} {UNTRAINED} --size 336", 7, STEPS_5),
    judge("random-nyu", f"probe depth {NYU} {RANDOM} --size 336", 7, STEPS_5),
    judge("regression-nyu", f"probe depth {NYU} --model {{teacher}} --head regression --size 336", 6, STEPS_5),
    Step(
        "probe-detect",
        "veca probe detect --data {data}/detect --model {teacher} --model {model} --cores 64 --size 252 --dtype auto "
        "--steps 4000 --queries 50 --layers 2 --out {out}",
        24,
        ("results.csv",),
        "--size 56 --steps 2 --queries 8",
        probe_rows,
        ("mAP", "mAP50", "mAP75"),
    ),
    Step(
        "probe-masks",
        "veca probe masks --data {data}/masks/voc --model {teacher} --model {model} --cores 8,64 --size 224 "
        "--dtype auto --steps 700 --queries 32 --layers 2 --out {out}",
        8,
        ("results.csv",),
        "--size 56 --steps 2 --queries 8",
        probe_rows,
        ("PQ", "mask_mAP", "mask_mAP50"),
    ),
    video("probe-davis", BOTH, 20),
    video("random-davis", RANDOM, 3),
    video("carry-davis", "--model {model} --cores 64 --share 0.25 --carry", 6),
    judge(
        "frozen-pets",
        f"probe classify {PETS} --model {{model}} --cores 8,64 --size 112 --seeds 1",
        3,
        "--size 56 --epochs 5",
    ),
    judge(
        "finetune-pets",
        f"finetune classify {PETS} --model {{model}} --size 112 --epochs 4 --lr 2e-4 --head-lr 2e-4 "
        f"{TUNED}/frozen-pets/heads/{{name}}-112px-64cores",
        12,
        "--size 56 --epochs 1 --batch 4 --workers 1 --start-head {results}/frozen-pets/heads/{name}-56px-64cores",
    ),
    judge(
        "frozen-voc",
        f"probe segment {VOC} --model {{model}} --cores 8,64 --size 168 --seeds 1",
        5,
        "--size 112 --steps 5",
    ),
    judge(
        "finetune-voc",
        f"finetune segment {VOC} --model {{model}} --size 168 --epochs 2 --lr 2e-5 --head-lr 2e-4 "
        f"{TUNED}/frozen-voc/heads/{{name}}-168px-64cores",
        6,
        "--size 112 --epochs 1 --batch 4 --workers 1 --start-head {results}/frozen-voc/heads/{name}-112px-64cores",
    ),
    Step(
        "cores",
        "veca explore --metrics {shared}/data/voc-seg --model {model} --out {out}",
        10,
        ("metrics.json",),
        "--limit 2 --size 112",
        core_rows,
    ),
    Step(
        "judge",
        "python tools/judge.py --model {model} --shared {shared} --data {data} --out {out}",
        60,
        ("judge.csv",),
        "--quick",
        own_rows("judge.csv"),
    ),
    Step("cells", f"{CELLS} --out {{out}}", 100, ("cells.csv",), FEW, own_rows("cells.csv")),
    Step("cells-time", f"{CELLS} --time --out {{out}}", 12, ("times.csv",), f"{FEW} --rounds 1", own_rows("times.csv")),
    Step("cells-patches", f"{CELLS} {FEWER_CELLS} --out {{out}}", 60, ("cells.csv",), FEW, own_rows("cells.csv")),
    Step(
        "calibrate",
        "veca calibrate {model} --photos {data}/varied/calibrating --size 448 896 --images 36 --out {out}/model",
        20,
        ("model/calibration.json",),
        "--size 56 --images 8",
    ),
    *(  # fewer patches; the rival, smaller images of about as many; fewer cores, and the teacher
        judge(
            f"{knob}-voc-{side}",
            f"probe segment {VOC} {flags} --seeds 1 {HALF}",
            minutes,
            "--size 112 --cores 8 --steps 5",
        )
        for side, shares, sizes, cores, long in (
            (448, "1,0.7,0.5,0.35,0.2,auto", "196,266,322,378", "8,32", 1),
            (896, "1,0.7,0.5,0.2,auto", "406,532,630", "8", 3),
        )
        for knob, flags, minutes in (
            ("elastic", f"--model {{model}} --cores 64 --size {side} --patches {shares}", 12 * long),
            ("smaller", f"--model {{model}} --cores 64 --size {sizes}", 5 * long),
            ("cores", f"--model {{teacher}} --model {{model}} --cores {cores} --size {side}", 10 * long),
        )
    ),
    Step(
        "elastic",
        "python tools/elastic.py --model {model} --teacher {teacher} --photos {data}/varied/judging --sizes 448 896 "
        "--images 24 --rounds 2 --dtype bfloat16 --out {out}",
        25,
        ("elastic.csv",),
        "--sizes 112 --images 2 --rounds 1",
        own_rows("elastic.csv"),
    ),
    Step(
        "elastic-picture",
        "python tools/elastic_picture.py --images {docs}/images",
        0.2,
        ("{docs}/images/elastic.webp",),
    ),
    Step(
        "stability",
        "python tools/stability.py --data {data} --model {model} --teacher {teacher} "
        "--cells {results}/cells --out {out}",
        15,
        ("stability.csv",),
        "--sizes 224 448",
        own_rows("stability.csv"),
    ),
    Step(
        "pictures",
        "python tools/inside_pictures.py --model {model} --teacher {teacher} --images {docs}/images",
        8,
        ("{docs}/images/inside-positions.webp",),
        "--only positions",
    ),
)
