"""One process or many: the few things that all ranks must agree on."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from veca.devices import pick_device
from veca.errors import InputError


class Ranks:
    """This process among those that `torchrun` started; alone, every method is trivial."""

    def __init__(self, device: str, patience: timedelta = timedelta(hours=2)) -> None:
        self.rank = int(os.environ.get("RANK", 0))
        self.count = int(os.environ.get("WORLD_SIZE", 1))
        self.device = pick_device(device, int(os.environ.get("LOCAL_RANK", 0)))
        if self.count > 1 and not dist.is_initialized():
            store, _, _ = next(rendezvous("env://", self.rank, self.count))
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            own = fresh_store(store, self.rank, self.count)
            # Hours, for ranks also wait for each other while images are listed and the teacher's features computed.
            dist.init_process_group(backend, store=own, rank=self.rank, world_size=self.count, timeout=patience)

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def group(self) -> dist.ProcessGroup | None:
        """All of them; None where there is one."""
        return None if self.count == 1 else dist.group.WORLD

    def say(self, text: str) -> None:
        if self.first:
            print(text, flush=True)

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Each flag, if it is up on any rank."""
        if self.count == 1:
            return flags
        tensor = torch.tensor([float(flag) for flag in flags], device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tuple(bool(value) for value in tensor.tolist())

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, on every rank."""
        if self.count > 1:
            tensor = tensor.to(self.device, torch.float64 if self.device.type != "mps" else torch.float32)
            dist.all_reduce(tensor)
        return tensor

    def from_first(self, compute: Callable[[], Any]) -> Any:
        """The first rank's value on every rank; a user's mistake that it meets ends all of them."""
        if self.count == 1:
            return compute()
        answer: list[Any] = [None, None]
        if self.first:
            try:
                answer[0] = compute()
            except InputError as error:
                answer[1] = str(error)
        dist.broadcast_object_list(answer, device=self.device)
        if answer[1] is not None:
            raise InputError(answer[1])
        return answer[0]

    def first_goes_ahead(self, work: Callable[[], Any]) -> Any:
        """Run on the first rank, then on the others, which find its files."""
        results = []
        self.from_first(lambda: results.append(work()))
        return results[0] if self.first else work()

    def together(self, values: list[str]) -> list[str]:
        """The lists of all ranks, one after another, on every rank."""
        if self.count == 1:
            return values
        lists: list[Any] = [None] * self.count
        dist.all_gather_object(lists, values)
        return [value for part in lists for value in part]

    def wait(self) -> None:
        if self.count > 1:
            dist.barrier()

    def close(self) -> None:
        if self.count > 1 and dist.is_initialized():
            dist.destroy_process_group()


def fresh_store(store: Any, rank: int, count: int) -> Any:
    """A part of the store that only these processes know.

    `torchrun` keeps its store when it restarts the ranks, with the addresses of the dead ones in it; who trusts them
    waits for ever. So the first rank names a new part, the others answer with a word of their own, and go on once the
    first rank has repeated it. Nothing left by an earlier start can do that.
    """
    word = uuid.uuid4().hex
    if rank == 0:
        store.set("veca/name", word)
        answers = [store.get(f"veca/{word}/{other}").decode() for other in range(1, count)]
        store.set(f"veca/{word}/go", " ".join(answers))
        return dist.PrefixStore(word, store)  # type: ignore[attr-defined]
    name, deadline = "", time.monotonic() + dist.default_pg_timeout.total_seconds()
    while time.monotonic() < deadline:
        if (latest := store.get("veca/name").decode()) != name:
            name = latest
            store.set(f"veca/{name}/{rank}", word)
        if store.check([f"veca/{name}/go"]) and word in store.get(f"veca/{name}/go").decode().split():
            return dist.PrefixStore(name, store)  # type: ignore[attr-defined]
        time.sleep(0.05)
    raise TimeoutError("the first rank did not answer")


class StopSignal:
    """SIGTERM and SIGINT ask the run to save and end; a second one ends it at once."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
