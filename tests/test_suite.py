"""The suite itself: `make test` leaves the end-to-end tests out and says so, CI leaves nothing out."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.end_to_end
@pytest.mark.parametrize("workers", [[], ["--numprocesses", "1"]])
def test_what_is_left_out_is_said(workers: list[str]) -> None:
    words = ["tests/attack/test_round.py", "tests/test_paper.py", "-m", "not end_to_end", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, *workers], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout
    assert "left out: 6 end-to-end tests; `make test-all` runs them\n" in done.stdout


def test_ci_leaves_nothing_out() -> None:
    rules = (ROOT / "Makefile").read_text(encoding="utf-8")
    chosen = dict(re.findall(r"^(test|end-to-end):.*\n\t\$\(PYTEST\) -m (.*)$", rules, re.M))
    assert chosen == {"test": "'not end_to_end'", "end-to-end": "end_to_end"}
    assert re.search(r"^test-all: test end-to-end$", rules, re.M)
    steps = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert re.search(r"^make .*\blint types\b", steps, re.M)
    assert re.search(r"^make .*\btest-all\b", steps, re.M)
