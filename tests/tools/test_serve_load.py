"""tools/serve_load.py on a small scale: its file says what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from clients import Sample, summary
from serve_load import main
from steps import serve_rows

from veca import Veca, VecaConfig


@pytest.mark.end_to_end
def test_a_short_run(tmp_path: Path) -> None:
    torch.manual_seed(0)
    Veca(VecaConfig(depth=2, width=64, heads=2, patch_size=16)).save(tmp_path / "model")
    main(
        [
            *("--model", str(tmp_path / "model"), "--out", str(tmp_path / "out")),
            *("--clients", "3", "--seconds", "2", "--size", "64", "--min-size", "32"),
        ]
    )
    results = json.loads((tmp_path / "out" / "serve.json").read_text())
    assert list(results["closed"]) == list(results["open"]) == ["fixed size", "elastic size"]
    for rows in results["closed"].values():
        assert [row["clients"] for row in rows] == [3]
        for row in rows:
            assert row["answered"] == row["requests"] > 0
            assert 0 < row["p50"] <= row["p99"]
    assert {row["mean_size"] for row in results["closed"]["fixed size"]} == {64.0}
    assert len({row["rate"] for row in results["open"].values()}) == 1  # the same overload for both
    rows = serve_rows(tmp_path / "out")
    assert [(row["load"], row["service"]) for row in rows] == [
        *(("closed", "fixed size"), ("closed", "elastic size")),
        *(("open", "fixed size"), ("open", "elastic size")),
    ]


def test_a_summary_counts_what_was_answered() -> None:
    samples = [Sample(0.1, 200, 448), Sample(0.3, 200, 224), Sample(9.0, 503, 0)]
    row = summary(samples, 2.0)
    assert (row["requests"], row["answered"], row["refused"], row["failed"]) == (3, 2, 1, 0)
    assert (row["per_second"], row["mean_size"]) == (1.0, 336.0)
    assert row["p50"] == pytest.approx(0.2)
    assert row["p99"] == pytest.approx(0.298)


def test_a_summary_without_answers_claims_no_quick_ones() -> None:
    row = summary([Sample(0.01, 503, 0)], 2.0)
    assert (row["answered"], row["refused"], row["p50"], row["p99"]) == (0, 1, 2.0, 2.0)
