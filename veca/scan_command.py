"""`veca scan` and `veca look`: scan images of any size once, look at any part of them later."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from veca.cli import parse
from veca.devices import Dtype, pick_device, pick_dtype
from veca.errors import InputError
from veca.files import read_text, refuse_file, whole_file, write_json
from veca.images import stored_values
from veca.model import Veca
from veca.scan import Scan, check_share, open_scan, scan_header
from veca.weights import load, weights_digest


@dataclass(kw_only=True)
class ScanSettings:
    """Scan images of any size once: a file of about a megabyte each, along which `veca look` finds features later.

    For slide.tif, DIR gets slide.tif.scan. TIFF is read part by part; .npy is mapped; other formats are decoded whole.
    Run again with the same DIR, it continues: images that were scanned with the same settings are left alone.

    Exit status: 0 all images done, 1 some could not be read (they are listed at the end), 2 a wrong argument.

    Examples:
      veca scan slide.tif --out scans/
      veca scan *.tif --out scans/ --cores 16 --share 0.25
      veca look scans/slide.tif.scan --box 4096,2048,448,448 --out part.npy
    """

    paths: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="IMAGE…")]
    """images: TIFF, .npy (H×W×3), or any other format"""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """folder to write to"""
    cores: int = 64
    """the budget: how many cores are active"""
    share: float = 1.0
    """how many of the patches the cores read, evenly spread: 0.25 costs a quarter"""
    where: Annotated[Path | None, tyro.conf.arg(metavar="MASK")] = None
    """a picture of any resolution, laid over every image: patches that are mostly black there are left out"""
    model: str = "veca-s14"
    """a bundled name, a model folder, a .safetensors, an authors' .pt or a hub id"""
    tokens: Literal["float32", "float16"] = "float32"
    """how tokens are kept between layers; float16 halves the memory and rounds"""
    spill: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """keep the tokens in a file in this folder instead of in memory"""
    dtype: Dtype = "auto"
    """precision of the network; auto: bfloat16 where the CPU or GPU computes in it, else float32"""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1, mps"""


@dataclass(kw_only=True)
class LookSettings:
    """Features of any part of an image that was scanned, exactly as in the whole pass, whatever the image's size.

    FILE.npy gets h×w×D (a box: one feature for each cell of --stride pixels that it touches) or n×D (points), float32,
    and FILE.json what it covers. Without --box and --points: the whole image.

    Examples:
      veca look scans/slide.tif.scan --box 4096,2048,448,448 --out part.npy
      veca look scans/slide.tif.scan --box 4096,2048,448,448 --stride 7 --out finer.npy
      veca look scans/slide.tif.scan --points 120,80 4000.5,96 --out points.npy
      veca look scans/slide.tif.scan --points places.csv --out points.npy     (a line "x,y" each)
    """

    scan: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE.scan")]
    """what `veca scan` wrote"""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE.npy")]
    """file to write"""
    box: Annotated[str | None, tyro.conf.arg(metavar="X,Y,WIDTH,HEIGHT")] = None
    """in pixels of the image"""
    points: Annotated[tuple[str, ...], tyro.conf.arg(metavar="X,Y…|FILE.csv")] = ()
    """in pixels of the image: a feature centred on each"""
    stride: int | None = None
    """pixels from one feature to the next; None: the patch size, the model's own grid"""
    image: Annotated[Path | None, tyro.conf.arg(metavar="IMAGE")] = None
    """where the image lies now, if not where it was scanned"""
    model: str | None = None
    """the model that scanned it, if not under the name it had then"""
    dtype: Dtype = "auto"
    """as for `veca scan`"""
    device: str = "auto"
    """as for `veca scan`"""


def main(arguments: list[str]) -> int:
    settings = parse(ScanSettings, arguments, "veca scan")
    if not settings.paths:
        raise InputError("name at least one image to scan; `veca scan --help` has examples")
    names = [path.name for path in settings.paths]
    if len(set(names)) < len(names):
        raise InputError("two of the images have the same name; scan them to different folders")
    for path in (*settings.paths, *([settings.where] if settings.where else [])):
        if not path.is_file():
            raise InputError(f"{path}: {'is a folder, not an image' if path.is_dir() else 'no such file'}")
    refuse_file(settings.out)
    check_share(settings.share)
    mask = None if settings.where is None else stored_values(settings.where)
    device = pick_device(settings.device)
    model = load(settings.model, cores=settings.cores, device=device, dtype=pick_dtype(settings.dtype, device))
    digest = weights_digest(model)
    failed: list[str] = []
    done = 0
    for path in settings.paths:
        file = settings.out / f"{path.name}.scan"
        if is_done(file, path, digest, settings):
            continue
        try:
            line = scan_one(model, path, file, mask, settings)
        except InputError as error:
            failed.append(str(error) if str(path) in str(error) else f"{path}: {error}")
            continue
        done += 1
        print(line)
    before = len(settings.paths) - done - len(failed)
    print(
        f"{settings.out}: {done} images scanned"
        + (f", {before} were there before" if before else "")
        + (f", {len(failed)} could not be read:" if failed else "")
    )
    for line in failed:
        print(f"  {line}", file=sys.stderr)
    return 1 if failed else 0


def is_done(file: Path, image: Path, digest: str, settings: ScanSettings) -> bool:
    """Whether an earlier run scanned this image, as it is now, with the same settings."""
    if not file.is_file():
        return False
    try:
        about = scan_header(file)
    except InputError:  # damaged: scan it again
        return False
    return (
        about["weights"] == digest
        and (about["cores"], about["share"]) == (settings.cores, settings.share)
        and about.get("where") == (str(settings.where) if settings.where else None)
        and about.get("stamp") == file_stamp(image)
    )


def file_stamp(image: Path) -> list[int]:
    """What changes when a file does: its size and when it was written."""
    stat = image.stat()
    return [stat.st_size, stat.st_mtime_ns]


def scan_one(model: Veca, path: Path, file: Path, mask: np.ndarray[Any, Any] | None, settings: ScanSettings) -> str:
    from veca.features import no_memory

    began = time.monotonic()
    with bar() as progress:
        task = progress.add_task(path.name, total=None)

        def report(what: str, done: int, total: int) -> None:
            progress.update(task, description=f"{path.name}: {what}", completed=done, total=total)

        try:
            scan = model.scan(
                path,
                cores=settings.cores,
                share=settings.share,
                where=mask,
                tokens=settings.tokens,
                spill=settings.spill,
                report=report,
            )
        except RuntimeError as error:
            if not no_memory(error):
                raise
            raise InputError(f"{path}: its tokens do not fit in memory; use --tokens float16 or --spill DIR") from error
    about = {
        "image": os.path.abspath(path),  # noqa: PTH100  (a link keeps its own name)
        "model": settings.model,
        "where": str(settings.where) if settings.where else None,
        "stamp": file_stamp(path),
    }
    scan.save(file, **about)
    height, width = scan.grid
    size = file.stat().st_size / 1e6
    return (
        f"{file}: {scan.size[0]}×{scan.size[1]} pixels, {height}×{width} patches, {size:.2f} MB "
        f"in {time.monotonic() - began:.1f} s"
    )


def main_look(arguments: list[str]) -> int:
    settings = parse(LookSettings, arguments, "veca look")
    if settings.out.suffix != ".npy":
        raise InputError(f"--out is an .npy file, not {settings.out}")
    if settings.box and settings.points:
        raise InputError("give --box or --points, not both")
    about = scan_header(settings.scan)
    image, name = settings.image or about.get("image"), settings.model or about.get("model")
    for value, flag in ((image, "--image"), (name, "--model")):
        if not isinstance(value, (str, Path)):
            raise InputError(f"{settings.scan} does not say where it came from; give {flag}")
    box = None if settings.box is None else numbers(settings.box, 4, "--box")
    points = read_points(settings.points) if settings.points else None
    device = pick_device(settings.device)
    model = load(str(name), device=device, dtype=pick_dtype(settings.dtype, device))
    scan: Scan = open_scan(settings.scan, Path(str(image)), model)
    with bar() as progress:
        task = progress.add_task("look", total=None)
        found = scan.look(
            box=None if box is None else tuple(map(int, box)),  # type: ignore[arg-type]
            points=points,
            stride=settings.stride,
            report=lambda what, done, total: progress.update(task, completed=done, total=total),
        )
    with whole_file(settings.out) as temporary, open(temporary, "wb") as file:
        np.save(file, found.features.numpy())
    x, y, width, height = found.box
    shape = "×".join(map(str, found.features.shape))
    write_json(
        settings.out.with_suffix(".json"),
        {
            "scan": str(settings.scan),
            "image": str(image),
            "box": list(found.box),
            "stride": settings.stride or model.patch_size,
            "shape": list(found.features.shape),
            "centres": found.centres.tolist() if points is not None else None,
            "inside": int(found.inside.sum()),
        },
    )
    print(f"{settings.out}: {shape} features of {width}×{height} pixels at {x},{y}")
    return 0


def bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(file=sys.stderr))


def numbers(text: str, count: int, flag: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
        if len(found) != count or not all(np.isfinite(found)):
            raise ValueError
    except ValueError:
        raise InputError(f"{flag} takes {count} numbers with commas between them, not {text!r}") from None
    if flag == "--box" and any(value != int(value) for value in found):
        raise InputError(f"--box takes whole pixels, not {text!r}")
    return found


def read_points(given: tuple[str, ...]) -> list[tuple[float, float]]:
    """Pairs from the command line, or from a file of them."""
    lines: list[str] = []
    for item in given:
        lines += [line for line in read_text(item).splitlines() if line.strip()] if Path(item).is_file() else [item]
    pairs = [numbers(line, 2, "--points") for line in lines]
    return [(x, y) for x, y in pairs]
