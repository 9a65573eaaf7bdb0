"""Everything an operator can set, with the reasons in --help."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from veca.config import VecaConfig
from veca.devices import Dtype
from veca.errors import InputError
from veca.images import SIZE

TIMES = {"ms": 1e-3, "s": 1.0, "m": 60.0, "": 1.0}
BYTES = {"": 1, "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def number_with_unit(text: str, units: dict[str, float] | dict[str, int], example: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if match is None or match[2] not in units:
        raise ValueError(f"write it as {example}, not {text!r}")
    return float(match[1]) * units[match[2]]


Seconds = Annotated[
    float,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="TIME",
        instance_from_str=lambda texts: number_with_unit(texts[0], TIMES, "500ms or 2s"),
        is_instance=lambda value: isinstance(value, float),
        str_from_instance=lambda value: [f"{value:g}s" if value >= 1 else f"{value * 1000:g}ms"],
    ),
]
Bytes = Annotated[
    int,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="BYTES",
        instance_from_str=lambda texts: int(number_with_unit(texts[0], BYTES, "20MB")),
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda value: [f"{value / 1e6:g}MB"],
    ),
]


@dataclass(frozen=True)
class ServeSettings:
    """Serve features over HTTP: an upload page at /, POST /v1/features, /v1/similarity, /v1/explore, /v1/scan and
    /v1/look.

    With --slo and --min-size the service is elastic: as its queue grows it spends fewer patches, down to half, and then
    a smaller size on requests that did not fix their own, and more again as the queue empties. Every answer says what
    was used. SIGTERM finishes what was accepted and exits 0.

    Examples:
      veca serve
      veca serve --model models/mine --port 8080 --slo 500ms --min-size 256
      VECA_TOKEN=… veca serve --host 0.0.0.0                       # clients send Authorization: Bearer …

      curl --data-binary @photo.jpg 'http://127.0.0.1:8000/v1/features?size=448&cores=16'
      curl --data-binary @photo.jpg 'http://127.0.0.1:8000/v1/features?dense=true&format=npz' -o photo.npz
    """

    model: str = "veca-s14"
    """a bundled name, a model folder, a .safetensors, an authors' .pt or a hub id"""
    host: str = "127.0.0.1"
    """address to listen at; the default is reachable from this machine only"""
    port: int = 8000
    """port to listen at; 0 takes a free one and prints it"""
    token_file: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: no token)")] = None
    """file with the bearer token that /v1 and /metrics then ask for (or set VECA_TOKEN)"""
    dtype: Dtype = "auto"
    """precision of the network; auto: bfloat16 where the CPU or GPU computes in it, else float32"""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1, mps"""

    size: int = SIZE
    """shorter side in pixels, for requests that do not say"""
    cores: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: all cores)")] = None
    """core budget, for requests that do not say"""
    max_size: int = 1024
    """largest size a request may ask for; a picture may then have up to 4 × max-size² pixels"""

    slo: Annotated[Seconds | None, tyro.conf.arg(metavar="TIME", help_behavior_hint="(default: not elastic)")] = None
    """elastic: the time from the end of an upload to its answer that the service tries to keep"""
    min_size: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: not elastic)")] = None
    """elastic: images are made smaller for it, down to this size; as large as --size: only patches are saved"""

    max_bytes: Bytes = 20_000_000
    """largest upload, else 413"""
    max_held: Bytes = 250_000_000
    """uploads, waiting pictures and unsent answers of all clients together, else 503"""
    max_pixels: int = 50_000_000
    """largest photo, checked from its header before it is decoded, else 413"""
    queue: int = 64
    """requests in hand: being decoded, waiting or in the model; one more gets 503 with Retry-After"""
    timeout: Seconds = 30.0
    """from the end of an upload to its answer, else 504"""
    client_timeout: Seconds = 30.0
    """a client's time to send its head, its body (else 408), and to take its answer (else it is cut off)"""
    connections: int = 256
    """open connections; one more gets 503"""
    threads: int = os.cpu_count() or 1
    """threads of the model"""
    decoders: int = 2
    """processes that decode uploads, and threads that encode answers"""

    def check(self) -> None:
        """What can be refused before a model is loaded."""
        for name in ("size", "max_size", "max_pixels", "queue", "connections", "threads", "decoders", "port"):
            least = 0 if name == "port" else 1
            if getattr(self, name) < least:
                raise InputError(f"{flag(name)} must be at least {least}, not {getattr(self, name)}")
        for name in ("max_bytes", "max_held", "timeout", "client_timeout", "slo"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise InputError(f"{flag(name)} must be more than 0")
        if self.port > 65535:
            raise InputError(f"--port must be at most 65535, not {self.port}")
        if self.size > self.max_size:
            raise InputError(f"--size {self.size} is over --max-size {self.max_size}")
        if self.min_size is not None and not 1 <= self.min_size <= self.size:
            raise InputError(f"--min-size must lie between 1 and --size {self.size}, not {self.min_size}")
        if (self.min_size is None) != (self.slo is None):
            raise InputError("an elastic service needs --slo and --min-size: how small images may get to keep it")

    def check_model(self, config: VecaConfig) -> None:
        """What depends on the model."""
        if self.cores is not None and not 1 <= self.cores <= config.bank:
            raise InputError(f"--cores must lie between 1 and {config.bank} (this model's bank), not {self.cores}")
        for name in ("size", "min_size"):
            value = getattr(self, name)
            if value is not None and value < config.patch_size:
                raise InputError(f"{flag(name)} must be at least one patch ({config.patch_size}), not {value}")

    def token(self) -> bytes | None:
        """The bearer token, from the file or from VECA_TOKEN; never an argument, which every user could list."""
        text = os.environ.get("VECA_TOKEN")
        if self.token_file is not None:
            try:
                text = self.token_file.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise InputError(f"--token-file {self.token_file} cannot be read: {error}") from error
        if text is None:
            return None
        token = text.strip().encode()
        if not token or re.fullmatch(rb"[!-~]+", token) is None:
            raise InputError("the bearer token must be one word of printable ASCII characters")
        return token


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
