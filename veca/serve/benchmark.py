"""`veca bench serve`: the real service under closed and open loads, with and without batching and elasticity."""

from __future__ import annotations

import asyncio
import io
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from PIL import Image

from veca._version import __version__
from veca.cli import parse
from veca.config import MODELS
from veca.devices import Dtype, pick_device, pick_dtype
from veca.errors import InputError, require
from veca.files import whole_file, write_json, write_text
from veca.model import create_model
from veca.serve.load import closed_loop, open_loop, request_bytes
from veca.serve.settings import Seconds

BEGIN, END = "<!-- serve:begin -->", "<!-- serve:end -->"
OVERLOAD = 1.5  # the open load, as a multiple of what the service answers without elasticity


@dataclass(frozen=True)
class Settings:
    """Requests/s, p50, p99 and mean budget of `veca serve` for 1 to 32 clients, as JSON, a plot and a Markdown section.

    Four services are started one after the other on this machine: without batching, with it, with elastic cores, and
    with elastic cores and size. Each meets closed loops of clients, and all but the first the same open overload:
    1.5 times as many requests as the batched service answers. The clients run on the same machine. Takes about 4
    minutes; other work on the machine shows in the figures.

    Examples:
      veca bench serve
      veca bench serve --model veca_small --page docs/performance.md
    """

    model: str = "veca-s14"
    """what `veca serve` takes, or the name of a size (veca_small) for fresh weights: they are as fast as any"""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("bench-serve")
    """folder for serve.json, serve.png and serve.md"""
    page: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Markdown file whose section between the serve marks is replaced (or added at its end)"""
    clients: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """how many clients ask at once"""
    seconds: Seconds = 5.0
    """how long each number of clients is measured, after a second and a half of warming up"""
    size: int = 448
    """shorter side in pixels"""
    dtype: Dtype = "float32"
    """precision of the network; auto: bfloat16 where the CPU or GPU computes in it"""
    slo: Seconds = 0.5
    """what the elastic services try to keep"""
    min_cores: int = 8
    """the least budget of the elastic services"""
    min_size: int = 224
    """the least size of the last one"""


def main(arguments: list[str]) -> None:
    settings = parse(Settings, arguments, "veca bench serve")
    if not settings.clients or min(settings.clients) < 1:
        raise InputError("--clients needs numbers of at least 1")
    require("fastapi", "serve")
    require("matplotlib", "bench")
    with tempfile.TemporaryDirectory() as folder:
        results = measure(settings, model_source(settings.model, Path(folder)))
    write_json(settings.out / "serve.json", results)
    draw(results, settings.out / "serve.png")
    write_text(settings.out / "serve.md", section(results, "serve.png") + "\n")
    if settings.page is not None:
        picture = Path(os.path.relpath(settings.out / "serve.png", settings.page.parent)).as_posix()
        write_text(settings.page, with_section(settings.page, section(results, picture)))
    print(f"{settings.out}: serve.json, serve.png and serve.md")


def model_source(name: str, folder: Path) -> str:
    if name not in MODELS:
        return name
    torch.manual_seed(0)
    create_model(name).save(folder / name)
    return str(folder / name)


def variants(settings: Settings) -> dict[str, list[str]]:
    elastic = ["--slo", f"{settings.slo}s", "--min-cores", str(settings.min_cores)]
    return {
        "one at a time": ["--batch", "1", "--delay", "0s"],
        "batched": [],
        "elastic cores": elastic,
        "elastic cores and size": [*elastic, "--min-size", str(settings.min_size)],
    }


def measure(settings: Settings, source: str) -> dict[str, Any]:
    requests = [request_bytes("/v1/features", photo(seed)) for seed in range(8)]
    results: dict[str, Any] = {"about": about(settings), "closed": {}, "open": {}}
    rate = 0.0
    for name, extra in variants(settings).items():
        with service(source, settings.size, ["--dtype", settings.dtype, *extra]) as port:
            rows = []
            for clients in settings.clients:
                rows.append(
                    asyncio.run(closed_loop(port, requests, clients, min(1.5, settings.seconds), settings.seconds))
                )
                if not rows[-1]["answered"]:
                    raise InputError(
                        f"nothing was answered in {settings.seconds:g} s: more --seconds, or a free machine"
                    )
                print(f"{name}, {clients} clients: {line(rows[-1])}", flush=True)
            results["closed"][name] = rows
            if name == "one at a time":
                continue
            rate = rate or OVERLOAD * rows[-1]["per_second"]
            results["open"][name] = asyncio.run(open_loop(port, requests, rate, 3 * settings.seconds))
            print(f"{name}, {rate:.1f} requests/s: {line(results['open'][name])}", flush=True)
    return results


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['per_second']:.1f}/s, p50 {1000 * row['p50']:.0f} ms, p99 {1000 * row['p99']:.0f} ms, "
        f"{row['mean_cores']:.0f} cores, size {row['mean_size']:.0f}, {row['refused']} refused"
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
                raise InputError("the service did not start; its message is above")
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


def about(settings: Settings) -> dict[str, Any]:
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
        "min_cores": settings.min_cores,
        "min_size": settings.min_size,
        "overload": OVERLOAD,
        "cpu": cpu,
        "cores": os.cpu_count(),
        "veca": __version__,
        "torch": torch.__version__,
    }


def draw(results: dict[str, Any], path: Path) -> None:
    """Requests/s, p99 and what was used, over the number of clients."""
    matplotlib = require("matplotlib", "bench")
    matplotlib.use("Agg")
    pyplot = require("matplotlib.pyplot", "bench")
    slo = results["about"]["slo"]
    panels = [
        ("requests/s", "per_second", 1.0),
        ("p99, ms", "p99", 1000.0),
        ("mean cores", "mean_cores", 1.0),
        ("mean size, pixels", "mean_size", 1.0),
    ]
    figure, axes = pyplot.subplots(1, 4, figsize=(14, 3.4), layout="constrained")
    for axis, (title, key, scale) in zip(axes, panels, strict=True):
        for name, rows in results["closed"].items():
            axis.plot([row["clients"] for row in rows], [scale * row[key] for row in rows], "o-", ms=3, label=name)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.set_xlabel("clients")
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
        if key == "p99":
            axis.axhline(1000 * slo, color="grey", lw=1, ls="--")
            axis.annotate(f"objective {1000 * slo:.0f} ms", (1, 1000 * slo), fontsize=8, color="grey", va="bottom")
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:.0f}")
            axis.yaxis.set_minor_formatter("")
        else:
            axis.set_ylim(bottom=0)
    axes[0].legend(fontsize=8)
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=130)
    pyplot.close(figure)


def section(results: dict[str, Any], picture: str) -> str:
    """The service's part of docs/performance.md."""
    facts, closed, overload = results["about"], results["closed"], results["open"]
    rows = [
        f"| {name} | {row['clients']} | {row['per_second']:.1f} | {1000 * row['p50']:.0f} | {1000 * row['p99']:.0f} "
        f"| {row['mean_batch']:.1f} | {row['mean_cores']:.0f} | {row['mean_size']:.0f} |"
        for name, table in closed.items()
        for row in table
    ]
    open_rows = [
        f"| {name} | {row['requests']} | {row['refused']} | {row['per_second']:.1f} | {1000 * row['p50']:.0f} "
        f"| {1000 * row['p99']:.0f} | {row['mean_cores']:.0f} | {row['mean_size']:.0f} |"
        for name, row in overload.items()
    ]
    rate = next(iter(overload.values()))["rate"] if overload else 0
    return "\n".join(
        [
            BEGIN,
            "## The service",
            "",
            f"`veca bench serve --model {facts['model']}`, on {facts['cpu']} ({facts['cores']} cores, shared with the "
            f"clients), torch {facts['torch']}, {facts['dtype']}. 640×480 JPEG photos, size {facts['size']}, global "
            f"features as JSON. Elastic services aim at {1000 * facts['slo']:.0f} ms and may go down to "
            f"{facts['min_cores']} cores, the last also to size {facts['min_size']}.",
            "",
            f"![Requests/s, p99, mean cores and mean size over the number of clients]({picture})",
            "",
            f"The same overload for each, {rate:.1f} requests/s at random moments ({facts['overload']} times what the "
            "batched service answers); times in ms, of the requests that were answered:",
            "",
            "| service | requests | refused (503) | answered/s | p50 | p99 | mean cores | mean size |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
            *open_rows,
            "",
            "Clients that ask again as soon as they are answered:",
            "",
            "| service | clients | requests/s | p50 | p99 | mean batch | mean cores | mean size |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
            *rows,
            END,
        ]
    )


def with_section(page: Path, text: str) -> str:
    """The page with its section replaced, or added at the end."""
    old = page.read_text(encoding="utf-8") if page.exists() else "# Performance\n"
    if BEGIN in old and END in old:
        return old[: old.index(BEGIN)] + text + old[old.index(END) + len(END) :]
    return f"{old.rstrip()}\n\n{text}\n"
