"""Images decoded ahead, in processes of their own, and put together by grid."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import DataLoader, Dataset

from veca.errors import InputError
from veca.extract.sources import Entry
from veca.extract.workers import end_with_parent
from veca.images import Source, open_image, resize_to_patches

PENDING = 4  # batches' worth of decoded images that may wait for others of their grid
CHUNK = 16  # images that a worker sends together, if they are small


class Decoded(NamedTuple):
    path: Path
    size: tuple[int, int] = (0, 0)  # width, height of the upright image
    pixels: np.ndarray[Any, Any] | None = None  # H×W×3 uint8, whole patches: a quarter of the floats between processes
    error: str = ""


class Images(Dataset[list[Decoded]]):
    """Chunks of images, decoded in the workers; an image that fails becomes a message, not an exception."""

    def __init__(self, entries: Sequence[Entry], size: int, patch_size: int, chunk: int) -> None:
        self.chunks = [entries[start : start + chunk] for start in range(0, len(entries), chunk)]
        self.size, self.patch_size = size, patch_size

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, index: int) -> list[Decoded]:
        return [decode_one(entry.name, entry.read, self.size, self.patch_size) for entry in self.chunks[index]]


def decode_one(name: str, read: Callable[[], Source], size: int, patch_size: int) -> Decoded:
    """One image as the model takes it, or why not."""
    path = Path(name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's comments on damaged tags would tear the progress bar
            image = open_image(read())
        pixels = np.asarray(resize_to_patches(image, size, patch_size, name=name))
    except InputError as error:
        return Decoded(path, error=str(error).removeprefix(f"{name}: ").removeprefix("image bytes: "))
    except OSError as error:
        return Decoded(path, error=error.strerror or str(error))
    except MemoryError:
        return Decoded(path, error="not enough memory to decode it")
    return Decoded(path, image.size, pixels)


def decode(entries: Sequence[Entry], size: int, patch_size: int, workers: int) -> Iterator[Decoded]:
    """Images in the order of `entries`, decoded ahead by the workers."""
    # One message costs as much as decoding a thumbnail; of large photos many together would fill the memory.
    chunk = max(1, min(CHUNK, 256 * 256 * CHUNK // max(1, size * size), len(entries) // max(1, 4 * workers)))
    loader = DataLoader(
        Images(entries, size, patch_size, chunk),
        batch_size=None,
        num_workers=min(workers, len(entries)),
        collate_fn=_as_it_is,
        prefetch_factor=4 if workers else None,
        worker_init_fn=end_with_parent,
    )
    try:
        for images in loader:
            yield from images
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


def _as_it_is(item: Any) -> Any:  # DataLoader's types expect a list of items
    return item
