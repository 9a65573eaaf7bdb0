"""From numbered images to batches: the order, the augmented views, and what to do with unreadable images.

A batch is asked for by naming its images, views and size (`Key`), so workers keep no state: whoever gets the request
answers with the same pixels.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from veca.augment import augment, centre
from veca.distill.settings import Distillation
from veca.distill.sources import TrainingImages
from veca.errors import InputError
from veca.images import open_image, to_tensor
from veca.teachers import TeacherOutput
from veca.training.schedule import choose, epoch_order, random_at

if TYPE_CHECKING:
    from veca.distill.cache import TeacherCache

MAX_REPLACEMENTS = 32  # a sample of images in a row, all unreadable: the source itself is broken


class Key(NamedTuple):
    """One view of one image."""

    number: int  # of the image
    view: int  # the epoch, or the number of a fixed view; −1: the centre crop of validation
    size: int


class Item(NamedTuple):
    image: Tensor  # 3×S×S, normalised
    number: int  # of the image that was read, perhaps in place of another
    features: tuple[Tensor, ...] | None  # what the cache holds of it
    unreadable: list[str]


class Batch(NamedTuple):
    images: Tensor  # B×3×S×S
    numbers: list[int]
    teacher: TeacherOutput | None  # from the cache
    unreadable: list[str]


def read_view(images: TrainingImages, key: Key, augment_seed: int, trivial: bool = True) -> Tensor:
    """3×S×S: the view of an image that `key` names, always the same."""
    picture = open_image(images.read(key.number))
    if key.view < 0:
        return to_tensor(centre(picture, key.size))
    return to_tensor(augment(picture, key.size, random_at(augment_seed, "view", key.view, key.number), trivial))


class Views(Dataset[Item]):
    """Views by key; an unreadable image is replaced by another, chosen by its number."""

    def __init__(
        self, images: TrainingImages, augment_seed: int, cache: TeacherCache | None = None, trivial: bool = True
    ) -> None:
        self.images, self.augment_seed, self.cache, self.trivial = images, augment_seed, cache, trivial

    def __getitem__(self, key: Key) -> Item:
        unreadable: list[str] = []
        replacements = random_at(self.augment_seed, "replacement", key.number)
        cached = self.cache is not None and key.view >= 0 and key.size in self.cache.sizes
        for _ in range(MAX_REPLACEMENTS):
            try:
                image, reason = read_view(self.images, key, self.augment_seed, self.trivial), ""
            except (InputError, OSError) as error:
                reason = str(error).replace("image bytes: ", "")
            features = self.cache.read(key) if cached and not reason and self.cache is not None else None
            if cached and features is None:
                reason = reason or "unreadable when the teacher's features were computed"
            if not reason:
                return Item(image, key.number, features, unreadable)
            unreadable.append(f"{self.images.name(key.number)}\t{reason}")
            key = key._replace(number=replacements.randrange(len(self.images)))
        raise InputError(
            f"{MAX_REPLACEMENTS} images in a row are unreadable, the last is {unreadable[-1]}: check the images"
        )


def collate(items: Sequence[Item]) -> Batch:
    teacher = None
    if items[0].features is not None:
        columns = zip(*(item.features or () for item in items), strict=True)
        cls, patches, *layers = (torch.stack(column) for column in columns)
        teacher = TeacherOutput(cls, patches, layers[0].transpose(0, 1) if layers else None)
    return Batch(
        images=torch.stack([item.image for item in items]),
        numbers=[item.number for item in items],
        teacher=teacher,
        unreadable=[line for item in items for line in item.unreadable],
    )


class Plan(Sampler[list[Key]]):
    """The keys of every batch of one rank, from `start` to the end of the run.

    The images of all epochs form one endless line; step s takes the next `step_images` of it, and each rank its slice.
    So nothing depends on the number of ranks, and an image is seen exactly once an epoch.
    """

    def __init__(
        self,
        settings: Distillation,
        groups: Sequence[int],
        *,
        total: int,
        start: int,
        batch: int,
        rank: int,
        ranks: int,
    ) -> None:
        self.settings, self.groups, self.total, self.start = settings, groups, total, start
        self.batch, self.rank, self.ranks = batch, rank, ranks
        self.step_images = batch * settings.accumulate * ranks

    def resolution(self, step: int) -> int:
        settings = self.settings
        if step >= round(settings.late_from * self.total):
            choices, weights = settings.late_resolutions, settings.late_resolution_weights
        else:
            choices, weights = settings.resolutions, settings.resolution_weights
        return choose(choices, weights, settings.seed, "resolution", step)

    def __iter__(self) -> Iterator[list[Key]]:
        count, epoch, order = sum(self.groups), -1, None
        for step in range(self.start, self.total):
            size = self.resolution(step)
            for micro in range(self.settings.accumulate):
                first = step * self.step_images + (micro * self.ranks + self.rank) * self.batch
                keys = []
                for position in range(first, first + self.batch):
                    if order is None or position // count != epoch:
                        epoch = position // count
                        order = epoch_order(self.groups, self.settings.seed, epoch)
                    view = epoch % self.settings.views if self.settings.views else epoch
                    keys.append(Key(int(order[position % count]), view, size))
                yield keys

    def __len__(self) -> int:
        return (self.total - self.start) * self.settings.accumulate


def loaded(
    views: Views, keys: Sampler[list[Key]] | list[list[Key]], workers: int, pin: bool
) -> Generator[Batch, None, None]:
    """The batches that the keys name; its workers end when it is closed, or fails.

    Only the generator itself holds DataLoader's iterator, and no error that leaves it does: workers left until the
    process ends would be asked to by SIGTERM, which is nothing to them.
    """
    batches: DataLoader[Any] = DataLoader(
        views,
        batch_sampler=keys,  # which Views understands
        num_workers=workers,
        collate_fn=collate,
        pin_memory=pin,
        worker_init_fn=leave_signals_to_the_trainer,
        # Forked workers share the index, and notice when a killed trainer is no longer their parent.
        multiprocessing_context="fork" if workers and sys.platform == "linux" else None,
        prefetch_factor=4 if workers else None,
    )
    try:
        yield from batches
        return
    except InputError as error:  # of a worker, with its traceback, which is none of the user's
        problem = str(error).strip().splitlines()[-1].removeprefix("veca.errors.InputError: ")
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        problem = "a process that reads images died, most likely for want of memory: run the same command again to "
        problem += "continue, with fewer --workers"
    raise InputError(problem)


def leave_signals_to_the_trainer(_: int) -> None:
    """Ctrl-C and a scheduler's SIGTERM reach the whole group; the trainer must still get its batch to save cleanly.

    So a worker goes on for minutes after SIGTERM, longer than any step. It ends by itself when the trainer is gone.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # whatever the trainer's process had there
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(300))
