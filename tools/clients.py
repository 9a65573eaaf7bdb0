"""Clients of a service under load: closed loops that ask again once answered, and an open one at a fixed rate."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Sample(NamedTuple):
    seconds: float  # from the moment the request was due to its whole answer
    status: int
    size: int  # that the service chose


def request_bytes(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/jpeg\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Connection:
    """One keep-alive connection, opened at its first use and again when the service closed it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes, due: float) -> Sample:
        if self.streams is None:
            self.streams = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self.streams
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in head[1:] if line)
        await reader.readexactly(int(headers["content-length"]))
        status = int(head[0].split()[1])
        if headers.get("connection") == "close":
            self.close()
        return Sample(time.monotonic() - due, status, int(headers.get("x-veca-size", 0)))

    def close(self) -> None:
        if self.streams is not None:
            self.streams[1].close()
            self.streams = None


async def closed_loop(
    port: int, requests: Sequence[bytes], clients: int, warm: float, seconds: float
) -> dict[str, Any]:
    """`clients` that each wait for their answer; what is answered in the `seconds` after the first `warm` counts."""
    begin = time.monotonic() + warm
    end = begin + seconds
    samples: list[Sample] = []

    async def client(index: int) -> None:
        connection, turn = Connection(port), index
        while (due := time.monotonic()) < end:
            sample = await connection.ask(requests[turn % len(requests)], due)
            turn += clients
            if begin <= due + sample.seconds < end:
                samples.append(sample)
        connection.close()

    await asyncio.gather(*(client(index) for index in range(clients)))
    return {"clients": clients, **summary(samples, seconds)}


async def open_loop(port: int, requests: Sequence[bytes], rate: float, seconds: float) -> dict[str, Any]:
    """Requests at random moments, `rate` a second on average, whether or not the earlier ones were answered."""
    source = random.Random(0)
    idle: list[Connection] = []
    samples: list[Sample] = []
    begin = time.monotonic()

    async def one(index: int, due: float) -> None:
        connection = idle.pop() if idle else Connection(port)
        try:
            samples.append(await connection.ask(requests[index % len(requests)], due))
            idle.append(connection)
        except (OSError, asyncio.IncompleteReadError):
            connection.close()
            samples.append(Sample(time.monotonic() - due, 0, 0))

    tasks: list[asyncio.Future[None]] = []
    due = begin
    while (due := due + source.expovariate(rate)) < begin + seconds:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        tasks.append(asyncio.ensure_future(one(len(tasks), due)))
    await asyncio.gather(*tasks)
    spent = time.monotonic() - begin
    for connection in idle:
        connection.close()
    return {"rate": round(rate, 2), **summary(samples, spent)}


def summary(samples: Sequence[Sample], seconds: float) -> dict[str, Any]:
    good = [sample for sample in samples if sample.status == 200]
    times = [sample.seconds for sample in good] or [seconds]  # nobody was answered: it took longer than this
    return {
        "requests": len(samples),
        "answered": len(good),
        "refused": sum(sample.status == 503 for sample in samples),
        "failed": sum(sample.status not in (200, 503) for sample in samples),
        "per_second": round(len(good) / seconds, 2),
        "p50": round(float(np.percentile(times, 50)), 4),
        "p99": round(float(np.percentile(times, 99)), 4),
        "mean_size": round(float(np.mean([sample.size for sample in good] or [0])), 1),
    }
