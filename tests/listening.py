"""A real `veca` process that listens: it is started, says its address in its first line, and ends by SIGTERM."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path


class Listening:
    """The process, its address, and what it wrote to stderr."""

    def __init__(self, words: Iterable[str], environment: dict[str, str], cwd: Path | None = None) -> None:
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
            self.url = lines.get(timeout=300).rsplit(" at ", 1)[1].strip()
        except (queue.Empty, IndexError):
            self.process.kill()
            raise AssertionError(f"it did not start: {''.join(self.log)}") from None
        self.port = int(self.url.split(":")[2].split("/")[0])

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=60)
        finally:
            self.process.kill()
            for reader in self.readers:
                reader.join(timeout=10)

    def end(self) -> None:
        """Whatever a test left running."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(timeout=10)
