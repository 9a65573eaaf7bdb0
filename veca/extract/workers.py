"""Processes that decode images for another: they end with it, however it ends."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time


def end_with_parent(_: int = 0) -> None:
    """For DataLoader's `worker_init_fn`.

    A worker whose parent was killed may be waiting for room in a queue that nobody reads, and its siblings keep open.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_watch, args=(parent.pid,), daemon=True).start()


def _watch(parent: int | None) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
