"""`veca bench serve` on a small scale: its files say what was measured, and its section replaces the old one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from veca.serve.benchmark import BEGIN, END, main, with_section
from veca.serve.load import Sample, summary


def test_a_short_run(model_folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text(f"# Performance\n\nbefore\n\n{BEGIN}\nold\n{END}\n\nafter\n")
    main(
        [
            *("--model", str(model_folder), "--out", str(tmp_path / "out"), "--page", str(page)),
            *("--clients", "3", "--seconds", "300ms", "--size", "64", "--min-size", "32"),
        ]
    )
    results = json.loads((tmp_path / "out" / "serve.json").read_text())
    assert list(results["closed"]) == ["one at a time", "batched", "elastic cores", "elastic cores and size"]
    assert list(results["open"]) == ["batched", "elastic cores", "elastic cores and size"]
    for rows in results["closed"].values():
        assert [row["clients"] for row in rows] == [3]
        for row in rows:
            assert row["answered"] == row["requests"] > 0
            assert 0 < row["p50"] <= row["p99"]
    assert {row["mean_batch"] for row in results["closed"]["one at a time"]} == {1.0}
    assert len({row["rate"] for row in results["open"].values()}) == 1  # the same overload for all
    assert Image.open(tmp_path / "out" / "serve.png").size[0] > 1000
    text = page.read_text()
    assert text.startswith("# Performance\n\nbefore\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "(out/serve.png)" in text
    assert text.count("| elastic cores and size |") == 2


def test_a_page_without_the_section_gets_it_at_the_end(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    assert with_section(page, "new") == "# Performance\n\nnew\n"
    page.write_text("# Mine\n\ntext\n\n\n")
    assert with_section(page, "new") == "# Mine\n\ntext\n\nnew\n"


def test_a_summary_counts_what_was_answered() -> None:
    samples = [Sample(0.1, 200, 64, 448, 2), Sample(0.3, 200, 8, 224, 4), Sample(9.0, 503, 0, 0, 0)]
    row = summary(samples, 2.0)
    assert (row["requests"], row["answered"], row["refused"], row["failed"]) == (3, 2, 1, 0)
    assert (row["per_second"], row["mean_cores"], row["mean_size"], row["mean_batch"]) == (1.0, 36.0, 336.0, 3.0)
    assert row["p50"] == pytest.approx(0.2)
    assert row["p99"] == pytest.approx(0.298)


def test_a_summary_without_answers_claims_no_quick_ones() -> None:
    row = summary([Sample(0.01, 503, 0, 0, 0)], 2.0)
    assert (row["answered"], row["refused"], row["p50"], row["p99"]) == (0, 1, 2.0, 2.0)
