"""The teacher's features on disk: computed once for fixed views of each image, then read instead of the teacher.

    DIR/cache.json                             what was computed; another teacher, data or augmentation is refused
    DIR/size-196/view-0/shard-00012.safetensors    64 images: cls (64×D), patches (64×N×D), layers (64×L×N×D), valid,
                                                   content and stamp (which files these features are of)

Patches are float16: 0.15 MB a view for a small teacher at 196², 13 times that with the layers that hints need. The one
class token stays float32: it may differ little from image to image, and standardisation magnifies the difference.
Shards are written whole, so a build that was killed goes on with the first missing one. A shard that holds a photograph
which was replaced since under the same name counts as missing.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from veca.distill.data import Key, read_view
from veca.distill.settings import Distillation
from veca.distill.sources import TrainingImages
from veca.distill.teaching import Teaching
from veca.errors import InputError
from veca.files import read_json, whole_file, write_json
from veca.training.ranks import Ranks, StopSignal

SHARD = 64  # images


class TeacherCache:
    """Reads features by key. Small enough to be handed to a worker: it holds paths, not features."""

    def __init__(self, folder: Path, sizes: tuple[int, ...], layers: bool) -> None:
        self.folder, self.sizes, self.layers = folder, sizes, layers

    def read(self, key: Key) -> tuple[Tensor, ...] | None:
        """cls (D), patches (N×D) and, where hints need them, layers (L×N×D).

        None: the image was unreadable when they were computed.
        """
        names = ("valid", "cls", "patches", "layers") if self.layers else ("valid", "cls", "patches")
        path = shard_path(self.folder, key.size, key.view, key.number // SHARD)
        row = key.number % SHARD
        try:
            file = open_shard(path)
            valid, *features = (file.get_slice(name)[row : row + 1][0] for name in names)
        except FileNotFoundError as error:
            raise InputError(f"{path} is missing: every rank must see --cache-teacher, shared or as a copy") from error
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} is damaged: remove it, and the same command makes it again") from error
        return tuple(features) if valid else None


@functools.lru_cache(maxsize=512)
def open_shard(path: Path) -> Any:
    return safe_open(path, framework="pt")


def shard_path(folder: Path, size: int, view: int, number: int) -> Path:
    return folder / f"size-{size}" / f"view-{view}" / f"shard-{number:05d}.safetensors"


def describe(folder: Path, settings: dict[str, Any]) -> bool:
    """Write what the cache holds, or refuse a folder that holds something else; returns whether it holds layers."""
    about = folder / "cache.json"
    if about.is_file():
        found = {"trivial_augment": True} | read_json(about)  # older ones were all made with it
        layers = found.get("layers")
        if not isinstance(layers, bool):
            raise InputError(f"{about} is damaged: it does not say whether there are layers; give another folder")
        if not settings["layers"]:  # features of the layers do no harm
            found["layers"] = False
        wrong = [f"{name}: {found[name]} there, {value} here" for name, value in settings.items()
                 if found.get(name, value) != value]  # fmt: skip
        if wrong:
            raise InputError(f"the cache in {folder} is of another run ({'; '.join(wrong)}): give another folder")
        return layers
    write_json(about, settings)
    return bool(settings["layers"])


def wanted_shards(images: TrainingImages, sizes: Iterable[int], views: int) -> list[tuple[int, int, int]]:
    """(size, view, shard) of everything that a run reads."""
    shards = -(-len(images) // SHARD)
    return [(size, view, number) for size in sizes for view in range(views) for number in range(shards)]


def refuse_unshared(folder: Path, there: Iterable[Path], ranks: Ranks) -> None:
    """Before anything is computed: what the first rank has found, all must see."""
    seen = all(path.is_file() for path in there)
    if blind := ranks.together([] if seen else [str(ranks.rank)]):
        raise InputError(
            f"rank {', '.join(blind)} does not see what the first rank has in {folder}: "
            "--cache-teacher must be a folder that all ranks share, or be copied to each"
        )


def holds(path: Path, images: TrainingImages, number: int) -> bool:
    """Whether a shard is there and of these very images. What an older version wrote is taken by their names."""
    if not path.is_file():
        return False
    try:
        with safe_open(path, framework="pt") as file:
            if "stamp" not in file.keys():  # noqa: SIM118  # not a dictionary
                return True
            stamps, contents = file.get_tensor("stamp").tolist(), file.get_tensor("content").tolist()
    except (SafetensorError, OSError):
        return True  # damaged: whoever reads it says so
    for index, stamp, content in zip(members(images, number), stamps, contents, strict=True):
        if tuple(stamp) != images.stamp(index) and content != content_of(images, index):
            return False
    return True


def members(images: TrainingImages, number: int) -> range:
    """The images of a shard."""
    return range(number * SHARD, min(len(images), (number + 1) * SHARD))


def content_of(images: TrainingImages, index: int) -> int:
    """A digest of an image's bytes."""
    try:
        data = images.read(index)
    except (InputError, OSError):
        return 0
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True)


def build_shard(
    folder: Path, size: int, view: int, number: int, images: TrainingImages, teaching: Teaching, *, layers: bool,
    augment_seed: int, trivial: bool, device: torch.device,
) -> None:  # fmt: skip
    """Compute and write one shard."""
    pixels, valid = [], []
    stamps, contents = [], []
    for index in members(images, number):
        stamps.append(images.stamp(index))  # before it is read: what changes meanwhile is noticed
        contents.append(content_of(images, index))
        try:
            pixels.append(read_view(images, Key(index, view, size), augment_seed, trivial))
            valid.append(True)
        except (InputError, OSError):
            pixels.append(torch.zeros(3, size, size))
            valid.append(False)
    out = teaching(torch.stack(pixels).to(device), layers)
    tensors = {
        "valid": torch.tensor(valid), "cls": out.cls.cpu().contiguous(), "patches": out.patches,
        "stamp": torch.tensor(stamps), "content": torch.tensor(contents),
    }  # fmt: skip
    if out.layers is not None:
        tensors["layers"] = out.layers.transpose(0, 1)
    for name in ("patches", "layers"):
        if name in tensors:
            tensors[name] = tensors[name].half().contiguous().cpu()
            if not tensors[name].isfinite().all():
                raise InputError(f"the teacher's {name} do not fit float16 (values over 65504): train without a cache")
    with whole_file(shard_path(folder, size, view, number)) as temporary:
        save_file(tensors, temporary)


def prepare_cache(
    settings: Distillation,
    images: TrainingImages,
    teaching: Teaching,
    ranks: Ranks,
    stop: StopSignal,
    identity: dict[str, Any],
) -> TeacherCache | None:
    """Compute what the cache lacks, shared out over the ranks."""
    folder = settings.cache_teacher
    if folder is None:
        return None
    sizes = settings.cache_resolutions or settings.resolutions
    about = {
        "teacher": identity["teacher weights"], "images": identity["images"], "augment_seed": settings.augment_seed,
        "trivial_augment": settings.trivial_augment, "patch_size": teaching.patch_size, "layers": settings.wants_layers,
        "image sizes": identity["image sizes"], "bfloat16": teaching.bfloat16,
    }  # fmt: skip
    layers = ranks.from_first(lambda: describe(folder, about))
    wanted = wanted_shards(images, sizes, settings.views)
    everything = ranks.from_first(
        lambda: [shard for shard in wanted if not holds(shard_path(folder, *shard), images, shard[2])]
    )
    there = {*wanted} - {*everything}
    refuse_unshared(folder, [folder / "cache.json", *(shard_path(folder, *shard) for shard in there)], ranks)
    missing: list[tuple[int, int, int]] = everything[ranks.rank :: ranks.count]
    began = time.monotonic()
    for number, (size, view, shard) in enumerate(missing):
        if stop.asked:
            raise InputError("stopped while the teacher's features were computed; the same command continues")
        build_shard(
            folder, size, view, shard, images, teaching, layers=layers, augment_seed=settings.augment_seed,
            trivial=settings.trivial_augment, device=ranks.device,
        )  # fmt: skip
        if number % 8 == 0 or number == len(missing) - 1:
            left = (time.monotonic() - began) / (number + 1) * (len(missing) - number - 1)
            ranks.say(f"caching the teacher: {number + 1}/{len(missing)} shards, {left / 60:.1f} min left")
    ranks.wait()
    open_shard.cache_clear()  # what this process read before may have been replaced
    return TeacherCache(folder, sizes, settings.wants_layers)
