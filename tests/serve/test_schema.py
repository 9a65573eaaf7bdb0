"""schemathesis on the running service: whatever its description allows or forbids, no server error."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .process import Server


@pytest.mark.end_to_end
def test_schemathesis_finds_no_server_error(server: Server, tmp_path: Path) -> None:
    # Bytes that are "an image" to the description need not be one: refusing data that fits it is no failure here.
    run = subprocess.run(
        [
            *(Path(sys.executable).with_name("schemathesis"), "run", f"{server.url}/openapi.json"),
            *("--phases", "examples,coverage,fuzzing", "--max-examples", "20", "--seed", "1"),
            *("--checks", "all", "--exclude-checks", "positive_data_acceptance"),
            *("--request-timeout", "60", "--suppress-health-check", "all", "--generation-database", "none"),
        ],
        capture_output=True,
        text=True,
        timeout=250,
        cwd=tmp_path,
        env={**os.environ, "SCHEMATHESIS_HOOKS": str(Path(__file__).with_name("schema_hooks.py"))},
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    print(run.stdout)
    assert re.search(r"\d+ generated, \d+ passed\n", run.stdout)  # nothing failed, nothing could not be run
    assert server.metric("veca_model_seconds_count") > 2  # it reached the model
    assert "Traceback" not in "".join(server.log)
