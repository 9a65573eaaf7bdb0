"""Uploads are decoded in processes of their own, which can be killed and may not take more than their share of memory.

A thread cannot be stopped: a file made to be slow would hold it for as long as it likes, and with it the service. Here
the parent sends an order and the bytes, and waits no longer than it has time. What comes back is numbers and pixels,
nothing that could run. A process ends when its parent does.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import struct
import subprocess
import sys
import threading
from typing import IO, Any

import numpy as np

from veca.errors import InputError
from veca.serve.decode import Decoder, Picture
from veca.serve.problems import Problem

BASE = 400_000_000  # bytes of address space that a process needs before it decodes anything
PER_PIXEL = 20  # … and for each pixel, whatever the format
GROWN = 200_000_000  # bytes; a process that did not give back more than these is replaced
SPARE = 30  # seconds of computing beyond those it is given after which the system ends a process without a parent


class Workers:
    """`count` processes; one that had to be killed is started again when it is needed."""

    def __init__(self, count: int, *bounds: int) -> None:
        self.idle: queue.LifoQueue[Worker] = queue.LifoQueue()
        self.all = [Worker(bounds) for _ in range(count)]
        self.broken = False  # none could even be started the last time
        for worker in self.all:
            self.idle.put(worker)

    def start(self) -> None:
        """All of them, before the first request."""
        for worker in self.all:
            try:
                worker.started()
            except NotStarted:
                raise InputError("no process to decode uploads could be started; is there memory left?") from None

    def picture(self, body: bytes, size: int | None, name: str, seconds: float) -> Picture:
        """The picture that the model sees; `Decoder.picture` says what is refused."""
        about, pixels = self._ask({"what": "picture", "size": size, "name": name}, body, seconds)
        array = np.frombuffer(pixels, np.uint8).reshape(about["shape"])
        return Picture(array, (about["grid"][0], about["grid"][1]), about["width"], about["height"])

    def photo(self, body: bytes, size: int, name: str, seconds: float) -> np.ndarray[Any, Any]:
        """The upright photo itself, reduced where it is larger than anybody looks at: H×W×3."""
        about, pixels = self._ask({"what": "photo", "size": size, "name": name}, body, seconds)
        photo: np.ndarray[Any, Any] = np.frombuffer(pixels, np.uint8).reshape(about["shape"])
        return photo

    def pixels(self, body: bytes, size: int | None, name: str, seconds: float) -> int:
        """How many pixels the photo has, once its header says that it is small enough."""
        return int(self._ask({"what": "check", "size": size, "name": name}, body, seconds)[0]["pixels"])

    def stop(self) -> None:
        for worker in self.all:
            worker.kill()

    def _ask(self, order: dict[str, Any], body: bytes, seconds: float) -> tuple[dict[str, Any], bytes]:
        worker = self.idle.get()
        try:
            about, pixels = worker.ask({**order, "seconds": seconds}, body, seconds)
            self.broken = False
        except NotStarted:
            self.broken = True
            raise Problem(503, "no_memory", "no process to decode it could be started", {"Retry-After": "5"}) from None
        finally:
            self.idle.put(worker)
        if "problem" in about:
            raise Problem(*about["problem"])
        return about, pixels


class NotStarted(Exception):
    """The process did not come up."""


class Worker:
    def __init__(self, bounds: tuple[int, ...]) -> None:
        self.bounds = bounds  # of the Decoder
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, order: dict[str, Any], body: bytes, seconds: float) -> tuple[dict[str, Any], bytes]:
        before = self.process
        process = self.started()
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, stop)
        timer.start()
        try:
            write(process.stdin, order, body)
            about, data = read(process.stdout)
            if about.pop("last", False):
                self.kill()
            return about, data
        except (OSError, EOFError, ValueError):  # it is gone, or talks nonsense
            self.kill()
            if late.is_set():
                raise Problem(504, "timeout", f"decoding took longer than {seconds:.0f} s") from None
            if process is before:  # perhaps the photo before this one had ended it: a new process tells
                return self.ask(order, body, seconds)
            message = f"{order['name']}: decoding it ended the process that tried"
            raise Problem(422, "damaged_image", message) from None
        finally:
            timer.cancel()

    def kill(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(OSError):
                process.communicate()

    def started(self) -> subprocess.Popen[bytes]:
        if self.process is not None and self.process.poll() is None:
            return self.process
        self.kill()
        words = [sys.executable, "-m", "veca.serve.workers", *map(str, self.bounds)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        try:
            self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            assert self.process.stdout is not None
            if read(self.process.stdout)[0] == {"ready": True}:
                return self.process
        except (OSError, EOFError, ValueError):
            pass
        self.kill()
        raise NotStarted


def write(file: IO[bytes], about: dict[str, Any], data: bytes | memoryview = b"") -> None:
    text = json.dumps(about).encode()
    file.write(struct.pack("<QQ", len(text), len(data)) + text)
    file.write(data)
    file.flush()


def read(file: IO[bytes]) -> tuple[dict[str, Any], bytes]:
    head = file.read(16)
    if len(head) < 16:
        raise EOFError
    words, count = struct.unpack("<QQ", head)
    text, data = file.read(words), file.read(count)
    if len(data) < count:
        raise EOFError
    about = json.loads(text)
    if not isinstance(about, dict):
        raise ValueError
    return about, data


def obey(decoder: Decoder, order: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes | memoryview]:
    try:
        if order["what"] == "check":
            return {"pixels": decoder.check(body, order["size"], order["name"])}, b""
        if order["what"] == "photo":
            photo = np.asarray(decoder.reduced(body, order["size"], order["name"]))
            return {"shape": photo.shape}, photo.data.cast("B")
        picture = decoder.picture(body, order["size"], order["name"])
        about = {"shape": picture.pixels.shape, "grid": picture.grid, "width": picture.width, "height": picture.height}
        return about, np.ascontiguousarray(picture.pixels).data.cast("B")
    except Problem as problem:
        return {"problem": [problem.status, problem.reason, problem.message, problem.headers]}, b""
    except MemoryError:
        message = f"{order['name']}: decoding it takes more memory than an upload may"
        return {"problem": [422, "too_costly", message, {}]}, b""


def main() -> None:
    """A worker: orders come by standard input, answers go to standard output, until there are no more."""
    orders, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not be taken for an answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides
    bounds = [int(word) for word in sys.argv[1:]]
    decoder = Decoder(*bounds)
    limit_memory(BASE + PER_PIXEL * decoder.max_pixels)
    write(answers, {"ready": True})
    for number in (1, 2):  # libraries comment on every damaged file, and anybody can send those
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    while True:
        try:
            order, body = read(orders)
        except EOFError:
            return
        limit_seconds(order["seconds"])
        about, data = obey(decoder, order, body)
        write(answers, {**about, "last": grown()}, data)


def grown() -> bool:
    """Whether this process still holds so much memory that another should take its place."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") > GROWN
    except OSError:  # not Linux
        return False


def limit_memory(count: int) -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # not on Windows; macOS has no such limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (count, count))


def limit_seconds(seconds: float) -> None:
    """The parent kills what takes too long; this ends it where the parent was killed itself."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        resource.setrlimit(resource.RLIMIT_CPU, (int(used + seconds) + SPARE, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main()
