"""Batches of numbered examples without end, read ahead by threads: for tasks that train on cached features."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")


def endless_batches(
    count: int, batch: int, order: random.Random, load: Callable[[int], Item]
) -> Generator[list[Item], None, None]:
    """Every example once a round, each round in a new order; threads read the next batch meanwhile."""

    def numbers() -> Iterator[int]:
        while True:
            rest = list(range(count))
            order.shuffle(rest)
            yield from rest

    coming = numbers()
    with ThreadPoolExecutor(2) as pool:
        following = [pool.submit(load, next(coming)) for _ in range(batch)]
        while True:
            present = following
            following = [pool.submit(load, next(coming)) for _ in range(batch)]
            yield [future.result() for future in present]
