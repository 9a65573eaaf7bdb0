"""`veca bench`: FLOPs, latency, memory and share of the matrix-product rate, next to DINOv3 and the dense arm."""

from __future__ import annotations

import importlib
import shlex
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console

from veca.bench.arms import Arm, attention_path, network, training_step
from veca.bench.flops import PREFIX, attention_layer_flops, closed_form_flops, dino_flops, veca_flops
from veca.bench.measure import interleaved, load_before, machine, noise, peak_memory, spread
from veca.bench.report import show, slope, write
from veca.cli import parse
from veca.config import MODELS, VecaConfig, model_config
from veca.devices import Dtype, pick_device, pick_dtype
from veca.errors import InputError, check_share
from veca.mixed import tokens_of
from veca.paper import attention_costs
from veca.weights import load

Against = Literal["dinov2", "dinov3", "dense", "products", "stream", "compile", "onnx", "int8", "paper"]
WAYS = ("stream", "compile", "onnx", "int8")  # other ways to run the same network
PATHS = {"whole": "end to end", "attention": "attention alone", "training": "training"}
OTHERS = {"distill": "veca.bench.distill", "ranks": "veca.bench.ranks", "scan": "veca.bench.scan"}


@dataclass
class Bench:
    """Measure what a size costs: FLOPs (PyTorch's counter, checked against the closed form), latency, memory.

    The contenders are interleaved, and the best and the median of several rounds are reported. "of products" is the
    time that the forward pass's matrix products alone take in the same run, divided by the time of the whole pass.
    "peak MB" is what a pass needs beyond weights and image. "spread" is how much longer than the best round half of the
    rounds took: where it is large, or the machine is busy, the last line says that the times are noisy.

    Examples:
      veca bench                                        veca_small, 8 and 64 cores, 224² to 1024²
      veca bench --model veca_base --sizes 512 1024 --cores 64 --out bench/base
      veca bench --paths attention --sizes 512 1024 2048 --against dinov3 paper
      veca bench --sizes 512 --cores 64 --against stream compile onnx int8
      veca bench --model veca-s14 --sizes 448 896 --cores 64 --patches 1 0.5
      veca bench --model veca-s14 --sizes 224 448 896 --against dinov2
      veca bench --paths training --sizes 512 1024 1536 --cores 64 --against dinov3
      veca bench scan --help                            scan once, look anywhere later
      veca bench distill --help                         images/s of training
      veca bench ranks --help                           one image over several ranks
    """

    model: str = "veca_small"
    """a size (veca_tiny … veca_large), or any model that veca.load takes: its own geometry, random weights"""
    sizes: tuple[int, ...] = (224, 512, 1024)
    """sides of the square images, multiples of the patch size"""
    cores: tuple[int, ...] = (8, 64)
    """budgets"""
    patches: tuple[float, ...] = (1.0,)
    """shares of the patches that are spent, end to end: squares of several sizes (veca, and its FLOPs)"""
    batches: tuple[int, ...] = (1,)
    """images in a batch"""
    against: tuple[Against, ...] = ("dinov3", "dense", "products")
    """what to show beside it: other networks, its matrix products, the network by another way, the paper's table"""
    paths: tuple[Literal["whole", "attention", "training"], ...] = ("whole",)
    """whole: end to end; attention: from queries, keys and values to mixed values; training: forward and backward"""
    rounds: int = 7
    """measurements of each contender, beside one to warm up"""
    seconds: float = 60.0
    """a contender that is slow gets fewer rounds: about this long, but two at least"""
    memory: bool = True
    """measure peak memory too (on a CPU, each in a process of its own)"""
    threads: int = 0
    """CPU threads; 0: as many as PyTorch takes"""
    dtype: Dtype = "float32"
    """precision of the networks; auto: bfloat16 where the device computes in it. ONNX files keep their own"""
    device: str = "cpu"
    """cpu, cuda, mps"""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("bench")
    """folder for bench.json, bench.csv, bench.md and bench.png"""


def main(arguments: list[str]) -> None:
    if arguments and arguments[0] in OTHERS:
        importlib.import_module(OTHERS[arguments[0]]).main(arguments[1:])
        return
    settings = parse(Bench, arguments, "veca bench")
    config = find_config(settings.model)
    check(settings, config)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width that a table must keep to
        console = Console(width=140)
    results = measure(settings, config, console)
    results["command"] = shlex.join(["veca", "bench", *arguments])
    paths = write(results, settings.out)
    show(results, console)
    console.print(f"{settings.out}: {', '.join(path.name for path in paths)}", highlight=False)


def find_config(name: str) -> VecaConfig:
    if name in MODELS:
        return model_config(name)
    try:
        return load(name).config
    except InputError as error:
        raise InputError(f"--model is a size ({', '.join(MODELS)}) or a trained model: {error}") from error


def check(settings: Bench, config: VecaConfig) -> None:
    for size in settings.sizes:
        if size < config.patch_size or size % config.patch_size:
            raise InputError(f"--sizes {size}: not a multiple of the patch size {config.patch_size}")
    for cores in settings.cores:
        if not 1 <= cores <= config.bank:
            raise InputError(f"--cores {cores}: budgets lie between 1 and {config.bank}")
    for share in settings.patches:
        check_share(share, "--patches")
    if min(settings.rounds, *settings.batches) < 1:
        raise InputError("--rounds and --batches must be at least 1")


def measure(settings: Bench, config: VecaConfig, console: Console) -> dict[str, Any]:
    """Every row of every table, and the slopes."""
    device = pick_device(settings.device)
    dtype = pick_dtype(settings.dtype, device)
    before = load_before()
    rows: list[dict[str, Any]] = []
    with console.status("starting") as status:
        for kind in settings.paths:
            for batch in settings.batches:
                for size in settings.sizes:

                    def said(what: str, where: str = f"{kind}, {size}², batch {batch}") -> None:
                        status.update(f"{where}: {what}")

                    rows += measure_size(settings, config, kind, size, batch, device, dtype, said)
    slopes = []
    for path, batch, arm in dict.fromkeys((row["path"], row["batch"], row["arm"]) for row in rows):
        points = [(r["patches"], r["best_ms"]) for r in rows if (r["path"], r["batch"], r["arm"]) == (path, batch, arm)]
        slopes.append({"path": path, "batch": batch, "arm": arm, "slope": slope(points)})
    about = {**machine(), "dtype": str(dtype).removeprefix("torch.")}
    spreads = {"{arm} at {size}² ({path}, batch {batch})".format(**row): row["spread"] for row in rows}
    results = {"model": settings.model, "machine": about, "noise": noise(spreads, before)}
    paper = paper_costs(settings.model) if "paper" in settings.against else []
    return {**results, "rows": rows, "slopes": slopes, "paper": paper}


def paper_costs(model: str) -> list[dict[str, Any]]:
    """The paper's table of the cost of attention, beside our own count: of this size, or of all."""
    costs = attention_costs()
    return [
        {**asdict(cost), "counted_gflops": counted[0] / 1e9, "counted_dinov3_gflops": counted[1] / 1e9}
        for cost in [cost for cost in costs if cost.model == model] or costs
        if (counted := [attention_layer_flops(MODELS[cost.model], 1024, cores) for cores in (64, 0)])
    ]


def measure_size(
    settings: Bench,
    config: VecaConfig,
    kind: str,
    size: int,
    batch: int,
    device: torch.device,
    dtype: torch.dtype,
    said: Callable[[str], None],
) -> list[dict[str, Any]]:
    """The rows of one image size: all contenders, interleaved."""
    build = {"whole": network, "attention": attention_path, "training": training_step}[kind]
    training = kind == "training"
    arms = contenders(settings, kind)
    said("building")
    calls = {arm: build(arm, config, size, batch, device, dtype) for arm in arms}
    times = interleaved(calls, settings.rounds, device, settings.seconds, said, training)
    del calls
    best = {arm: min(values) for arm, values in times.items()}
    rows = []
    for arm in arms:
        if arm.name == "products":
            continue
        row: dict[str, Any] = {
            "path": PATHS[kind],
            "size": size,
            "batch": batch,
            "arm": arm.label,
            "patches": tokens_of((size // config.patch_size,) * 2, arm.patches),
            "best_ms": best[arm] * 1e3,
            "median_ms": statistics.median(times[arm]) * 1e3,
            "images_per_second": batch / best[arm],
            "spread": spread(times[arm]),
            "rounds": len(times[arm]),
        }
        if kind == "whole":
            row |= flops(arm, config, size)
        if settings.memory and kind != "attention" and arm.name not in ("compile", "onnx", "int8"):
            said(f"memory of {arm.label}")
            row["memory_mb"] = peak_memory(arm, config, size, batch, device, training, dtype) / 1e6
        for other in arms:
            if other.name in (*PREFIX, "dense") and arm.name != other.name:
                row[f"times_faster_than_{other.name}"] = best[other] / best[arm]
            if (other.name, other.cores, other.patches) == ("veca", arm.cores, 1) and arm.name in WAYS:
                row["times_faster_than_veca"] = best[other] / best[arm]
        if arm.patches < 1 and (whole := arm._replace(patches=1.0)) in best:
            row["times_faster_than_all_patches"] = best[whole] / best[arm]
        if arm.name == "veca" and arm.patches == 1 and (mine := Arm("products", arm.cores)) in best:
            row["share_of_products"] = best[mine] / best[arm]
        rows.append(row)
    return rows


def contenders(settings: Bench, kind: str) -> list[Arm]:
    """Who takes part in a table, in its order."""
    shares = settings.patches if kind == "whole" else (1.0,)
    arms = [Arm("veca", cores, share) for cores in settings.cores for share in shares]
    if kind == "whole":
        arms += [Arm(way, cores) for way in WAYS if way in settings.against for cores in settings.cores]
    if "dense" in settings.against:
        arms.append(Arm("dense", settings.cores[-1]))
    arms += [Arm(name, 0) for name in PREFIX if name in settings.against]
    if kind == "training":
        arms += [Arm(f"{arm.name} checkpointed", arm.cores) for arm in arms]
    if kind == "whole" and "products" in settings.against:
        arms += [Arm("products", cores) for cores in settings.cores]
    return arms


def flops(arm: Arm, config: VecaConfig, size: int) -> dict[str, Any]:
    """PyTorch's count; for our own arms checked against the closed form with its 2NC + C²."""
    if arm.name in PREFIX:
        return {"gflops": dino_flops(arm.name, config, size) / 1e9}
    attention: Literal["core", "dense"] = "dense" if arm.name == "dense" else "core"
    own = VecaConfig.from_dict({**config.to_dict(), "attention": attention})
    if arm.patches < 1:  # PyTorch would count the table of positions, which the grid's own has in one resize
        return {"gflops": closed_form_flops(own, size, arm.cores, arm.patches) / 1e9}
    counted, written = veca_flops(own, size, arm.cores), closed_form_flops(own, size, arm.cores)
    if counted != written:
        raise RuntimeError(f"PyTorch counts {counted} FLOPs for {arm.label} at {size}², the closed form says {written}")
    return {"gflops": counted / 1e9, "gflops_closed_form": written / 1e9}
