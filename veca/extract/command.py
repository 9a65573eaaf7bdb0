"""`veca features`: features of many images, in a folder that a second run continues.

    veca features photos/ --out features/ --cores 64 --dense
    veca features photos/ --out features/ --format parquet --shard 3/16      one of 16 machines
    veca features s3://bucket/photos --out s3://bucket/features --engine ray   a cluster

How the folder looks: `folder.py` (.npz files and an index), `parquet.py` (one table in parts).
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from rich.progress import MofNCompleteColumn, ProgressColumn, Task
from rich.text import Text

from veca.backbones import AUTO
from veca.cli import parse
from veca.devices import Dtype
from veca.errors import InputError, check_share
from veca.extract.decoding import Decoded, batches, decode
from veca.extract.extractor import Extractor
from veca.extract.folder import FeatureFolder
from veca.extract.parquet import ParquetFolder
from veca.extract.sources import Entry, find_entries
from veca.extract.writing import Writer
from veca.images import SIZE
from veca.progress import progress_bar
from veca.video import is_video


@dataclass
class FeaturesSettings:
    """Write features of images: `cls` (D), and with --dense `patches` (h×w×D).

    As .npz files (float32), DIR/index.jsonl gets one row an image: path, output, size [width, height], grid [h, w],
    or its error. With --format parquet the same is a table, patches in float16. Run again with the same DIR, it
    continues: what is written is not computed again, images that failed are tried again.

    Folders are searched for images at any depth (hidden files and folders are left out). Lists (.txt, one path a
    line), tar shards ('train-{000..015}.tar') and Parquet files with a column `image` are taken too; with
    --engine ray also at addresses such as s3://bucket/photos.

    Exit status: 0 all images done, 1 some could not be read (they are listed at the end), 2 a wrong argument.

    Examples:
      veca features photos/ --out features/
      veca features a.jpg b.png scans/ --out features/ --size 1024 --cores 16 --dense
      veca features photos/ --out fine/ --dense --stride 7
      veca features photos/ --out features/ --dense --size 896 --patches 0.5     (half of the tokens, half of the time)
      veca features 'train-{000..015}.tar' --out features/ --format parquet --shard 3/16
      veca features clip.mp4 --out features/ --share 0.25 --carry     (a video: one .npz a frame)
      veca features --stream big.tif --out features/     (any size, exactly; --stream --help has its own options)

    Read one back: np.load("features/photos-0a1b2c3d4e/a.jpg.npz")["cls"]
    """

    paths: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="PATH…", help_behavior_hint="(required)")
    ]
    """images, folders of images, lists, tar shards, Parquet files; or videos"""
    out: Annotated[str, tyro.conf.arg(metavar="DIR")]
    """folder to write to"""
    size: int = SIZE
    """the shorter side in pixels; the aspect ratio is kept, both sides are rounded to whole patches"""
    cores: int = 64
    """the budget: how many cores are active"""
    model: str = "veca-s14"
    """a bundled name, a model folder, a .safetensors, an authors' .pt or a hub id"""
    dense: tyro.conf.FlagCreatePairsOff[bool] = False
    """write a feature for every patch too"""
    share: float = 1.0
    """of a video: how many of a frame's patches the cores read, evenly spread"""
    carry: tyro.conf.FlagCreatePairsOff[bool] = False
    """with --share: paths are videos or folders of frames; the cores start from what they read in the last frames"""
    stride: Annotated[int | float | None, tyro.conf.arg(metavar="PIXELS")] = None
    """with --dense: pixels from one feature to the next, from 1 to the patch size (None); fewer make a finer map"""
    patches: float | Literal["auto"] = 1.0
    """share of the patches that is spent: large squares stand for several where there is little to see, and the output
    is as fine as ever; DIR/index.jsonl has the `tokens` of each image"""
    batch: int = 16
    """images of equal grid that go through the model together"""
    workers: int = min(8, max(1, (os.cpu_count() or 2) // 2))
    """processes that decode; 0 decodes in this one"""
    dtype: Dtype = "auto"
    """precision of the network; auto: bfloat16 where the CPU or GPU computes in it, else float32"""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1, mps"""
    format: Annotated[
        Literal["npz", "parquet"] | None, tyro.conf.arg(help_behavior_hint="(default: npz; with --engine ray parquet)")
    ] = None
    """a file for every image, or one table"""
    shard: Annotated[str | None, tyro.conf.arg(metavar="K/N")] = None
    """only the K-th of N shares of the images (from 1), written to DIR/shard-K-of-N: for the jobs of an array"""
    engine: Literal["local", "ray"] = "local"
    """this machine, or Ray Data: then --workers are the copies of the model, and --device names what each one takes"""
    address: Annotated[str | None, tyro.conf.arg(metavar="HOST", help_behavior_hint="(default: the one Ray finds)")] = (
        None
    )
    """with --engine ray: the cluster, such as ray://head:10001; none is found: a Ray on this machine"""


def main(arguments: list[str]) -> int:
    if "--stream" in arguments:
        from veca.features_stream import main as main_stream

        return main_stream(arguments)
    # As the description the docstring is shown whole; by itself tyro would leave the examples out.
    settings = parse(FeaturesSettings, arguments, "veca features")
    for name, least in (("size", 1), ("batch", 1), ("workers", 0)):
        if getattr(settings, name) < least:
            raise InputError(f"--{name} must be at least {least}, not {getattr(settings, name)}")
    if settings.stride is not None and not settings.dense:
        raise InputError("--stride is about the feature of every patch: it needs --dense")
    check_share(settings.share)
    if settings.patches != AUTO:
        check_share(settings.patches, "--patches")
    if settings.carry or any(map(is_video, settings.paths)):
        from veca.video_command import features

        return features(settings)
    if settings.share < 1:
        raise InputError("--share is for videos; of photos, `veca scan --share` reads a part")
    if settings.engine == "ray":
        from veca.extract.cluster import run

        return run(settings)
    if settings.address is not None:
        raise InputError("--address is about a cluster: it needs --engine ray")
    return run_here(settings)


def run_here(settings: FeaturesSettings) -> int:
    entries, out = find_entries(settings.paths), Path(settings.out)
    if settings.shard is not None:
        number, count = read_shard(settings.shard)
        entries, out = entries[number - 1 :: count], out / f"shard-{number}-of-{count}"
    extractor = new_extractor(settings)
    try:
        with folder_of(settings, out, made_with(extractor, settings)) as folder:
            todo = [entry for entry in entries if not folder.has(Path(entry.name))]
            failed = extract(extractor, todo, folder, settings)
    except OSError as error:  # disk full, no permission
        raise InputError(f"cannot write {error.filename or out}: {error.strerror or error}") from error
    return report(str(out), len(entries) - len(todo), len(todo) - len(failed), {str(f.path): f.error for f in failed})


def report(out: str, before: int, done: int, failed: dict[str, str]) -> int:
    print(
        f"{out}: {done} images done"
        + (f", {before} were there before" if before else "")
        + (f", {len(failed)} could not be read:" if failed else "")
    )
    for path, error in failed.items():
        print(f"  {path!r}: {error}" if "\n" in path else f"  {path}: {error}", file=sys.stderr)
    return 1 if failed else 0


def read_shard(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise InputError(f"--shard is the number of a share and how many there are, such as 3/16, not {text!r}")
    return int(found[1]), int(found[2])


def new_extractor(settings: FeaturesSettings) -> Extractor:
    return Extractor(settings.model, **options(settings))


def options(settings: FeaturesSettings) -> dict[str, Any]:
    """What `Extractor` takes besides the model."""
    return {
        name: getattr(settings, name) for name in ("cores", "size", "dense", "stride", "patches", "dtype", "device")
    }


def folder_of(
    settings: FeaturesSettings, out: Path, made: dict[str, Any]
) -> AbstractContextManager[FeatureFolder | ParquetFolder]:
    return ParquetFolder(out, made) if settings.format == "parquet" else FeatureFolder(out, made)


def made_with(extractor: Extractor, settings: FeaturesSettings) -> dict[str, Any]:
    """What every feature in a folder has in common."""
    backbone = extractor.backbone
    return {
        "model": settings.model,
        "weights": backbone.digest,
        "size": settings.size,
        "cores": settings.cores,
        "dtype": str(backbone.dtype).removeprefix("torch."),
        "dense": settings.dense,
        "stride": settings.stride,
        "share": settings.share,
        "patches": settings.patches,
        "carry": settings.carry,
    }


def extract(
    extractor: Extractor, entries: list[Entry], folder: FeatureFolder | ParquetFolder, settings: FeaturesSettings
) -> list[Decoded]:
    """Decode, batch by grid, compute, write; returns what could not be read."""
    failed: list[Decoded] = []
    if not entries:
        return failed
    together = settings.batch if settings.stride is None else 1  # finer maps are large
    images = decode(entries, settings.size, extractor.patch_size, settings.workers)
    with progress_bar(MofNCompleteColumn(), Rate()) as bar, Writer(folder) as writer:
        task = bar.add_task("features", total=len(entries))
        for batch in batches(images, together):
            if batch[0].error:
                failed += batch
                writer.put(batch, {})
            else:
                writer.put(batch, extractor(np.stack([item.pixels for item in batch if item.pixels is not None])))
            bar.advance(task, len(batch))
    return failed


class Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:.1f} images/s" if speed else "… images/s", style="progress.data.speed")
