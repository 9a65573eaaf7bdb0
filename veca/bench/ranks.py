"""`veca bench ranks`: one image over several ranks, measured here, and what a network would add with many.

python -m veca.bench.ranks '{"image": …}'      one rank of one measurement, started by the command
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import tyro
from rich.console import Console

from veca import parallel
from veca.bench.measure import forget_peak, machine, peak
from veca.cli import parse
from veca.config import MODELS, VecaConfig
from veca.errors import InputError, require
from veca.files import read_json, write_json
from veca.model import Veca, create_model
from veca.training.ranks import Ranks
from veca.weights import load

BITS, LATENCY = 10e9, 25e-6  # a second, and seconds a message: an ordinary network
MANY = (8, 64)


@dataclass
class RanksBench:
    """Stream one image over several ranks of one thread, and over one rank of as many threads: time, memory, bytes.

    Bytes are counted at the collective operations. Beside them stands arithmetic for many ranks on a network of 10
    Gbit/s and 25 µs: ours, and what ring or Ulysses attention would send for a DINOv3 of the same width.

    Examples:
      veca bench ranks
      veca bench ranks --sizes 1024 --ranks 4 --out bench/ranks
      veca bench ranks --training --sizes 1024 2048
    """

    model: str = "veca_small"
    """a size with random weights (veca_tiny … veca_large), or any model that veca.load takes"""
    sizes: tuple[int, ...] = (4096, 8192)
    """sides of the images"""
    ranks: int = 2
    """ranks of one thread; one rank of as many threads is measured beside them"""
    cores: int = 64
    """the budget"""
    training: bool = False
    """a forward and a backward pass of the image, split by `veca.parallel.SplitVeca`, instead of a stream"""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("bench")
    """folder for ranks.json"""


def main(arguments: list[str]) -> None:
    settings = parse(RanksBench, arguments, "veca bench ranks")
    config = network_of(settings.model).config
    if settings.ranks < 2 or not settings.sizes or min(settings.sizes) < config.patch_size:
        raise InputError(f"--ranks is at least 2, --sizes are at least a patch, {config.patch_size}")
    console = Console()
    rows = []
    with tempfile.TemporaryDirectory() as folder, console.status("…") as status:
        for size in settings.sizes:
            image = Path(folder) / f"{size}.tif"
            pixels = np.random.default_rng(0).integers(0, 256, (size, size, 3), dtype=np.uint8)
            require("tifffile", "stream").imwrite(image, pixels, photometric="rgb")
            for count, threads in ((1, settings.ranks), (settings.ranks, 1)):
                status.update(f"{size}², {count} × {threads}")
                rows.append(measure(image, count, threads, settings, Path(folder)) | {"size": size})
            image.unlink()
    patches = (settings.sizes[-1] // config.patch_size) ** 2
    work = rows[-1]["cpu_seconds"] * settings.ranks  # of one thread
    many = () if settings.training else MANY
    sums = [arithmetic(count, patches, config, rows[-1]["layer_bytes"], work) for count in many]
    for line in table(rows, sums, settings.sizes[-1]):
        console.print(line, highlight=False, soft_wrap=True)
    write_json(
        settings.out / "ranks.json",
        {
            "command": shlex.join(["veca", "bench", "ranks", *arguments]),
            "machine": machine(),
            "rows": rows,
            "arithmetic": sums,
        },
    )
    console.print(f"{settings.out / 'ranks.json'}", highlight=False)


def measure(image: Path, count: int, threads: int, settings: RanksBench, folder: Path) -> dict[str, Any]:
    """Start the ranks; the slowest one's time, the busiest one's processor time, which other programs on the machine
    do not lengthen, the largest one's memory, and what one gives to the collectives a layer."""
    told = {"image": str(image), "model": settings.model, "cores": settings.cores, "folder": str(folder)}
    told |= {"size": int(image.stem), "training": settings.training}
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)] if count > 1 else []
    done = subprocess.run(
        [sys.executable, *ranks, "-m", "veca.bench.ranks", json.dumps(told)],
        # Without the second, freed memory stays in holes (see `veca.bench.measure`).
        env={**os.environ, "OMP_NUM_THREADS": str(threads), "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise InputError(f"{count} ranks at {image.stem}² failed: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    found = [read_json(folder / f"{rank}.json") for rank in range(count)]
    return {
        "ranks": count,
        "threads": threads,
        "seconds": max(one["seconds"] for one in found),
        "cpu_seconds": max(one["cpu_seconds"] for one in found),
        "memory_mb": max(one["memory"] for one in found) / 1e6,
        "layer_bytes": max(one["layer_bytes"] for one in found),
    }


def network_of(name: str) -> Veca:
    torch.manual_seed(0)
    return create_model(name).eval() if name in MODELS else load(name)


def one_rank(told: dict[str, Any]) -> None:
    ranks = Ranks("cpu")
    model, sent = network_of(told["model"]), []
    plain = dist.all_reduce

    def counted(tensor: torch.Tensor, *arguments: Any, **more: Any) -> Any:
        sent.append(tensor.numel() * tensor.element_size())
        return plain(tensor, *arguments, **more)

    dist.all_reduce = counted
    side = 8 * model.patch_size
    if told["training"]:
        trained(model.train(), side, told["cores"], ranks.group)  # load the libraries
    else:
        model.scan(np.zeros((side, side, 3), np.uint8), told["cores"], group=ranks.group)
    sent.clear()
    ranks.wait()
    before, began, busy = forget_peak(), time.perf_counter(), time.process_time()
    if told["training"]:
        trained(model, told["size"], told["cores"], ranks.group)
    else:
        model.stream(told["image"], told["cores"], out=f"{told['folder']}/features.npy", group=ranks.group)
    found = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - busy}
    found["memory"] = peak() - before
    write_json(f"{told['folder']}/{ranks.rank}.json", {**found, "layer_bytes": sum(sent) // model.config.depth})
    ranks.close()


def trained(model: Veca, size: int, cores: int, group: Any) -> None:
    """The gradients of one image, of which a rank makes only its own rows."""
    model.zero_grad()
    rows = parallel.share(size // model.patch_size, group) if group else slice(0, size // model.patch_size)
    images = torch.randn(1, 3, (rows.stop - rows.start) * model.patch_size, size // model.patch_size * model.patch_size)
    out = parallel.SplitVeca(model, group)(images, cores) if group else model(images, cores)
    errors = out.patches.square()
    (out.cls.square().mean() + (parallel.mean(errors, group) if group else errors.mean())).backward()


def arithmetic(ranks: int, patches: int, config: VecaConfig, payload: int, work: float) -> dict[str, Any]:
    """Bytes that a rank sends a layer and seconds a layer on the network, in the plainest form of each.

    Ours are the counted bytes in two ring all-reduces of 2(n − 1) messages each. Ring attention passes the keys and
    values of N/n patches on, n − 1 times; Ulysses exchanges queries, keys, values and results, 1/n of them with each
    other rank (and cannot have more ranks than heads). Theirs are counted in bfloat16, ours in float32, as they are.
    """
    others, theirs = ranks - 1, patches / ranks * config.width * 2
    kinds = {
        "veca": (2 * others / ranks * payload, 4 * others),
        "ring": (others * 2 * theirs, others),
        "ulysses": (4 * theirs * others / ranks, 4 * others),
    }
    return {
        "ranks": ranks,
        "compute_s": work / ranks / config.depth,
        **{f"{name}_bytes": size for name, (size, _) in kinds.items()},
        **{f"{name}_s": size * 8 / BITS + messages * LATENCY for name, (size, messages) in kinds.items()},
    }


def table(rows: list[dict[str, Any]], sums: list[dict[str, Any]], size: int) -> list[str]:
    lines = [
        "| image | ranks × threads | s | processor s a rank | peak MB a rank | bytes given a layer |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        lines.append(
            f"| {row['size']}² | {row['ranks']} × {row['threads']} | {row['seconds']:.1f} | {row['cpu_seconds']:.1f} "
            f"| {row['memory_mb']:.0f} | {row['layer_bytes']:,} |"
        )
    if not sums:
        return lines
    lines += [
        "",
        f"A layer of {size}² on 10 Gbit/s and 25 µs, computed: what a rank sends, and how long that takes",
        "",
    ]
    lines += ["| ranks | computing | VECA | ring attention | Ulysses |", "| --- | --- | --- | --- | --- |"]
    for row in sums:
        cells = (f"{row[f'{k}_bytes'] / 1e6:.2f} MB, {row[f'{k}_s'] * 1e3:.1f} ms" for k in ("veca", "ring", "ulysses"))
        lines.append(f"| {row['ranks']} | {row['compute_s'] * 1e3:.0f} ms | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    one_rank(json.loads(sys.argv[1]))
