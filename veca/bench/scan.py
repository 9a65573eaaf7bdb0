"""`veca bench scan`: what scanning costs, and looking, whatever the image's size."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from rich.console import Console

from veca.bench.arms import Arm
from veca.bench.measure import interleaved, load_before, machine, noise, noise_said, spread
from veca.cli import parse
from veca.devices import Dtype, pick_dtype
from veca.errors import InputError
from veca.files import write_json
from veca.model import Veca
from veca.scan import Scan
from veca.weights import load


@dataclass
class ScanBench:
    """Time `look` after scans of small and huge images, and `scan` with a share of the patches, all in one run.

    The contenders are interleaved, the best of several rounds is reported. Of an image above 4,000 patches only a share
    is scanned, and it is a file of zeros: looking does not depend on either.

    Examples:
      veca bench scan
      veca bench scan --sizes 1024 4096 --rounds 3 --out bench/scan
    """

    model: str = "veca-s14"
    """anything that veca.load takes"""
    sizes: tuple[int, ...] = (1024, 4096, 16384)
    """sides of the images that are scanned and looked at"""
    box: int = 448
    """side of the box that is looked at"""
    share_sizes: tuple[int, ...] = (1024, 2048)
    """sides of the images of which a share is scanned"""
    share: float = 0.25
    """that share"""
    cores: int = 64
    """the budget"""
    rounds: int = 7
    """measurements of each contender, beside one to warm up"""
    dtype: Dtype = "float32"
    """precision of the network; auto: bfloat16 where the device computes in it"""
    threads: int = 0
    """CPU threads; 0: as many as PyTorch takes"""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("bench")
    """folder for scan.json"""


def main(arguments: list[str]) -> None:
    settings = parse(ScanBench, arguments, "veca bench scan")
    if settings.threads:
        torch.set_num_threads(settings.threads)
    if min(settings.sizes, default=0) < settings.box or settings.rounds < 1:
        raise InputError(f"--sizes must be at least the box, {settings.box}, and --rounds at least 1")
    console, before = Console(), load_before()
    dtype = pick_dtype(settings.dtype, torch.device("cpu"))
    model = load(settings.model, cores=settings.cores, dtype=dtype)
    with tempfile.TemporaryDirectory() as folder, console.status("…") as status:
        rows = looks(model, settings, Path(folder), lambda text: status.update(text))
        rows += shares(model, settings, lambda text: status.update(text))
    for row in rows:
        console.print(f"{row['what']:<46} {row['seconds'] * 1e3:9.1f} ms  {row['note']}", highlight=False)
    about = noise({row["what"]: row["spread"] for row in rows}, before)
    console.print(noise_said(about), highlight=False, soft_wrap=True)
    write_json(
        settings.out / "scan.json",
        {
            "command": shlex.join(["veca", "bench", "scan", *arguments]),
            "machine": {**machine(), "dtype": str(dtype).removeprefix("torch.")},
            "noise": about,
            "rows": rows,
        },
    )
    console.print(f"{settings.out / 'scan.json'}", highlight=False)


def looks(model: Veca, settings: ScanBench, folder: Path, said: Callable[[str], None]) -> list[dict[str, Any]]:
    patch = model.patch_size
    side = settings.box // patch * patch
    calls: dict[Arm, Callable[[], object]] = {}
    files: dict[str, int] = {}
    for size in settings.sizes:
        said(f"scanning {size}²")
        scan = prepare(model, size, settings.cores, folder)
        scan.save(folder / f"{size}.scan")
        corner = (size - side) // 2 // patch * patch
        name = f"look at {side}² after a scan of {size}²"
        files[name] = (folder / f"{size}.scan").stat().st_size
        calls[Arm(name, 0)] = lambda scan=scan, corner=corner: scan.look(box=(corner, corner, side, side))  # type: ignore[misc]
    images = torch.randn(1, 3, side, side).to(model.patch_embed.proj.weight.dtype)
    whole = Arm(f"forward pass of {side}²", 0)
    calls[whole] = lambda: model(images, cores=settings.cores)
    times = run(calls, settings, said)
    best = {arm: min(values) for arm, values in times.items()}
    return [
        {
            "what": arm.name,
            "seconds": seconds,
            "spread": spread(times[arm]),
            "note": f"{seconds / best[whole]:.2f} of the forward pass"
            + (f", file {files[arm.name] / 1e6:.2f} MB" if arm.name in files else ""),
        }
        for arm, seconds in best.items()
    ]


def prepare(model: Veca, size: int, cores: int, folder: Path) -> Scan:
    """A scan of an image on disk that nothing has read whole."""
    np.lib.format.open_memmap(folder / f"{size}.npy", "w+", np.uint8, (size, size, 3)).flush()  # a hole in a file
    return model.scan(folder / f"{size}.npy", cores=cores, share=min(1.0, 4000 / (size // model.patch_size) ** 2))


def shares(model: Veca, settings: ScanBench, said: Callable[[str], None]) -> list[dict[str, Any]]:
    rows = []
    for size in settings.share_sizes:
        side = size // model.patch_size * model.patch_size
        images = torch.randn(1, 3, side, side).to(model.patch_embed.proj.weight.dtype)
        whole, part = Arm(f"forward pass of {side}²", 0), Arm(f"scan of {side}², share {settings.share:g}", 0)
        calls: dict[Arm, Callable[[], object]] = {
            whole: lambda images=images: model(images, cores=settings.cores),  # type: ignore[misc]
            part: lambda images=images: model.scan(images, cores=settings.cores, share=settings.share).cls,  # type: ignore[misc]
        }
        times = run(calls, settings, said)
        best = {arm: min(values) for arm, values in times.items()}
        rows += [
            {
                "what": arm.name,
                "seconds": seconds,
                "spread": spread(times[arm]),
                "note": f"{best[whole] / seconds:.2f} times as fast as the whole",
            }
            for arm, seconds in best.items()
        ]
    return rows


def run(
    calls: dict[Arm, Callable[[], object]], settings: ScanBench, said: Callable[[str], None]
) -> dict[Arm, list[float]]:
    return interleaved(calls, settings.rounds, torch.device("cpu"), 120.0, said)
