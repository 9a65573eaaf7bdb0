"""`veca features`: features of many images, one .npz each, in a folder that a second run continues.

    veca features photos/ --out features/ --size 512 --cores 64 --dense

The out folder holds `settings.json` (what every file in it was made with), `index.jsonl` (one row an image) and the
features, `<folder>-<digest of the folder's path>/<file name>.npz`, so that equal names in different folders stay apart.
A row is written after its .npz is in place, so whatever the index lists is whole.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import tyro
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from veca.cli import parse
from veca.devices import Dtype, pick_device, pick_dtype
from veca.errors import InputError
from veca.feature_folder import FeatureFolder
from veca.folders import refuse_special, walk
from veca.images import SUFFIXES, open_image, resize_to_patches, to_tensor
from veca.model import Veca, VecaOutput
from veca.weights import load, weights_digest
from veca.workers import end_with_parent

PENDING = 4  # batches' worth of decoded images that may wait for others of their grid


@dataclass
class Settings:
    """Write features of images as .npz files: `cls` (D), and with --dense `patches` (h×w×D), both float32.

    Folders are searched for images at any depth (hidden files and folders are left out). DIR/index.jsonl gets one row
    an image: path, output, size [width, height], grid [h, w], or its error. Run again with the same DIR, it continues:
    images in the index are not read again, images that failed are tried again.

    Exit status: 0 all images done, 1 some could not be read (they are listed at the end), 2 a wrong argument.

    Examples:
      veca features photos/ --out features/
      veca features a.jpg b.png scans/ --out features/ --size 1024 --cores 16 --dense
      veca features photos/ --out fine/ --dense --stride 7
      veca features --stream big.tif --out features/     (any size, exactly; --stream --help has its own options)

    Read one back: np.load("features/photos-0a1b2c3d4e/a.jpg.npz")["cls"]
    """

    paths: Annotated[
        tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="PATH…", help_behavior_hint="(required)")
    ]
    """images, and folders of images"""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """folder to write to"""
    size: int = 512
    """the shorter side in pixels; the aspect ratio is kept, both sides are rounded to whole patches"""
    cores: int = 64
    """the budget: how many cores are active"""
    model: str = "veca-s14"
    """a bundled name, a model folder, a .safetensors, an authors' .pt or a hub id"""
    dense: tyro.conf.FlagCreatePairsOff[bool] = False
    """write a feature for every patch too"""
    stride: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """with --dense: pixels from one feature to the next, from 1 to the patch size (None); fewer make a finer map"""
    batch: int = 16
    """images of equal grid that go through the model together"""
    workers: int = min(8, max(1, (os.cpu_count() or 2) // 2))
    """processes that decode; 0 decodes in this one"""
    dtype: Dtype = "auto"
    """precision of the network; auto: bfloat16 where the CPU or GPU computes in it, else float32"""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1, mps"""


class Decoded(NamedTuple):
    path: Path
    size: tuple[int, int] = (0, 0)  # width, height of the upright image
    pixels: np.ndarray[Any, Any] | None = None  # H×W×3 uint8, whole patches: a quarter of the floats between processes
    error: str = ""


class Images(Dataset[Decoded]):
    """Decodes in the workers; an image that fails becomes a message, not an exception."""

    def __init__(self, paths: list[Path], size: int, patch_size: int) -> None:
        self.paths, self.size, self.patch_size = paths, size, patch_size

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Decoded:
        path = self.paths[index]
        try:
            refuse_special(path)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow's comments on damaged tags would tear the progress bar
                image = open_image(path)
            pixels = np.asarray(resize_to_patches(image, self.size, self.patch_size, name=str(path)))
        except InputError as error:
            return Decoded(path, error=str(error).removeprefix(f"{path}: "))
        except MemoryError:
            return Decoded(path, error="not enough memory to decode it")
        return Decoded(path, image.size, pixels)


def main(arguments: list[str]) -> int:
    if "--stream" in arguments:
        from veca.features_stream import main as main_stream

        return main_stream(arguments)
    # As the description the docstring is shown whole; by itself tyro would leave the examples out.
    settings = parse(Settings, arguments, "veca features")
    for name, least in (("size", 1), ("batch", 1), ("workers", 0)):
        if getattr(settings, name) < least:
            raise InputError(f"--{name} must be at least {least}, not {getattr(settings, name)}")
    if settings.stride is not None and not settings.dense:
        raise InputError("--stride is about the feature of every patch: it needs --dense")
    paths = find_images(settings.paths)
    device = pick_device(settings.device)
    dtype = pick_dtype(settings.dtype, device)
    model = load(settings.model, cores=settings.cores, device=device, dtype=dtype)
    patch = model.patch_size
    if settings.stride is not None and not 1 <= settings.stride <= patch:
        raise InputError(f"--stride lies between 1 and this model's patch size {patch}, not {settings.stride}")
    made_with = {
        "model": settings.model,
        "weights": weights_digest(model),
        "size": settings.size,
        "cores": settings.cores,
        "dtype": str(dtype).removeprefix("torch."),
        "dense": settings.dense,
        "stride": settings.stride,
    }
    try:
        with FeatureFolder(settings.out, made_with) as folder:
            todo = [path for path in paths if not folder.has(path)]
            failed = extract(model, todo, folder, settings)
    except OSError as error:  # disk full, no permission
        raise InputError(f"cannot write {error.filename or settings.out}: {error.strerror or error}") from error
    before = len(paths) - len(todo)
    print(
        f"{settings.out}: {len(todo) - len(failed)} images done"
        + (f", {before} were there before" if before else "")
        + (f", {len(failed)} could not be read:" if failed else "")
    )
    for item in failed:
        print(
            f"  {str(item.path)!r}: {item.error}" if "\n" in str(item.path) else f"  {item.path}: {item.error}",
            file=sys.stderr,
        )
    return 1 if failed else 0


def extract(model: Veca, paths: list[Path], folder: FeatureFolder, settings: Settings) -> list[Decoded]:
    """Decode, batch by grid, compute, write; returns what could not be read."""
    failed: list[Decoded] = []
    if not paths:
        return failed
    with progress() as bar:
        task = bar.add_task("features", total=len(paths))
        together = settings.batch if settings.stride is None else 1  # finer maps are large
        for batch in batches(decode(paths, model.patch_size, settings), together):
            if batch[0].error:
                folder.add_error(batch[0].path, batch[0].error)
                failed += batch
            else:
                write_batch(model, batch, folder, settings)
            bar.advance(task, len(batch))
    return failed


def decode(paths: list[Path], patch_size: int, settings: Settings) -> Iterator[Decoded]:
    """Images in the order of `paths`, decoded ahead by the workers."""
    loader = DataLoader(
        Images(paths, settings.size, patch_size),
        batch_size=None,
        num_workers=min(settings.workers, len(paths)),
        collate_fn=_as_it_is,
        prefetch_factor=4 if settings.workers else None,
        worker_init_fn=end_with_parent,
    )
    try:
        yield from loader
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise InputError(
            "a decoding process died, most likely for want of memory; run the same command again to continue, "
            "with fewer --workers"
        ) from error


def batches(images: Iterator[Decoded], size: int) -> Iterator[list[Decoded]]:
    """Up to `size` images of equal grid; an unreadable one comes alone, at once.

    At most PENDING × size images wait: when that many have found no company, the largest group goes as it is.
    """
    waiting: defaultdict[tuple[int, ...], list[Decoded]] = defaultdict(list)
    for image in images:
        if image.pixels is None:
            yield [image]
            continue
        group = waiting[image.pixels.shape]
        group.append(image)
        if len(group) < size and sum(map(len, waiting.values())) < PENDING * size:
            continue
        yield waiting.pop(max(waiting, key=lambda shape: len(waiting[shape])))
    yield from waiting.values()


def no_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)


@torch.inference_mode()
def write_batch(model: Veca, batch: list[Decoded], folder: FeatureFolder, settings: Settings) -> None:
    images = torch.stack([to_tensor(Image.fromarray(item.pixels)) for item in batch if item.pixels is not None])
    try:
        found = list(features_of(model, images, settings))
    except RuntimeError as error:
        if not no_memory(error):
            raise
        height, width = images.shape[-2:]
        raise InputError(
            f"not enough memory for {len(batch)} images of {width}×{height}; run the same command again to continue, "
            f"with a smaller --batch or --size"
        ) from error
    for item, (cls, dense) in zip(batch, found, strict=True):
        features = {"cls": cls.float().cpu().numpy()}
        if settings.dense:
            features["patches"] = dense.float().cpu().numpy()
        folder.add(item.path, features, item.size, (dense.shape[0], dense.shape[1]))


def features_of(model: Veca, images: Tensor, settings: Settings) -> Iterator[tuple[Tensor, Tensor]]:
    """The global feature (D) and the map (h×w×D) of each image, on the model's grid or on the finer one of a stride."""
    if settings.stride is not None:
        for image in images:
            scan = model.scan(image, cores=settings.cores)
            yield scan.cls, scan.look(stride=settings.stride).features
        return
    weight = model.patch_embed.proj.weight
    output: VecaOutput = model(images.to(weight.device, weight.dtype), cores=settings.cores)
    yield from zip(output.cls, output.patches.unflatten(1, output.grid), strict=True)


def find_images(paths: tuple[Path, ...]) -> list[Path]:
    """Every image named or found in a folder, absolute, once, in a fixed order."""
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            top, walked = Path(os.path.abspath(path)), walk(path)  # noqa: PTH100
            found.update(dict.fromkeys(top / name for name in sorted([*walked.images, *walked.special])))
        elif path.exists():
            found[Path(os.path.abspath(path))] = None  # noqa: PTH100  (a link keeps its own name)
        else:
            raise InputError(f"{path}: no such file or folder")
    if not paths:
        raise InputError("name at least one image or folder; `veca features --help` has examples")
    if not found:
        raise InputError(f"no images in {', '.join(map(str, paths))} (looking for {' '.join(SUFFIXES)})")
    return list(found)


class Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:.1f} images/s" if speed else "… images/s", style="progress.data.speed")


def progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Rate(), TimeRemainingColumn())
    return Progress(*columns, console=Console(file=sys.stderr))


def _as_it_is(item: Any) -> Any:  # DataLoader's types expect a list of items
    return item
