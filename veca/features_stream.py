"""`veca features --stream`: dense features of images of any size, at their own size."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from veca.cli import parse
from veca.devices import Dtype, pick_device, pick_dtype
from veca.errors import InputError
from veca.files import refuse_file, whole_file
from veca.images import image_size
from veca.model import Veca
from veca.strips import TIFF, open_strips
from veca.weights import load


@dataclass(kw_only=True)
class StreamSettings:
    """Write the dense feature of images that need not fit in memory, at their own size, exactly.

    For big.tif, DIR gets big.tif.npy, one feature a patch (h×w×D), and big.tif.npz with `cls` (D), `cores` (C×D),
    `coords` (C×2) and `grid`. TIFF is read strip by strip; .npy is mapped; other formats are decoded whole. Memory is
    one buffer of tokens, 2.1 GB for 16384×16384 pixels with veca-s14, and about half a gigabyte besides.

    Examples:
      veca features --stream big.tif --out features/
      veca features --stream scan.tif --out features/ --cores 16 --spill /tmp/tokens

    Read it back without loading it: np.load("features/big.tif.npy", mmap_mode="r")
    """

    paths: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="PATH…")]
    """images: TIFF, .npy (H×W×3), or any other format"""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """folder to write to"""
    cores: int = 64
    """the budget: how many cores are active"""
    model: str = "veca-s14"
    """a bundled name, a model folder, a .safetensors, an authors' .pt or a hub id"""
    tile: int | None = None
    """patches that go through a layer together; None: as many as fit the caches"""
    tokens: Literal["float32", "float16"] = "float32"
    """how tokens are kept between layers, and features written; float16 halves both and rounds"""
    spill: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """keep the tokens in a file in this folder instead of in memory"""
    dtype: Dtype = "auto"
    """precision of the network; auto: bfloat16 where the CPU or GPU computes in it, else float32"""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1, mps"""


def main(arguments: list[str]) -> int:
    settings = parse(
        StreamSettings, [argument for argument in arguments if argument != "--stream"], "veca features --stream"
    )
    if not settings.paths:
        raise InputError("name at least one image to stream")
    if len({path.name for path in settings.paths}) < len(settings.paths):
        raise InputError("two of the images have the same name; stream them to different folders")
    refuse_file(settings.out)
    from veca.features import no_memory

    device = pick_device(settings.device)
    model = load(settings.model, cores=settings.cores, device=device, dtype=pick_dtype(settings.dtype, device))
    for path in settings.paths:
        try:
            check_room(model, path, settings)
            stream_one(model, path, settings)
        except OSError as error:  # disk full, no permission
            raise InputError(f"cannot write {error.filename or settings.out}: {error.strerror or error}") from error
        except RuntimeError as error:
            if not no_memory(error):
                raise
            raise InputError(f"{path}: its tokens do not fit in memory; use --tokens float16 or --spill DIR") from error
    return 0


def check_room(model: Veca, path: Path, settings: StreamSettings) -> None:
    """What will be written has a place and room on the disk: known now, not after the last layer."""
    settings.out.mkdir(parents=True, exist_ok=True)
    for suffix in (".npy", ".npz"):
        if (there := settings.out / f"{path.name}{suffix}").is_dir():
            raise InputError(f"{there} is a folder, not a file; use another --out")
    if path.suffix.lower() in (*TIFF, ".npy"):
        with open_strips(path, model.patch_size) as strips:
            width, height = strips.width, strips.height
    else:
        width, height = image_size(path)
    patches = (width // model.patch_size) * (height // model.patch_size)
    needed = patches * model.config.feature_width * (2 if settings.tokens == "float16" else 4)
    free = shutil.disk_usage(settings.out).free
    if needed > free:
        raise InputError(
            f"{path}: its features need {needed / 1e9:.1f} GB, and {settings.out} has {free / 1e9:.1f} GB left"
        )


def stream_one(model: Veca, path: Path, settings: StreamSettings) -> None:
    began = time.monotonic()
    dense = settings.out / f"{path.name}.npy"
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr)) as bar:
        task = bar.add_task("patches", total=None)

        def report(what: str, done: int, total: int) -> None:
            bar.update(task, description=escape(f"{path.name}: {what}"), completed=done, total=total)

        result = model.stream(
            path,
            cores=settings.cores,
            tile=settings.tile,
            tokens=settings.tokens,
            spill=settings.spill,
            out=dense,
            report=report,
        )
    with whole_file(settings.out / f"{path.name}.npz") as temporary:
        np.savez(
            temporary,
            cls=result.cls[0].float().cpu().numpy(),
            cores=result.cores[0].float().cpu().numpy(),
            coords=result.coords[0].float().cpu().numpy(),
            grid=np.array(result.grid),
        )
    height, width = result.grid
    size = f"{width * model.patch_size}×{height * model.patch_size}"
    print(f"{dense}: {height}×{width} features of {size} pixels in {time.monotonic() - began:.1f} s")
