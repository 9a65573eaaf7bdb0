"""The memory of `veca serve` with its default bounds: idle, one photo of 49 megapixels of each format, a crowd of them.

cd tests && python -m attack.memory        # megabytes of all its processes together, shared pages counted once
"""

from __future__ import annotations

import io
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image
from serve.process import HTTP, Server

OPTIONS = {
    "PNG": {"compress_level": 6},
    "JPEG": {"progressive": True, "subsampling": 0, "quality": 80},
    "JPEG2000": {"quality_mode": "rates", "quality_layers": [30]},
    "TIFF": {"compression": "tiff_deflate"},
    "AVIF": {"speed": 10, "quality": 40},
}


def family(server: Server) -> float:
    total = 0.0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            own = int(folder.name) == server.process.pid
            if own or f"PPid:\t{server.process.pid}\n" in (folder / "status").read_text():
                total += int((folder / "smaps_rollup").read_text().split("Pss:")[1].split()[0]) / 1000
        except (OSError, IndexError):
            continue
    return total


class Peak(threading.Thread):
    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self.server, self.most = server, 0.0

    def run(self) -> None:
        while self.server.process.poll() is None:
            now = family(self.server)
            self.most = max(self.most, now)
            time.sleep(0.02)


def photos() -> dict[str, bytes]:
    small = np.random.default_rng(0).integers(0, 256, (40, 40, 4), dtype=np.uint8)
    smooth, flat = (
        Image.fromarray(small).resize((7000, 7000), way) for way in (Image.Resampling.BICUBIC, Image.Resampling.NEAREST)
    )
    found = {}
    for kind, options in OPTIONS.items():
        file = io.BytesIO()
        (flat if kind == "PNG" else (flat if kind == "TIFF" else smooth).convert("RGB")).save(file, kind, **options)
        found[kind] = file.getvalue()
    return found


def main() -> None:
    bodies = photos()
    server = Server(Path("veca-s14"))
    peak = Peak(server)
    peak.start()
    time.sleep(2)
    print(f"| idle | {peak.most:.0f} |")
    for kind, body in bodies.items():
        time.sleep(1)
        peak.most = 0.0
        status = HTTP.post(f"{server.url}/v1/features", content=body).status_code
        print(f"| {kind}, {len(body) / 1e6:.1f} MB, answered {status} | {peak.most:.0f} |", flush=True)
    time.sleep(1)
    peak.most = 0.0
    time.sleep(1)
    print(f"| idle again | {peak.most:.0f} |", flush=True)

    def ask(body: bytes) -> int:
        return HTTP.post(f"{server.url}/v1/features?dense=true&size=1024", content=body).status_code

    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(ask, [*bodies.values()] * 13))
    print(f"| 65 of them at once, answered {sorted(set(answers))} | {peak.most:.0f} |")
    server.stop()


if __name__ == "__main__":
    main()
