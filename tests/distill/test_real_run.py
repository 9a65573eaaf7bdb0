"""A short run of the real thing: veca_tiny from nothing, the real teacher, real photographs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from veca.distill.engine import train
from veca.recipes.laptop import Laptop


@pytest.mark.end_to_end
def test_features_come_closer_than_any_constant(shared: Path, tmp_path: Path) -> None:
    photos = shared / "data" / "photos"
    settings = Laptop(
        train=(str(photos / "photos-000.tar"),), val=(str(photos / "photos-006.tar"),),
        teacher=str(shared / "teacher" / "dav2-small-encoder"), out=tmp_path / "run", device="cpu", workers=1,
        autocast="off", epochs=0, steps=100, warmup_epochs=0, warmup_steps=5, batch=16, resolutions=(64,),
        matrices="adamw", lr=4e-3, min_lr=2e-4, budgets=(8, 16), budget_weights=(1, 1), standardise_images=64,
        val_images=64, val_budgets=(8, 16), val_every=100, log_every=25,
    )  # fmt: skip
    train(settings)
    records = [json.loads(line) for line in (settings.out / "metrics.jsonl").read_text().splitlines()]
    result = records[-1]
    for figures in result["grid"]["64"].values():
        assert figures["dense_cosine"] > 1.1 * result["constant"]["64"]
    losses = [record["loss"] for record in records if record["kind"] == "train"]
    assert losses == sorted(losses, reverse=True)  # falls all the way
