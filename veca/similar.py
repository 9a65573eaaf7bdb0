"""`veca similar`: where else in a large image, or in a folder of scans, it looks like here."""

from __future__ import annotations

import csv
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import tyro
from PIL import Image
from torch import Tensor

from veca.cli import parse
from veca.devices import Dtype, no_memory, pick_device, pick_dtype
from veca.errors import InputError
from veca.files import refuse_file, whole_file, write_json
from veca.large.options import ViewOptions, check_inputs
from veca.large.picture import Picture, Strips
from veca.large.place import grid_transform, to_full, write_regions
from veca.large.sinks import write_geotiff
from veca.large.source import Array
from veca.large.where import mask_of
from veca.model import Veca
from veca.progress import reporting
from veca.scan import Scan
from veca.scan_command import numbers
from veca.scan_file import open_scan, scan_header
from veca.streaming import Report, grid_of
from veca.weights import load, weights_digest
from veca.windows import window_pixels, windowed

HEAT = 1600  # pixels along the longer side of the picture
Place = tuple[int, int, float]  # row and column of the patch, cosine
COLD, WARM = np.array([20, 20, 60]), np.array([255, 220, 60])


@dataclass(kw_only=True)
class SimilarSettings(ViewOptions):
    """Find the places that look like one place: a heat map as a picture, and the most similar places as coordinates.

    DIR gets heat.png, places.csv, places.geojson (QuPath imports it over a slide; a scene's is in longitude and
    latitude) and about.json (the place, the model, the bands), for a scene also heat.tif. With --among, the place is
    looked for in every image of a folder of scans instead, which all get their own.

    Exit status: 0 all searched, 1 some scans could not be (they are listed at the end), 2 a wrong argument.

    Examples:
      veca similar photo.jpg --at 400,300                              (writes to photo.jpg.similar/)
      veca similar slide.svs --mpp 1 --at 20480,11264 --where auto --out similar/
      veca similar photo.jpg --at 400,300 --window 448 --top 5 --out similar/
      veca similar big.tif --at 400,300 --among scans/ --out similar/
    """

    image: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="IMAGE")]
    """any image that `veca scan` takes"""
    at: Annotated[str, tyro.conf.arg(metavar="X,Y")]
    """the place, in pixels of the file's finest level"""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """folder to write to; None: IMAGE.similar here"""
    top: int = 20
    """how many places to list"""
    among: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """a folder of scans (`veca scan`) of other images to search, with the model that scanned them"""
    window: Annotated[str | None, tyro.conf.arg(metavar="SIZE")] = None
    """overlapping windows of so many pixels (448), or of a length (500um): for things much smaller than the image"""
    where: Annotated[str | None, tyro.conf.arg(metavar="auto|MASK")] = None
    """auto (blank glass of slides, nodata of scenes), a picture or GeoJSON: what is outside is left out"""
    cores: int = 64
    """the budget: how many cores are active"""
    model: str = "veca-s14"
    """a bundled name, a model folder, a .safetensors, an authors' .pt or a hub id"""
    dtype: Dtype = "auto"
    """precision of the network; auto: bfloat16 where the CPU or GPU computes in it, else float32"""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1, mps"""

    @property
    def folder(self) -> Path:
        return Path(f"{self.image.absolute().name}.similar") if self.out is None else self.out


@dataclass
class Searched:
    """One image, and how similar each of its patches is."""

    name: str
    picture: Picture
    map: Array  # h×w cosines, NaN where the mask leaves out


class Found(NamedTuple):
    """One image's most similar patches."""

    name: str
    picture: Picture
    places: list[Place]


def main(arguments: list[str]) -> int:
    settings = parse(SimilarSettings, arguments, "veca similar")
    check_inputs((settings.image,), settings.where, "search")
    refuse_file(settings.folder)
    if settings.top < 1:
        raise InputError(f"--top is at least 1, not {settings.top}")
    if settings.among is not None and settings.window is not None:
        raise InputError("scans were made of whole images: search them without --window")
    scans = [] if settings.among is None else sorted(settings.among.rglob("*.scan"))
    if settings.among is not None and not scans:
        raise InputError(f"{settings.among}: no scans there; `veca scan` makes them")
    place = numbers(settings.at, 2, "--at")
    device = pick_device(settings.device)
    model = load(settings.model, cores=settings.cores, device=device, dtype=pick_dtype(settings.dtype, device))
    with settings.open(settings.image) as picture:
        print(picture.describe(), file=sys.stderr)
        strips = Strips(picture, model.patch_size)
        spot = spot_of(model, strips, place)
        inside = None if settings.where is None else mask_of(settings.where, grid_of(model, strips), strips)
        if inside is not None and not inside[spot]:
            raise InputError(f"--at {settings.at} lies outside the mask")
        failed: list[str] = []
        try:
            if settings.among is None:
                one = Searched(settings.image.name, picture, alike(model, strips, settings, inside, spot))
                found = [shown(one, model.patch_size, settings, spot)]
            else:
                scan = model.scan(picture, cores=settings.cores, where=inside)
                found, failed = among(model, scans, feature_at(scan, spot), settings)
        except (RuntimeError, MemoryError) as error:
            if not no_memory(error):
                raise
            raise InputError(
                f"{settings.image}: its tokens do not fit in memory; use --window, or a coarser --level or --scale"
            ) from error
        write_places(found, model.patch_size, settings)
        write_about(picture, spot, model, settings)
    for line in failed:
        print(f"could not be searched: {line}", file=sys.stderr)
    return 1 if failed else 0


def spot_of(model: Veca, strips: Strips, at: list[float]) -> tuple[int, int]:
    """The patch (row, column) that holds a place."""
    picture = strips.picture
    assert isinstance(picture, Picture)
    x, y = (value / by for value, by in zip(at, picture.downsample, strict=True))
    if not (0 <= x < strips.width and 0 <= y < strips.height):
        wide, high = (
            round(side * by) for side, by in zip((strips.width, strips.height), picture.downsample, strict=True)
        )
        raise InputError(f"--at {at[0]:g},{at[1]:g} is outside the image, whose patches cover {wide}×{high}")
    return int(y) // model.patch_size, int(x) // model.patch_size


def alike(
    model: Veca, strips: Strips, settings: SimilarSettings, inside: Tensor | None, spot: tuple[int, int]
) -> Array:
    """How similar each patch is to the one at the spot (h×w): features are made in parts, and only cosines kept."""
    picture = strips.picture
    assert isinstance(picture, Picture)
    with reporting(settings.image.name) as report:
        if settings.window is None:
            scan = model.scan(picture, settings.cores, where=inside, report=report)
            return look_for(scan, feature_at(scan, spot), report)
        pixels = window_pixels(settings.window, picture)
        only = torch.zeros(grid_of(model, strips), dtype=torch.bool)
        only[spot] = True
        rows = windowed(model, strips, pixels, settings.cores, only)  # only those windows that hold it
        wanted = next(part[spot[0] - top, spot[1]] for top, part in rows if top <= spot[0] < top + len(part))
        rows = windowed(model, strips, pixels, settings.cores, inside, report)
        return np.concatenate([cosine(part, wanted) for _, part in rows])


def feature_at(scan: Scan, spot: tuple[int, int]) -> Array:
    """Of the grid's patch at a row and column."""
    patch = scan.model.patch_size
    features: Array = scan.look(points=[((spot[1] + 0.5) * patch, (spot[0] + 0.5) * patch)]).features[0].numpy()
    return features


def unit(rows: Array) -> Array:
    """Of length 1."""
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12))


def cosine(features: Array, wanted: Array) -> Array:
    """h×w of h×w×D; not a number where there is no feature."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(features @ unit(wanted) / np.linalg.norm(features, axis=-1))


def among(model: Veca, scans: list[Path], wanted: Array, settings: SimilarSettings) -> tuple[list[Found], list[str]]:
    """One image after another, of which only the best places are kept; and what could not be searched."""
    found, failed = [], []
    for file in scans:
        try:
            image = scan_header(file).get("image")
            if not isinstance(image, str):
                raise InputError(f"{file}: it does not say which image it was made of")
            scan = open_scan(file, Path(image), model)
            picture = scan.strips.picture
            assert isinstance(picture, Picture)
            with picture:
                one = Searched(name_of(file, settings), picture, look_for(scan, wanted))
                found.append(shown(one, model.patch_size, settings, None))
        except InputError as error:
            failed.append(str(error) if str(file) in str(error) else f"{file}: {error}")
    return found, failed


def name_of(scan: Path, settings: SimilarSettings) -> str:
    """Of a scan in a folder, as `veca scan` named it: images in two folders below may have one name."""
    assert settings.among is not None
    return scan.relative_to(settings.among).as_posix().removesuffix(".scan")


def shown(one: Searched, patch: int, settings: SimilarSettings, spot: tuple[int, int] | None) -> Found:
    write_heat(one, patch, settings.folder, alone=settings.among is None)
    return Found(one.name, one.picture, places(one.map, settings.top, spot))


def look_for(scan: Scan, wanted: Array, report: Report | None = None) -> Array:
    """How similar each patch is (h×w), looking along a scan, some rows of the grid at a time."""
    patch, (height, width) = scan.model.patch_size, scan.grid
    step = max(1, scan.piece // width)
    parts = []
    for top in range(0, height, step):
        rows = min(step, height - top)
        look = scan.look(box=(0, top * patch, width * patch, rows * patch))
        parts.append(cosine(look.features.numpy(), wanted))
        if report is not None:
            report("look", top + rows, height)
    return np.concatenate(parts)


def places(alike: Array, top: int, spot: tuple[int, int] | None) -> list[Place]:
    """The most similar patches of one image, no two of them neighbours."""
    values = np.where(np.isnan(alike), -2, alike)
    if spot is not None:  # the place itself is known
        blank(values, *spot)
    listed: list[Place] = []
    while len(listed) < top:
        row, column = divmod(int(values.argmax()), values.shape[1])
        score = float(values[row, column])
        if score <= -2:
            break
        listed.append((row, column, score))
        blank(values, row, column)
    return listed


def blank(values: Array, row: int, column: int) -> None:
    values[max(0, row - 1) : row + 2, max(0, column - 1) : column + 2] = -2


def write_places(found: list[Found], patch: int, settings: SimilarSettings) -> None:
    """The best of all images: a table, and regions for each image that has some."""
    scores = sorted((-score, number, order) for number, one in enumerate(found)
                    for order, (_, _, score) in enumerate(one.places))[: settings.top]  # fmt: skip
    lines: list[list[Any]] = []
    for number, one in enumerate(found):
        mine = [(rank, *one.places[order]) for rank, (_, image, order) in enumerate(scores, 1) if image == number]
        cells = np.array([(column * patch, row * patch, patch, patch) for _, row, column, _ in mine]).reshape(-1, 4)
        file = "places.geojson" if settings.among is None else f"{one.name}.geojson"
        if mine or settings.among is None:
            names, alike = [str(rank) for rank, *_ in mine], [score for *_, score in mine]
            write_regions(settings.folder / file, one.picture, cells, names, alike)
        middles = to_full(one.picture, cells[:, :2] + patch / 2)
        lines += [
            [rank, one.name, f"{x:.10g}", f"{y:.10g}", f"{score:.4f}"]
            for (rank, _, _, score), (x, y) in zip(mine, middles.tolist(), strict=True)
        ]
    with (
        whole_file(settings.folder / "places.csv") as temporary,
        open(temporary, "w", newline="", encoding="utf-8") as table,
    ):
        writer = csv.writer(table)
        writer.writerow(["rank", "image", "x", "y", "similarity"])
        writer.writerows(sorted(lines))
    for rank, name, x, y, score in sorted(lines):
        print(f"{rank:>3}  {name}  {x},{y}  {score}")
    print(f"{settings.folder}: {len(lines)} places, heat maps of {len(found)} images")


def write_about(picture: Picture, spot: tuple[int, int], model: Veca, settings: SimilarSettings) -> None:
    """What was asked for: enough to ask it again."""
    patch = model.patch_size
    corners = to_full(picture, np.array([(spot[1], spot[0]), (spot[1] + 1, spot[0] + 1)]) * patch)
    asked = {name: getattr(settings, name) for name in ("at", "top", "model", "cores", "window", "where")}
    about = {
        "image": os.path.abspath(settings.image),  # noqa: PTH100  (a link keeps its own name)
        **asked,
        "among": None if settings.among is None else str(settings.among),
        "weights": weights_digest(model),
        "patch": [*corners[0].tolist(), *(corners[1] - corners[0]).tolist()],  # x, y, width, height
        "picture": {"bands": [band + 1 for band in picture.channels.bands], **picture.about()},
    }
    write_json(settings.folder / "about.json", about)


def write_heat(one: Searched, patch: int, out: Path, alone: bool) -> None:
    """The picture, with what is similar bright and warm; and a GeoTIFF of the cosines where there is a map."""
    height, width = one.map.shape
    small = one.picture.overview(HEAT).astype(np.float32)
    whole = [round(side * patch * cells / full) for side, cells, full in
             zip(small.shape, (height, width), reversed(one.picture.size), strict=False)]  # fmt: skip
    seen = np.nan_to_num(one.map, nan=-1.0).astype(np.float32)
    low, high = np.nanpercentile(one.map, (50, 99.9))
    heat = ((seen - low) / max(high - low, 1e-6)).clip(0, 1)
    size = (max(1, whole[1]), max(1, whole[0]))
    shown = np.asarray(Image.fromarray(heat).resize(size, Image.Resampling.BILINEAR))[..., None]
    grey = small[: size[1], : size[0]].mean(-1, keepdims=True)
    colour = COLD + (WARM - COLD) * shown
    blend = (0.35 * grey + 0.65 * colour).clip(0, 255).astype(np.uint8)
    with whole_file(out / ("heat.png" if alone else f"{one.name}.heat.png")) as temporary:
        Image.fromarray(blend).save(temporary)
    if one.picture.crs is not None:
        file = out / ("heat.tif" if alone else f"{one.name}.heat.tif")
        values = np.nan_to_num(one.map, nan=0.0).astype(np.float32)[..., None]
        write_geotiff(file, values, one.picture.crs, grid_transform(one.picture, patch))
