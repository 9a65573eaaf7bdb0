"""A short round of every kind of attack; `make attack MINUTES=60` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from .rounds import ROUNDS, attempt

CASES = {"images": 150, "weights": 150, "configurations": 300, "large": 150, "commands": 120, "requests": 60}


@pytest.mark.end_to_end
@pytest.mark.parametrize("kind", ROUNDS)
def test_nothing_gets_in_and_nothing_hangs(kind: str, tmp_path: Path) -> None:
    with ROUNDS[kind](tmp_path) as case:
        found = {seed: attempt(case, seed) for seed in range(CASES[kind])}
    failed = {seed: words for seed, (how, words) in found.items() if how == "failed"}
    assert not failed, f"{len(failed)} failed: {failed}; each again: make attack ONLY={kind} SEED=…"
    assert sum(how == "refused" for how, _ in found.values()) > CASES[kind] / 10  # it is an attack
