"""`veca features --engine ray`: the same features of the same images, by Ray Data on any number of machines.

The driver lists files; tasks read and decode them; actors, each with a copy of the model, are `Extractor`s; Ray writes
the Parquet files. What a lost worker had in hand Ray does again. What is written is not computed again.
"""

from __future__ import annotations

import logging
import math
import tarfile
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from veca.errors import InputError, require
from veca.extract.command import made_with, new_extractor, options, report
from veca.extract.decoding import decode_one
from veca.extract.extractor import UNREAD, Extractor, absolute
from veca.extract.parquet import ParquetFolder, schema, table_of, text_of
from veca.extract.sources import SHARDS, find_files, read_whole

if TYPE_CHECKING:
    from veca.extract.command import FeaturesSettings

# Of a CPU. Actors hold theirs to the end, and those of a lost node start again on what is left: did they count for
# more, they would leave nothing for the tasks that read and write, or not fit themselves, and all would wait for ever.
TASK, ACTOR = 0.25, 0.001
FILES = 64  # images that a task reads; what is written of them is kept if the run ends


def run(settings: FeaturesSettings) -> int:
    if settings.format == "npz" or settings.shard is not None:
        raise InputError("--engine ray writes Parquet and shares the images out itself: leave --format and --shard out")
    ray = require("ray", "ray")
    require("ray.data", "ray")
    files = find_files(settings.paths)
    settings.dtype = "float32" if settings.dtype == "auto" else settings.dtype  # all machines must agree
    where, settings.device = settings.device, "cpu"
    extractor = new_extractor(settings)  # what is wrong with the model is said here, not by a worker
    settings.device = where
    with ParquetFolder(settings.out, made_with(extractor, settings)) as folder:
        before = set(folder.done)
        todo = [file for file in files if file.endswith(SHARDS) or not folder.has(file)]
        if todo:
            connect(ray, settings.address)
            try:
                pipeline(ray, todo, before, extractor.patch_size, settings).write_parquet(
                    folder.folder, filesystem=folder.files, ray_remote_args={"num_cpus": TASK}
                )
            except ray.exceptions.RayError as error:  # a model that its workers do not see, for instance
                said = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
                raise InputError(
                    f"Ray gave up ({said[-1][:300]}); what is written stays, and the same command continues"
                ) from error
        good, failed = folder.read_index()
    return report(settings.out, len(before), len(good - before), failed)


def connect(ray: Any, address: str | None) -> None:
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    logging.getLogger("ray.data.exceptions").setLevel(logging.CRITICAL)  # pages of stack; `run` has it in one line
    if ray.is_initialized():
        return
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # of no kind of its own, where Ray does not start in time
        what = "Ray does not start here" if address is None else f"no Ray cluster at {address}"
        raise InputError(f"{what}: {' '.join(str(error).split())[:160]}") from error


def pipeline(ray: Any, files: list[str], done: set[str], patch_size: int, settings: FeaturesSettings) -> Any:
    """From files to rows, as Ray's dataset: nothing runs yet."""
    shards = sum(file.endswith(SHARDS) for file in files)
    blocks = shards + math.ceil((len(files) - shards) / FILES)
    inside = {name for name in done if any(f"{kind}/" in name for kind in SHARDS)}
    gpu = settings.device.startswith("cuda") or (
        settings.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0
    )
    workers = max(1, min(settings.workers, int(ray.cluster_resources().get("CPU", 0))))  # no more copies than CPUs
    read = partial(decoded, done=inside, size=settings.size, patch_size=patch_size, batch=settings.batch)
    return (
        ray.data.from_items([{"file": file} for file in files], override_num_blocks=blocks)
        .map_batches(read, batch_size=None, num_cpus=TASK)
        .map_batches(
            Rows,
            batch_size=settings.batch,
            fn_constructor_kwargs={"model": absolute(settings.model), **options(settings)},
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=workers, initial_size=workers),
            num_cpus=ACTOR,
            num_gpus=1 if gpu else None,
        )
    )


def decoded(files: dict[str, Any], done: set[str], size: int, patch_size: int, batch: int) -> Iterator[dict[str, Any]]:
    """The images of some files, a batch at a time: names, sizes, pixels or errors."""
    rows: list[tuple[str, tuple[int, int], np.ndarray[Any, Any], str]] = []
    for file in files["file"]:
        for name, data, problem in images_in(str(file)):
            if text_of(name) in done:
                continue
            found = None if problem else decode_one(name, partial(bytes, data), size, patch_size)
            error = problem or (found.error if found else "")
            pixels = found.pixels if found is not None and found.pixels is not None else UNREAD
            rows.append((text_of(name), found.size if found else (0, 0), pixels, text_of(error)))
            if len(rows) == batch:
                yield columns(rows)
                rows = []
    if rows:
        yield columns(rows)


def images_in(file: str) -> Iterator[tuple[str, bytes, str]]:
    """Name and bytes of every image, or what is wrong with the file that holds them."""
    try:
        for name, data in read_whole(file):
            yield name, data, ""
    except (InputError, OSError, ValueError, EOFError, tarfile.TarError) as error:  # pyarrow's are among these
        yield file, b"", " ".join(str(error).split()).removeprefix(f"{file}: ") or type(error).__name__


def columns(rows: list[tuple[str, tuple[int, int], np.ndarray[Any, Any], str]]) -> dict[str, Any]:
    paths, sizes, pixels, errors = zip(*rows, strict=True)
    images = np.empty(len(rows), dtype=object)
    images[:] = list(pixels)
    return {
        "path": np.array(paths, dtype=object),
        "size": np.array(sizes, np.int32),
        "image": images,
        "error": np.array(errors, dtype=object),
    }


class Rows:
    """An `Extractor` whose answer is the table that is written."""

    def __init__(self, **settings: Any) -> None:
        self.extractor = Extractor(**settings)

    def __call__(self, batch: dict[str, Any]) -> Any:
        found = self.extractor(batch)
        kind = self.extractor.dense, self.extractor.patches != 1
        names = [name for name in schema(*kind).names if name != "error"]
        rows = [
            {"path": path, "error": error} if error else {name: found[name][row] for name in names}
            for row, (path, error) in enumerate(zip(found["path"], found["error"], strict=True))
        ]
        return table_of(rows, *kind)
