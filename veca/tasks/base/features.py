"""Features that do not change, computed once: a bounded cache on disk, keyed by weights and by file content.

Features of a list of views are kept in shards, one safetensors file each. A shard's name is a digest of the weights,
the budget and the views (their files' content included), so a changed file or model is never mistaken for the old one,
and an interrupted run goes on where it stopped. The oldest shards make room when the cache is full.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from veca.backbones import Backbone
from veca.errors import InputError
from veca.extract import extractor
from veca.extract.extractor import Extractor
from veca.files import file_digest, whole_file
from veca.progress import progress
from veca.tasks.base.views import View

FORMAT = 2
ABANDONED = 3600  # seconds after which a half-written shard has no writer any more
SHARD = {True: 64, False: 1024}  # views a shard, with and without patch features


class Cache:
    """A folder of shards that never grows beyond `limit` bytes."""

    def __init__(self, folder: str | Path, limit: float) -> None:
        self.folder = Path(folder)
        self.limit = limit
        self.folder.mkdir(parents=True, exist_ok=True)

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"

    def use(self, key: str) -> Any | None:
        """The open shard, marked as just used; None if it is not there or damaged.

        It is left open: what another run evicts meanwhile stays readable.
        """
        path = self.path(key)
        try:
            shard = safe_open(path, framework="pt")
            os.utime(path)
            return shard
        except FileNotFoundError:
            return None
        except (SafetensorError, OSError):
            path.unlink(missing_ok=True)
            return None

    def put(self, key: str, tensors: dict[str, Tensor], keep: set[str]) -> Any:
        """Store a shard and open it; the least recently used ones outside `keep` are removed to make room.

        A shard for which there is no room stays in memory.
        """
        need = sum(tensor.nbytes for tensor in tensors.values()) + 4096
        shards = self._oldest_first()
        size = sum(bytes_ for _, bytes_, _ in shards)
        for _, bytes_, path in shards:
            if size + need <= self.limit:
                break
            if path.stem not in keep:
                size -= bytes_
                path.unlink(missing_ok=True)
        if size + need > self.limit:
            return InMemory(tensors)
        with whole_file(self.path(key)) as temporary:
            save_file(tensors, temporary)
            return safe_open(temporary, framework="pt")  # before another run can see it, and evict it

    def _oldest_first(self) -> list[tuple[float, int, Path]]:
        """(time of use, bytes, path) of every shard; what a killed run left half-written is removed."""
        found = []
        for path in self.folder.glob("*.safetensors"):
            try:
                state = path.stat()
            except FileNotFoundError:  # another run made room
                continue
            if not path.name.startswith("."):
                found.append((state.st_mtime, state.st_size, path))
            elif state.st_mtime < time.time() - ABANDONED:
                path.unlink(missing_ok=True)
        return sorted(found)


class InMemory(dict[str, Tensor]):
    """A shard that is not on the disk, read in the same way."""

    def get_tensor(self, name: str) -> Tensor:
        return self[name]

    get_slice = get_tensor


class Features:
    """Cached features of a list of views, read from the disk one view at a time."""

    def __init__(self, shards: Sequence[Any], count: int, per_shard: int) -> None:
        self.shards, self.count, self.per_shard = shards, count, per_shard

    def __len__(self) -> int:
        return self.count

    def global_features(self) -> Tensor:  # V×D
        return torch.cat([file.get_tensor("global").float() for file in self.shards])

    def dense(self, number: int) -> tuple[Tensor, Tensor]:  # D, N×D
        shard, row = divmod(number, self.per_shard)
        file = self.shards[shard]
        return file.get_slice("global")[row].float(), file.get_slice("patches")[row].float()

    def cores(self, number: int) -> Tensor:  # C×D
        shard, row = divmod(number, self.per_shard)
        cores: Tensor = self.shards[shard].get_slice("cores")[row].float()
        return cores


class LiveFeatures:
    """The same face, computed on every access: for test images that do not fit the cache."""

    def __init__(self, extractor: CachedExtractor, views: Sequence[View]) -> None:
        self.extractor, self.views = extractor, views

    def __len__(self) -> int:
        return len(self.views)

    def dense(self, number: int) -> tuple[Tensor, Tensor]:  # D, N×D
        found = self.extractor.compute(self.views[number].pixels()[None])
        return found.cls[0].cpu(), found.patches[0].cpu()


class CachedExtractor:
    """One model at one budget, and the cache its features go to."""

    def __init__(self, backbone: Backbone, cores: int | None, cache: Cache) -> None:
        self.backbone, self.cores, self.cache = backbone, cores, cache
        self.compute = Extractor(backbone, cores=cores).compute
        self.batch = 8 if backbone.device.type == "cpu" else 64

    def fits(self, views: Sequence[View]) -> bool:
        return self.bytes(views) <= self.cache.limit

    def bytes(self, views: Sequence[View]) -> int:
        """What the dense features of these views take on the disk."""
        stride = self.backbone.stride or self.backbone.patch_size
        cores = self.cores or self.backbone.bank or 1
        return sum((1 + cores + int(view.side // stride) ** 2) * self.backbone.width * 2 for view in views)

    def dense(self, views: Sequence[View], what: str) -> Features:
        """Patch and global features; raises where the cache cannot hold them all at once."""
        if not self.fits(views):
            raise InputError(
                f"the features of {len(views)} views ({what}) take {self.bytes(views) / 1e9:.1f} GB, the cache holds "
                f"{self.cache.limit / 1e9:.1f}: raise --cache-gb, lower --size, or train with --augment"
            )
        return self._cached(views, True, what)

    def whole(self, views: Sequence[View], what: str) -> Tensor:  # V×D
        """Global features only; they need not fit the cache."""
        return self._cached(views, False, what).global_features()

    def _cached(self, views: Sequence[View], patches: bool, what: str) -> Features:
        per_shard = SHARD[patches]
        parts = [views[start : start + per_shard] for start in range(0, len(views), per_shard)]
        keys = [self._key(part, patches) for part in parts]
        shards = [self.cache.use(key) for key in keys]
        missing = [index for index, shard in enumerate(shards) if shard is None]
        shown = iter(progress(range(sum(len(parts[index]) for index in missing)), f"features of {what}"))
        for index in missing:
            wholes, denses, cores = [], [], []
            for found in self._run(parts[index]):
                wholes.append(found.cls.cpu().half())
                if patches:
                    denses.append(found.patches.cpu().half())
                    cores.append(found.cores.cpu().half())
                for _ in range(len(found.cls)):
                    next(shown, None)
            tensors = {"global": torch.cat(wholes)}
            if patches:
                tensors |= {"patches": torch.cat(denses), "cores": torch.cat(cores)}
            if not all(torch.isfinite(tensor).all() for tensor in tensors.values()):
                raise InputError(f"{self.backbone.source}: its features of {what} are not finite numbers")
            shards[index] = self.cache.put(keys[index], tensors, keep=set(keys))
        next(shown, None)
        return Features(shards, len(views), per_shard)

    def _run(self, views: Sequence[View]) -> Iterator[extractor.Features]:
        """Features batch by batch, while threads decode the next batch."""
        batches = [views[start : start + self.batch] for start in range(0, len(views), self.batch)]
        with ThreadPoolExecutor(4) as pool:
            coming = [pool.submit(View.pixels, view) for view in batches[0]]
            for index in range(len(batches)):
                images = torch.stack([future.result() for future in coming])
                coming = [pool.submit(View.pixels, view) for view in batches[index + 1]] if batches[index + 1 :] else []
                yield self.compute(images)

    def _key(self, views: Sequence[View], patches: bool) -> str:
        files = [view.key(_content(view.path)) for view in views]
        words = [FORMAT, self.backbone.digest, self.cores, patches, files]
        if self.backbone.share < 1 or self.backbone.stride is not None:
            words += [self.backbone.share, self.backbone.stride]
        if self.backbone.patches != 1:
            words += ["patches", self.backbone.patches]
        return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:40]


@cache
def _content(path: Path) -> str:
    """A file's digest, read once per run."""
    return file_digest(path)
