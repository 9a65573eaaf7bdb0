"""`veca features --stream`: dense features of images of any size."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from veca.cli import parse
from veca.devices import Dtype, no_memory, pick_dtype
from veca.errors import InputError
from veca.extract.folder import read_rows, write_rows
from veca.files import lock_folder, refuse_file, remove_partials, whole_file
from veca.large.channels import numbers
from veca.large.options import Input, ViewOptions, check_inputs, file_stamp, in_folders
from veca.large.picture import Picture, Strips
from veca.large.sinks import GeoTiffSink, NoRoom, NpySink, Sink, ZarrSink, check_room, folder_above
from veca.large.where import mask_of
from veca.model import Veca
from veca.parallel import launched
from veca.progress import reporting
from veca.training.ranks import Ranks
from veca.weights import load, weights_digest
from veca.windows import window_pixels, windowed


@dataclass(kw_only=True)
class StreamSettings(ViewOptions):
    """Write the dense feature of images that need not fit in memory, exactly.

    For big.tif, DIR gets big.tif.npy, one feature a patch (h×w×D), and big.tif.npz with `cls` (D), `cores` (C×D),
    `coords` (C×2), `grid` and what was read, as JSON (`about`). Slides, scenes, TIFF, Zarr and .npy are read part by
    part; other formats are decoded whole; folders are searched for all of them, and what is in folders below keeps its
    path. Memory is one buffer of tokens, 2.1 GB for 16384×16384 pixels with veca-s14, and about half a gigabyte
    besides. DIR/index.jsonl gets a row an image, as of `veca features`. Run again with the same DIR, it continues:
    images that are done are left alone.

    Exit status: 0 all images done, 1 some could not be read (they are listed at the end), 2 a wrong argument.

    Examples:
      veca features --stream big.tif --out features/
      veca features --stream slide.svs --mpp 1 --where auto --format zarr --out features/
      veca features --stream scene.tif --bands 4,3,2 --stretch 2,98 --window 448 --format tif --out features/
      torchrun --nproc-per-node 8 -m veca.cli features --stream big.tif --out features/     (one image over 8 ranks)

    Read it back without loading it: np.load("features/big.tif.npy", mmap_mode="r")
    """

    paths: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="PATH…")]
    """images: slides, GeoTIFF, TIFF, Zarr, .npy (H×W×3), or any other format; or folders of them"""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """folder to write to"""
    cores: int = 64
    """the budget: how many cores are active"""
    model: str = "veca-s14"
    """a bundled name, a model folder, a .safetensors, an authors' .pt or a hub id"""
    where: Annotated[str | None, tyro.conf.arg(metavar="auto|MASK")] = None
    """auto (blank glass of slides, nodata of scenes), a picture or GeoJSON: what is outside is left out, and zero"""
    window: Annotated[str | None, tyro.conf.arg(metavar="SIZE")] = None
    """overlapping windows of so many pixels (448), or of a length (500um), blended, instead of one exact pass"""
    format: Literal["npy", "zarr", "zarr-int8", "tif"] = "npy"
    """zarr: OME-Zarr in float16, or int8 with scales; tif: a cloud-optimised GeoTIFF of the features' colours"""
    channels: Annotated[str | None, tyro.conf.arg(metavar="N,…")] = None
    """with --format tif: these channels of the features, from 0, instead of colours"""
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

    def dense(self, one: Input) -> Path:
        return self.out / f"{one.name}.{self.format.partition('-')[0]}"

    def rest(self, one: Input) -> Path:
        return self.out / f"{one.name}.npz"


def main(arguments: list[str]) -> int:
    settings = parse(
        StreamSettings, [argument for argument in arguments if argument != "--stream"], "veca features --stream"
    )
    images = in_folders(settings.paths)
    check_inputs([one.path for one in images], settings.where, "stream")
    refuse_file(settings.out)
    if settings.channels is not None and settings.format != "tif":
        raise InputError("--channels chooses what a GeoTIFF holds: give --format tif too")
    with launched(settings.device) as ranks:
        if ranks.count > 1 and (settings.format == "tif" or settings.window is not None):
            raise InputError("several ranks share one whole image and one .npy or Zarr: no --window, no --format tif")
        return stream_all(images, settings, ranks)


def stream_all(images: list[Input], settings: StreamSettings, ranks: Ranks) -> int:
    dtype = pick_dtype(settings.dtype, ranks.device)
    model = load(settings.model, cores=settings.cores, device=ranks.device, dtype=dtype)
    with ExitStack() as held:
        ranks.from_first(lambda: take_folder(settings.out, {settings.dense(one).parent for one in images}, held))
        return stream_each(model, images, settings, ranks)


def take_folder(out: Path, inside: set[Path], held: ExitStack) -> None:
    """For this run alone; without what others left when they were killed."""
    try:
        held.enter_context(lock_folder(out))
    except OSError as error:
        raise InputError(f"cannot write {error.filename or out}: {error.strerror or error}") from error
    for folder in inside:
        remove_partials(folder)
    read_rows(out / "index.jsonl")  # one that is damaged is known now


def stream_each(model: Veca, images: list[Input], settings: StreamSettings, ranks: Ranks) -> int:
    digest = weights_digest(model)
    failed: list[str] = []
    for one in images:
        path, made = one.path, asked(one.path, digest, settings)
        if ranks.from_first(lambda one=one, made=made: is_done(one, made, settings)):  # type: ignore[misc]
            ranks.say(f"{settings.dense(one)}: was there before")
            continue
        check_place(one, settings)
        try:
            with settings.open(path) as picture:
                stream_one(model, one, picture, made, settings, ranks)
        except NoRoom:
            raise
        except InputError as error:
            if len(images) == 1 or ranks.count > 1:  # the others may be waiting in the middle of this image
                raise
            failed.append(str(error) if str(path) in str(error) else f"{path}: {error}")
            put_row(one, settings, {"error": str(error)})
        except OSError as error:  # disk full, no permission
            raise InputError(f"cannot write {error.filename or settings.out}: {error.strerror or error}") from error
        except (RuntimeError, MemoryError) as error:
            if not no_memory(error):
                raise
            raise InputError(f"{path}: its tokens do not fit in memory; use --tokens float16 or --spill DIR") from error
    for line in failed:
        print(f"could not be read: {line}", file=sys.stderr)
    return 1 if failed else 0


def asked(path: Path, digest: str, settings: StreamSettings) -> dict[str, Any]:
    """What decides the features of an image: with equal ones, they need not be made again."""
    names = ("cores", "where", "window", "format", "channels", "tokens")
    stamps = {"image": file_stamp(path), "mask": file_stamp(Path(settings.where or ""))}
    return {
        **{name: getattr(settings, name) for name in names},
        **{"weights": digest, "stamps": stamps, "view": settings.view()},
    }


def is_done(one: Input, made: dict[str, Any], settings: StreamSettings) -> bool:
    if not settings.dense(one).exists():
        return False
    try:
        with np.load(settings.rest(one)) as stored:
            return bool(json.loads(str(stored["about"]))["made"] == made)
    except Exception:  # damaged, or of an older version
        return False


def put_row(one: Input, settings: StreamSettings, row: dict[str, Any]) -> None:
    """Into the index that `veca features` has too; what an earlier run said of the same file goes."""
    index, image = settings.out / "index.jsonl", os.path.abspath(one.path)  # noqa: PTH100  (a link keeps its own name)
    told = (None, output_of(one, settings))
    others = [old for old in read_rows(index) if "streamed" not in old or old["path"] != image or
              old.get("output") not in told]  # fmt: skip
    write_rows(index, [*others, {"path": image, **row, "streamed": True}])


def output_of(one: Input, settings: StreamSettings) -> str:
    """As the index names it."""
    return settings.dense(one).relative_to(settings.out).as_posix()


def check_place(one: Input, settings: StreamSettings) -> None:
    """What will be written has a place: known now, not after the last layer."""
    settings.dense(one).parent.mkdir(parents=True, exist_ok=True)
    for file in (settings.dense(one), settings.rest(one)):
        if file.is_dir() and file.suffix != ".zarr":
            raise InputError(f"{file} is a folder, not a file; use another --out")


def sink_for(file: Path, picture: Picture, patch: int, settings: StreamSettings) -> Sink:
    if settings.format == "tif":
        chosen = None if settings.channels is None else numbers(settings.channels, "--channels", tuple(range(1, 100)))
        if picture.crs is None:
            print(f"{file}: in pixels of the image, which has no reference system", file=sys.stderr)
        return GeoTiffSink(file, picture, patch, None if chosen is None else [int(number) for number in chosen])
    return NpySink(file) if settings.format == "npy" else ZarrSink(file, picture, patch, settings.format != "zarr")


def check_disk(sink: Sink, model: Veca, grid: tuple[int, int], patches: int, settings: StreamSettings) -> None:
    """Room for the features, and for the tokens where they go to the same disk: known before the first layer."""
    dtype = np.dtype(settings.tokens)
    size = sink.size(grid, model.config.feature_width, dtype)
    if settings.spill is not None and settings.window is None:
        disks = {folder_above(place).stat().st_dev for place in (settings.spill, sink.path)}
        size += patches * model.config.width * dtype.itemsize if len(disks) == 1 else 0
    check_room(sink.path, size)


def stream_one(
    model: Veca, one: Input, picture: Picture, made: dict[str, Any], settings: StreamSettings, ranks: Ranks
) -> None:
    began = time.monotonic()
    strips = Strips(picture, model.patch_size)
    grid = strips.height // model.patch_size, strips.width // model.patch_size
    sink = sink_for(settings.dense(one), picture, model.patch_size, settings)
    found: dict[str, Any] = {"grid": np.array(grid)}
    inside = None if settings.where is None else mask_of(settings.where, grid, strips)
    check_disk(sink, model, grid, grid[0] * grid[1] if inside is None else int(inside.sum()), settings)
    if ranks.first:
        print(picture.describe(), file=sys.stderr)
    with reporting(one.name, ranks.first) as report:
        if settings.window is not None:
            pixels = window_pixels(settings.window, picture)
            dtype = np.dtype(settings.tokens)
            with sink.opened(grid, model.config.feature_width, dtype) as write:
                for top, rows in windowed(model, strips, pixels, settings.cores, inside, report):
                    if dtype == np.float16 and float(np.abs(rows).max()) > float(np.finfo(np.float16).max):
                        raise InputError("a feature is too large for float16; use --tokens float32")
                    write(0, top, rows)
        else:
            result = model.stream(
                picture,
                cores=settings.cores,
                tile=settings.tile,
                tokens=settings.tokens,
                spill=settings.spill,
                out=sink,
                report=report,
                where=inside,
                group=ranks.group,
            )
            for name in ("cls", "cores", "coords"):
                found[name] = getattr(result, name)[0].float().cpu().numpy()
    if not ranks.first:
        return
    about = json.dumps({"made": made, "image": str(one.path), **picture.about()})
    with whole_file(settings.rest(one)) as temporary:
        np.savez(temporary, about=np.array(about), **found)
    put_row(one, settings, {"output": output_of(one, settings), "size": list(strips.size), "grid": list(grid)})
    size = f"{strips.width}×{strips.height}"
    line = f"{grid[0]}×{grid[1]} features of {size} pixels in {time.monotonic() - began:.1f} s"
    line += "" if inside is None else f", {float(inside.float().mean()):.0%} of them inside the mask"
    print(f"{settings.dense(one)}: {line}")
