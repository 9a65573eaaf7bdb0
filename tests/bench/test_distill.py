"""The measurement itself, on a machine that promises nothing: it runs, and counts what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from distill.runs import make_photos, make_teacher

from veca.bench.distill import main


@pytest.mark.end_to_end
def test_the_benchmark_measures_every_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VECA_CACHE", str(tmp_path / "cache"))
    teacher, photos = make_teacher(tmp_path / "teacher"), make_photos(tmp_path / "photos", 8)
    arguments = ["--train", str(photos), "--teacher", str(teacher), "--size", "16", "--batch", "2", "--steps",
                 "1", "--rounds", "1", "--workers", "0", "--device", "cpu", "--out", f"{tmp_path}/b.json"]  # fmt: skip
    assert main(arguments) == 0
    figures = json.loads((tmp_path / "b.json").read_text())
    assert figures["cached step / whole step"] == figures["whole step, cached"] / figures["whole step"]
    assert figures["whole step / both alone"] == figures["whole step"] / figures["both alone"]
    assert figures.pop("noise")["spread"] is None  # one round
    assert all(value > 0 for value in figures.values())
    printed = capsys.readouterr().out
    assert "whole step, cached" in printed
    assert "is not known" in printed
