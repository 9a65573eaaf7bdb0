"""A real `veca serve` process on a free loopback port, with a small model of fresh weights."""

from __future__ import annotations

import io
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import numpy as np
import torch
from PIL import Image

from veca import Veca, VecaOutput, preprocess

# One client for all: each new one would read every certificate of the machine, which plain HTTP never needs.
HTTP = httpx.Client(timeout=60, limits=httpx.Limits(max_connections=None, max_keepalive_connections=8))


class Server:
    """The process, its address, and what it wrote to stderr."""

    def __init__(self, model: Path, *arguments: str, token: str | None = None, cwd: Path | None = None) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "VECA_TOKEN"}
        if token is not None:
            environment["VECA_TOKEN"] = token
        if cwd is not None:
            environment["TMPDIR"] = str(cwd)
        words = ["serve", "--model", str(model), "--port", "0", "--dtype", "float32", *arguments]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "veca.cli", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=cwd,
        )
        self.log: list[str] = []
        lines: queue.Queue[str] = queue.Queue()
        self.readers = [
            threading.Thread(target=lambda: [lines.put(line) for line in self.process.stdout or ()], daemon=True),
            threading.Thread(target=lambda: self.log.extend(self.process.stderr or ()), daemon=True),
        ]
        for reader in self.readers:
            reader.start()
        try:
            self.url = lines.get(timeout=120).rsplit(" at ", 1)[1].strip()
        except (queue.Empty, IndexError):
            self.process.kill()
            raise AssertionError(f"the service did not start: {''.join(self.log)}") from None
        self.port = int(self.url.rsplit(":", 1)[1])

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

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=60)
        finally:
            self.process.kill()
            for reader in self.readers:
                reader.join(timeout=10)


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
