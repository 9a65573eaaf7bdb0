"""What docs/deploy.md and the files in deploy/ promise is what the service does."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from veca.cli import parse
from veca.serve.settings import ServeSettings, flag

ROOT = Path(__file__).parents[2]
DEPLOY, DOCKER, UNIT = (
    (ROOT / name).read_text(encoding="utf-8") for name in ("docs/deploy.md", "deploy/Dockerfile", "deploy/veca.service")
)


def test_the_unit_and_the_dockerfile_start_the_service() -> None:
    unit = re.search(r"^ExecStart=/opt/veca/bin/veca serve (.*)$", UNIT, re.MULTILINE)
    docker = re.search(r"^CMD (\[.*\])$", DOCKER, re.MULTILINE)
    assert unit is not None
    assert docker is not None
    assert parse(ServeSettings, shlex.split(unit[1]), "veca serve").slo == 0.5
    assert parse(ServeSettings, json.loads(docker[1]), "veca serve").host == "0.0.0.0"


def test_the_stop_time_covers_the_longest_request() -> None:
    longest = ServeSettings().timeout + ServeSettings().client_timeout
    assert int(re.search(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)[1]) > longest  # type: ignore[index]
    assert int(re.search(r"--stop-timeout (\d+)", DEPLOY)[1]) > longest  # type: ignore[index]


def test_the_table_of_bounds_is_whole() -> None:
    names = (
        "max_bytes",
        "max_held",
        "max_pixels",
        "max_size",
        "queue",
        "timeout",
        "client_timeout",
        "connections",
        "threads",
    )
    for name in (*names, "decoders"):
        assert f"`{flag(name)}`" in DEPLOY
    assert (ServeSettings().max_bytes, ServeSettings().max_pixels, ServeSettings().queue) == (
        20_000_000,
        50_000_000,
        64,
    )


def test_times_and_bytes_are_read_with_their_units() -> None:
    read = parse(
        ServeSettings,
        ["--slo", "500ms", "--timeout", "2m", "--client-timeout", "1.5s", "--max-bytes", "1.5MB"],
        "veca serve",
    )
    assert (read.slo, read.timeout, read.client_timeout, read.max_bytes) == (0.5, 120.0, 1.5, 1_500_000)
