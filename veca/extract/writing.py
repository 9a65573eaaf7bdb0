"""Features are written by a thread of their own, while the next batch is computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import numpy as np

from veca.extract.decoding import Decoded
from veca.extract.folder import FeatureFolder
from veca.extract.parquet import ParquetFolder


class Writer:
    """Writes in order; what goes wrong in its thread is raised where the next batch is given."""

    AHEAD = 2  # batches that may wait to be written

    def __init__(self, folder: FeatureFolder | ParquetFolder) -> None:
        self.folder = folder
        self.pool = ThreadPoolExecutor(1)
        self.waiting: deque[Future[None]] = deque()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._wait(0)
        finally:
            self.pool.shutdown(cancel_futures=True)

    def put(self, batch: Sequence[Decoded], features: dict[str, np.ndarray[Any, Any]]) -> None:
        """The features of a batch of images, by name; without any, an image that could not be read."""
        self._wait(self.AHEAD)
        self.waiting.append(self.pool.submit(self._write, batch, features))

    def _wait(self, most: int) -> None:
        while len(self.waiting) > most:
            self.waiting.popleft().result()

    def _write(self, batch: Sequence[Decoded], features: dict[str, np.ndarray[Any, Any]]) -> None:
        for row, image in enumerate(batch):
            if image.error:
                self.folder.add_error(image.path, image.error)
                continue
            height, width = (int(side) for side in features["grid"][row])
            own = {name: values[row] for name, values in features.items() if name not in ("grid", "tokens")}
            more = {"tokens": int(features["tokens"][row])} if "tokens" in features else {}
            self.folder.add(image.path, own, image.size, (height, width), **more)
