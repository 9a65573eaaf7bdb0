"""The arithmetic of `veca bench ranks` against numbers worked out by hand, and one real run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from veca.bench.ranks import arithmetic, main
from veca.config import MODELS, VecaConfig


def test_arithmetic_of_eight_ranks() -> None:
    config = VecaConfig(depth=2, width=100, heads=5, bank=16)
    found = arithmetic(8, 8000, config, payload=4000, work=32.0)
    assert found["compute_s"] == 2.0
    # 1,000 patches a rank: their keys and values are 400,000 bytes in bfloat16, seven times passed on
    assert found["ring_bytes"] == 2_800_000
    assert found["ring_s"] == pytest.approx(2_800_000 / 1.25e9 + 7 * 25e-6)
    # queries, keys, values and results: 800,000 bytes, of which an eighth stays
    assert found["ulysses_bytes"] == 700_000
    assert found["ulysses_s"] == pytest.approx(700_000 / 1.25e9 + 28 * 25e-6)
    # an all-reduce sends 7/8 to be summed and 7/8 of the sums
    assert found["veca_bytes"] == 7_000
    assert found["veca_s"] == pytest.approx(7_000 / 1.25e9 + 28 * 25e-6)


@pytest.mark.end_to_end
def test_ranks_are_measured_and_their_bytes_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--model", "veca_tiny", "--sizes", "64", "--cores", "8", "--out", str(tmp_path)])
    alone, two = json.loads((tmp_path / "ranks.json").read_text())["rows"]
    config = MODELS["veca_tiny"]
    assert (alone["ranks"], alone["threads"], alone["layer_bytes"]) == (1, 2, 0)
    assert (two["ranks"], two["threads"]) == (2, 1)
    assert two["layer_bytes"] == 4 * 8 * (config.width + 2 * config.heads)
    first, second = capsys.readouterr().out.split("\n\n", 1)  # two tables, whose rows have as many cells as their heads
    for table in (first, second):
        assert len({line.count("|") for line in table.splitlines() if line.startswith("|")}) == 1


@pytest.mark.end_to_end
def test_training_on_split_images_is_measured(tmp_path: Path) -> None:
    main(["--training", "--model", "veca_tiny", "--sizes", "64", "--cores", "8", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "ranks.json").read_text())
    alone, two = found["rows"]
    assert found["arithmetic"] == []
    config = MODELS["veca_tiny"]
    assert (alone["ranks"], alone["layer_bytes"]) == (1, 0)
    # peak and sums forward, gradients of the sums backward; and the loss, twice forward and once backward
    assert two["layer_bytes"] >= 4 * 8 * (2 * config.width + 3 * config.heads)
