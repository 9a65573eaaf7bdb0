"""`veca scan` and `veca look`: scan images of any size once, look at any part of them later."""

from __future__ import annotations

import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from veca.cli import parse
from veca.devices import Dtype, no_memory, pick_device, pick_dtype
from veca.errors import InputError, check_share
from veca.files import read_text, refuse_file, whole_file, write_json
from veca.images import stored_values
from veca.large.formats import opener_of
from veca.large.options import Input, ViewOptions, check_inputs, file_stamp, in_folders
from veca.large.picture import Picture
from veca.large.place import grid_transform, to_full
from veca.large.sinks import coloured, write_geotiff, write_points
from veca.large.source import Array
from veca.model import Veca
from veca.parallel import launched
from veca.progress import reporting
from veca.scan import tidy
from veca.scan_file import digest_of, open_scan, scan_header
from veca.training.ranks import Ranks
from veca.video import has_frames, is_video
from veca.weights import load


@dataclass(kw_only=True)
class ScanSettings(ViewOptions):
    """Scan images of any size once: a file of about a megabyte each, along which `veca look` finds features later.

    For slide.tif, DIR gets slide.tif.scan. Slides, scenes, TIFF, Zarr and .npy are read part by part; folders are
    searched for all of them, and what is in folders below keeps its path.
    Run again with the same DIR, it continues: images that were scanned with the same settings are left alone.

    Exit status: 0 all images done, 1 some could not be read (they are listed at the end), 2 a wrong argument.

    Examples:
      veca scan slide.tif --out scans/
      veca scan *.tif --out scans/ --cores 16 --share 0.25
      torchrun --nproc-per-node 8 -m veca.cli scan slide.tif --out scans/     (each image over 8 ranks)
      veca scan slide.svs --out scans/ --mpp 1 --where auto
      veca look scans/slide.tif.scan --box 4096,2048,448,448 --out part.npy
      veca scan clip.mp4 --out scans/ --share 0.25 --carry     (a video: scans/clip.mp4/000000.scan …)
    """

    paths: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="IMAGE…")]
    """images: slides, GeoTIFF, TIFF, Zarr, .npy (H×W×3), or any other format, or folders of them; or videos and folders
    of frames"""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """folder to write to"""
    cores: int = 64
    """the budget: how many cores are active"""
    share: float = 1.0
    """how many of the patches the cores read, evenly spread: 0.25 costs a quarter"""
    patches: float = 1.0
    """instead: the cores read so many squares for each of the patches, large ones where there is little to see"""
    carry: tyro.conf.FlagCreatePairsOff[bool] = False
    """with --share, of videos: the cores start from what they read in the last frames"""
    where: Annotated[str | None, tyro.conf.arg(metavar="auto|MASK")] = None
    """auto (blank glass of slides, nodata of scenes), a picture of any resolution, laid over every image, or GeoJSON:
    patches outside are left out"""
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
    and FILE.json what it covers and, of a scan with a mask, which of them are inside it (a line of 0 and 1 for each
    row). Without --box and --points: the whole image. FILE.parquet takes points, FILE.tif their place on the map (a
    GeoTIFF of the features' colours). Pixels are those of the file's finest level.

    Examples:
      veca look scans/slide.tif.scan --box 4096,2048,448,448 --out part.npy
      veca look scans/slide.tif.scan --box 4096,2048,448,448 --stride 7 --out finer.npy
      veca look scans/slide.tif.scan --points 120,80 4000.5,96 --out points.npy
      veca look scans/slide.tif.scan --points places.csv --out points.parquet     (a line "x,y" each)
    """

    scan: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE.scan")]
    """what `veca scan` wrote"""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE.npy|.parquet|.tif")]
    """file to write"""
    box: Annotated[str | None, tyro.conf.arg(metavar="X,Y,WIDTH,HEIGHT")] = None
    """in pixels of the image"""
    points: Annotated[tuple[str, ...], tyro.conf.arg(metavar="X,Y…|FILE.csv")] = ()
    """in pixels of the image: a feature centred on each"""
    stride: int | float | None = None
    """pixels, of the resolution that was scanned, from one feature to the next; None: the patch size, the model's own
    grid"""
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
    if settings.carry or any(is_video(path) or is_clip(path) for path in settings.paths):
        from veca.video_command import scans

        return scans(settings)
    images = in_folders(settings.paths)
    check_inputs([one.path for one in images], settings.where, "scan")
    refuse_file(settings.out)
    check_share(settings.share)
    check_share(settings.patches, "--patches")
    if settings.where is not None and settings.where != "auto" and not settings.where.endswith("json"):
        stored_values(settings.where)  # that it is a picture is known now
    with launched(settings.device) as ranks:
        return scan_all(images, settings, ranks)


def is_clip(path: Path) -> bool:
    """A folder of frames, as of a video; with slides, TIFF or arrays in it, it is a folder of images."""
    return has_frames(path) and not any(opener_of(entry) for entry in path.iterdir())


def scan_all(images: list[Input], settings: ScanSettings, ranks: Ranks) -> int:
    dtype = pick_dtype(settings.dtype, ranks.device)
    model = load(settings.model, cores=settings.cores, device=ranks.device, dtype=dtype)
    same = {"weights": digest_of(model), "dtype": str(dtype).removeprefix("torch.")}
    failed: list[str] = []
    done = 0
    for path, name in images:
        file = settings.out / f"{name}.scan"
        if ranks.from_first(lambda file=file, path=path: is_done(file, path, same, settings)):  # type: ignore[misc]
            continue
        try:
            line = scan_one(model, path, file, settings, ranks)
        except InputError as error:
            if ranks.count > 1:  # the others may be waiting in the middle of this image
                raise
            failed.append(str(error) if str(path) in str(error) else f"{path}: {error}")
            continue
        done += 1
        ranks.say(line)
    before = len(images) - done - len(failed)
    ranks.say(
        f"{settings.out}: {done} images scanned"
        + (f", {before} were there before" if before else "")
        + (f", {len(failed)} could not be read:" if failed else "")
    )
    for line in failed:
        print(f"  {line}", file=sys.stderr)
    return 1 if failed else 0


def is_done(file: Path, image: Path, same: dict[str, str], settings: ScanSettings) -> bool:
    """Whether an earlier run scanned this image, as it is now, with the same settings."""
    if not file.is_file():
        return False
    try:
        about = scan_header(file)
    except InputError:  # damaged: scan it again
        return False
    return (
        all(about.get(name) == value for name, value in same.items())
        and all(about[name] == getattr(settings, name) for name in ("cores", "share", "patches"))
        and about.get("where") == settings.where
        and about.get("mask", []) == mask_stamp(settings)
        and about.get("asked", {}) == settings.view()
        and about.get("stamp") == file_stamp(image)
    )


def mask_stamp(settings: ScanSettings) -> list[int]:
    """Of the file that says where; nothing if none does."""
    return [] if settings.where in (None, "auto") else file_stamp(Path(str(settings.where)))


def scan_one(model: Veca, path: Path, file: Path, settings: ScanSettings, ranks: Ranks) -> str:
    began = time.monotonic()
    with settings.open(path) as picture, reporting(path.name, ranks.first) as report:
        if ranks.first:
            print(picture.describe(), file=sys.stderr)
        try:
            scan = model.scan(
                picture,
                cores=settings.cores,
                share=settings.share,
                patches=settings.patches,
                where=settings.where,
                tokens=settings.tokens,
                spill=settings.spill,
                report=report,
                group=ranks.group,
            )
        except (RuntimeError, MemoryError) as error:
            if not no_memory(error):
                raise
            raise InputError(f"{path}: its tokens do not fit in memory; use --tokens float16 or --spill DIR") from error
        about = {
            "image": os.path.abspath(path),  # noqa: PTH100  (a link keeps its own name)
            "model": settings.model,
            "where": settings.where,
            "mask": mask_stamp(settings),
            "stamp": file_stamp(path),
            "asked": settings.view(),
            "view": picture.view,
        }
        if ranks.first:
            scan.save(file, **about)
    if not ranks.first:
        return ""
    height, width = scan.grid
    size = file.stat().st_size / 1e6
    return (
        f"{file}: {scan.size[0]}×{scan.size[1]} pixels, {height}×{width} patches, {size:.2f} MB "
        f"in {time.monotonic() - began:.1f} s"
    )


def main_look(arguments: list[str]) -> int:
    settings = parse(LookSettings, arguments, "veca look")
    if settings.out.suffix not in (".npy", ".parquet", ".tif"):
        raise InputError(f"--out is an .npy, a .parquet or a .tif file, not {settings.out}")
    if settings.box and settings.points:
        raise InputError("give --box or --points, not both")
    if settings.out.suffix != ".npy" and bool(settings.points) != (settings.out.suffix == ".parquet"):
        raise InputError("points go to .npy or .parquet, a box to .npy or .tif")
    about = scan_header(settings.scan)
    image, name = settings.image or about.get("image"), settings.model or about.get("model")
    for value, flag in ((image, "--image"), (name, "--model")):
        if not isinstance(value, (str, Path)):
            raise InputError(f"{settings.scan} does not say where it came from; give {flag}")
    box = None if settings.box is None else numbers(settings.box, 4, "--box")
    points = read_points(settings.points) if settings.points else None
    device = pick_device(settings.device)
    model = load(str(name), device=device, dtype=pick_dtype(settings.dtype, device))
    source: Any = Path(str(image))
    if "frame" in about:
        from veca.video_command import frame_at

        source = np.asarray(frame_at(source, str(about["frame"])))
    scan = open_scan(settings.scan, source, model)
    picture = scan.strips.picture
    assert isinstance(picture, Picture)
    stride = settings.stride or model.patch_size
    with reporting(settings.scan.name) as report:
        found = scan.look(
            box=None if box is None else box_at(picture, box),
            points=None if points is None else np.asarray(points) / picture.downsample,
            stride=settings.stride,
            report=report,
        )
    x, y = found.box[:2]
    place, size = to_full(picture, np.reshape(found.box, (2, 2))).tolist()  # as they were given
    if settings.out.suffix == ".parquet":
        write_points(settings.out, picture, found.centres.numpy(), found.features.numpy())
    elif settings.out.suffix == ".tif":
        a, b, c, d, e, f = grid_transform(picture, stride)
        moved = (a, b, c + (a * x + b * y) / stride, d, e, f + (d * x + e * y) / stride)
        write_geotiff(settings.out, coloured(found.features.numpy()), picture.crs, moved)
    else:
        with whole_file(settings.out) as temporary, open(temporary, "wb") as file:
            np.save(file, found.features.numpy())
    shape = "×".join(map(str, found.features.shape))
    write_json(
        settings.out.with_suffix(".json"),
        {
            "scan": str(settings.scan),
            "image": str(image),
            "box": [tidy(round(value, 6)) for value in (*place, *size)],
            "stride": stride,
            "picture": picture.about(),
            "shape": list(found.features.shape),
            "centres": to_full(picture, found.centres.numpy()).tolist() if points is not None else None,
            "inside": None if scan.inside is None else lines(found.inside.numpy()),
        },
    )
    print(f"{settings.out}: {shape} features of {size[0]:g}×{size[1]:g} pixels at {place[0]:g},{place[1]:g}")
    return 0


def lines(inside: Array) -> list[str]:
    """A line of 0 and 1 for each row of cells; one for points."""
    return ["".join("01"[cell] for cell in row) for row in np.atleast_2d(inside).astype(int).tolist()]


def box_at(picture: Picture, box: list[float]) -> tuple[int, int, int, int]:
    """Of a box in pixels of the finest level, the pixels of a picture that it touches."""
    (x, wide), (y, high) = ((box[axis] / by, box[axis + 2] / by) for axis, by in enumerate(picture.downsample))
    left, top = math.floor(x), math.floor(y)
    right, bottom = math.ceil(x + wide - 1e-9), math.ceil(y + high - 1e-9)
    return left, top, right - left, bottom - top


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
