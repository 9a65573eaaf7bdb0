"""`veca serve` under load: requests/s, p50 and p99 for closed loops of clients and for an open overload.

    .venv/bin/python tools/serve_load.py --model veca_small --out results/serve

Two services are started one after the other on this machine: one that keeps its size, and an elastic one. Each meets
closed loops of clients, and both the same open overload: 1.5 times as many requests as the first answers. The clients
run on the same machine. Takes about 2 minutes; other work on the machine shows in the figures. Writes serve.json.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import io
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from clients import closed_loop, open_loop, request_bytes
from PIL import Image

from veca._version import __version__
from veca.config import MODELS
from veca.devices import pick_device, pick_dtype
from veca.files import write_json
from veca.model import create_model

OVERLOAD = 1.5  # the open load, as a multiple of what the fixed service answers


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="veca-s14", help="what `veca serve` takes, or a size (veca_small)")
    parser.add_argument("--out", type=Path, default=Path("bench-serve"), help="folder for serve.json")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="how many ask at once")
    parser.add_argument("--seconds", type=float, default=5.0, help="measured for each number of clients")
    parser.add_argument("--size", type=int, default=448, help="shorter side in pixels")
    parser.add_argument("--dtype", default="float32", help="precision of the network")
    parser.add_argument("--slo", type=float, default=0.5, help="seconds that the elastic service tries to keep")
    parser.add_argument("--min-size", type=int, default=224, help="the least size of the elastic service")
    settings = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        results = measure(settings, model_source(settings.model, Path(folder)))
    write_json(settings.out / "serve.json", results)
    print(settings.out / "serve.json")


def model_source(name: str, folder: Path) -> str:
    if name not in MODELS:
        return name
    torch.manual_seed(0)
    create_model(name).save(folder / name)
    return str(folder / name)


def measure(settings: argparse.Namespace, source: str) -> dict[str, Any]:
    requests = [request_bytes("/v1/features", photo(seed)) for seed in range(8)]
    results: dict[str, Any] = {"about": about(settings), "closed": {}, "open": {}}
    rate = 0.0
    elastic = ["--slo", f"{settings.slo}s", "--min-size", str(settings.min_size)]
    for name, extra in {"fixed size": [], "elastic size": elastic}.items():
        with service(source, settings.size, ["--dtype", settings.dtype, *extra]) as port:
            rows = []
            for clients in settings.clients:
                warm = min(1.5, settings.seconds)
                rows.append(asyncio.run(closed_loop(port, requests, clients, warm, settings.seconds)))
                if not rows[-1]["answered"]:
                    sys.exit(f"nothing was answered in {settings.seconds:g} s: more --seconds, or a free machine")
                print(f"{name}, {clients} clients: {line(rows[-1])}", flush=True)
            results["closed"][name] = rows
            rate = rate or OVERLOAD * rows[-1]["per_second"]
            results["open"][name] = asyncio.run(open_loop(port, requests, rate, 3 * settings.seconds))
            print(f"{name}, {rate:.1f} requests/s: {line(results['open'][name])}", flush=True)
    return results


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['per_second']:.1f}/s, p50 {1000 * row['p50']:.0f} ms, p99 {1000 * row['p99']:.0f} ms, "
        f"size {row['mean_size']:.0f}, {row['refused']} refused"
    )


@contextmanager
def service(source: str, size: int, extra: list[str]) -> Iterator[int]:
    """A running `veca serve`; gives its port."""
    command = [sys.executable, "-m", "veca.cli", "serve", "--model", source, "--port", "0", "--size", str(size), *extra]
    environment = {name: value for name, value in os.environ.items() if name != "VECA_TOKEN"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            words = process.stdout.readline()
            if " at http" not in words:
                sys.exit("the service did not start; its message is above")
            yield int(words.rsplit(":", 1)[1])
        finally:
            process.send_signal(signal.SIGTERM)


def photo(seed: int) -> bytes:
    """A 640×480 JPEG with structure at several scales, the same on every machine."""
    source = np.random.default_rng(seed)
    pixels = np.zeros((480, 640, 3), np.float32)
    for side in (4, 16, 64):
        coarse = Image.fromarray(source.integers(0, 256, (side * 3 // 4, side, 3), dtype=np.uint8))
        pixels += np.asarray(coarse.resize((640, 480), Image.Resampling.BICUBIC), np.float32) / 3
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def about(settings: argparse.Namespace) -> dict[str, Any]:
    cpu = next(
        (
            text.split(":", 1)[1].strip()
            for text in (Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else [])
            if text.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "model": settings.model,
        "size": settings.size,
        "dtype": str(pick_dtype(settings.dtype, pick_device("auto"))).removeprefix("torch."),
        "seconds": settings.seconds,
        "slo": settings.slo,
        "min_size": settings.min_size,
        "overload": OVERLOAD,
        "cpu": cpu,
        "cores": os.cpu_count(),
        "date": datetime.date.today().isoformat(),
        "veca": __version__,
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    main()
