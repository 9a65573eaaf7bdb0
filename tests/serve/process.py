"""A real `veca serve` process on a free loopback port, with a small model of fresh weights."""

from __future__ import annotations

import faulthandler
import io
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import torch
from listening import Listening
from PIL import Image

from veca import Veca, VecaOutput, preprocess
from veca.serve.command import server_of
from veca.serve.service import Service
from veca.serve.settings import ServeSettings

# One client for all: each new one would read every certificate of the machine, which plain HTTP never needs.
HTTP = httpx.Client(timeout=60, limits=httpx.Limits(max_connections=None, max_keepalive_connections=8))


class Server(Listening):
    def __init__(self, model: Path, *arguments: str, token: str | None = None, cwd: Path | None = None) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "VECA_TOKEN"}
        if token is not None:
            environment["VECA_TOKEN"] = token
        if cwd is not None:
            environment["TMPDIR"] = str(cwd)
        words = ["serve", "--model", str(model), "--port", "0", "--dtype", "float32", *arguments]
        super().__init__(words, environment, cwd)

    def memory(self) -> float:
        """Resident megabytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1000

    def open_files(self) -> list[str]:
        """What the process holds open besides sockets, pipes and devices."""
        links = []
        for link in Path(f"/proc/{self.process.pid}/fd").iterdir():
            try:
                links.append(str(link.readlink()))
            except OSError:
                continue
        return [link for link in links if not link.startswith(("socket:", "pipe:", "anon_inode:", "/dev/"))]

    def metric(self, name: str, headers: dict[str, str] | None = None) -> float:
        text = HTTP.get(f"{self.url}/metrics", headers=headers).text
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        return sum(float(value) for series, value in lines if series.split("{")[0] == name)


def raw(port: int, data: bytes, timeout: float = 60.0) -> bytes:
    """Send bytes as they are; what comes back until the service closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout) as connection:
        try:
            connection.sendall(data)
            return b"".join(iter(lambda: connection.recv(65536), b""))
        except ConnectionError:
            return b""


def head(path: str, length: int | None, *lines: str) -> bytes:
    """The head of a POST."""
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: localhost", size, *lines, "", ""]).encode()


def picture(seed: int, width: int = 160, height: int = 120, kind: str = "PNG") -> bytes:
    """An image file that differs from seed to seed and has structure at several scales."""
    source = np.random.default_rng(seed)
    small = Image.fromarray(source.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    file = io.BytesIO()
    small.resize((width, height), Image.Resampling.BICUBIC).save(file, kind)
    return file.getvalue()


@torch.inference_mode()
def expected(library: Veca, body: bytes, size: int, cores: int) -> VecaOutput:
    """The library's features of an upload."""
    out: VecaOutput = library(preprocess(body, size=size, patch_size=16), cores=cores)
    return out


class InThread(Server):
    """The service in a thread of the test, which can then hold its model; otherwise the same as the process."""

    def __init__(self, model: Veca, settings: ServeSettings) -> None:
        self.let_go = threading.Event()  # for a test that holds the model
        self.service = Service(model, settings)
        self.engine = self.service.engine
        self.service.start()
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = server_of(self.service, None)
        self.thread = threading.Thread(target=self.server.run, args=([listener],))
        self.thread.start()

    def stop(self) -> int:
        self.server.should_exit = True
        self.thread.join(timeout=60)
        self.service.stop()
        faulthandler.cancel_dump_traceback_later()  # the service's last resort, which would end the tests
        return 0


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(300):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("it did not happen in 30 s")
