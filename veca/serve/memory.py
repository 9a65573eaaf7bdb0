"""The bytes held for all clients together: uploads, pictures that wait, and answers that are being taken.

Each bound on one request can be kept by many requests at once; this is the bound on their sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from veca.serve.metrics import Metrics
from veca.serve.problems import Problem

CHUNK = 1 << 18


class Memory:
    def __init__(self, total: int, metrics: Metrics) -> None:
        self.total, self.metrics = total, metrics
        self.held = 0

    @contextmanager
    def share(self) -> Iterator[Share]:
        share = Share(self)
        try:
            yield share
        finally:
            share.hold(0)


class Share:
    """What one request holds."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.held = 0

    def hold(self, count: int) -> None:
        """Hold `count` bytes instead of what was held; 503 where all together would be too much."""
        memory, more = self.memory, count - self.held
        if more > 0 and memory.held + more > memory.total:
            message = "the service holds too many bytes for others at the moment; try again shortly"
            raise Problem(503, "memory_full", message, {"Retry-After": "1"})
        self.held = count
        memory.held += more
        memory.metrics.held.set(memory.held)


class HeldResponse(Response):
    """An answer that is counted until the client has taken it, and handed over no faster than that."""

    def __init__(self, memory: Memory, body: bytes, media_type: str, headers: dict[str, str]) -> None:
        super().__init__(body, media_type=media_type, headers=headers)
        self.share = Share(memory)
        self.share.hold(len(self.body))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for start in range(0, len(self.body), CHUNK):
                await send({"type": "http.response.body", "body": self.body[start : start + CHUNK], "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            self.share.hold(0)
