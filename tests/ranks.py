"""Ranks for tests: real processes that talk through gloo over loopback."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Forked from a server that has imported everything but never run a thread: they start in milliseconds.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["test_parallel", "torch._dynamo"])
PATIENCE = 120  # seconds that ranks may take in all


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def start_ranks(work: Callable[..., None], count: int, *arguments: Any, folder: Path) -> list[BaseProcess]:
    """`work(*arguments)` on every rank of a group; what each prints goes to folder/0.txt, 1.txt, …"""
    common = (work, count, free_port(), folder, arguments)
    processes = [SERVER.Process(target=_one, args=(rank, *common)) for rank in range(count)]
    for process in processes:
        process.start()
    return processes


def end_ranks(processes: list[BaseProcess]) -> list[int | None]:
    """Their exit statuses."""
    deadline = time.monotonic() + PATIENCE
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
    late = [number for number, process in enumerate(processes) if process.is_alive()]
    for number in late:
        processes[number].kill()
    assert not late, f"ranks {late} did not end"
    return [process.exitcode for process in processes]


def run_ranks(work: Callable[..., None], count: int, *arguments: Any, folder: Path) -> None:
    """As `start_ranks`, and all must succeed."""
    statuses = end_ranks(start_ranks(work, count, *arguments, folder=folder))
    said = "\n".join((folder / f"{rank}.txt").read_text() for rank in range(count))
    assert statuses == [0] * count, f"{statuses}\n{said}"


def _one(rank: int, work: Callable[..., None], count: int, port: int, folder: Path, arguments: Any) -> None:
    with open(folder / f"{rank}.txt", "w", buffering=1) as said:
        for stream in (1, 2):
            os.dup2(said.fileno(), stream)
        sys.stdout = sys.stderr = said
        faulthandler.enable()
        torch.set_num_threads(1)
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": count}
        os.environ.update({name: str(value) for name, value in environment.items()})
        dist.init_process_group("gloo", timeout=timedelta(seconds=10 * PATIENCE))
        try:
            work(*arguments)
        except SystemExit as end:
            os._exit(int(end.code or 0))
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # as a process does that dies: others must not wait for it
        dist.barrier()
        dist.destroy_process_group()
