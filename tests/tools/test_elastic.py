"""Every knob's cosine and tokens, with the real model and its teacher on small photographs."""

from __future__ import annotations

import csv
from pathlib import Path

import elastic
from PIL import Image, ImageFilter


def test_every_knob_is_measured_beside_the_teacher(tmp_path: Path, shared: Path) -> None:
    for number in range(8):
        photo = Image.effect_noise((140, 120), 40 + 10 * number).convert("RGB")
        photo.paste(photo.crop((0, 0, 60, 120)).filter(ImageFilter.GaussianBlur(9)), (0, 0))  # little to see there
        photo.save(tmp_path / f"{number}.png")
    elastic.main(
        photos=(str(tmp_path),), teacher=str(shared / "teacher/dav2-small-encoder"), images=2, sizes=(112,),
        reach=0.9, rounds=1, out=tmp_path,
    )  # fmt: skip
    with (tmp_path / "elastic.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(float(row["ms"]) > 0 for row in rows)
    found = {(row["knob"], row["setting"]): row for row in rows if not row["reaches"]}
    assert float(found["full", ""]["cosine"]) == 1
    assert found["full", ""]["tokens"] == "128"  # 8×8 patches and 64 cores
    assert found["patches", "0.5"]["tokens"] == "95"  # 4 cells of 4×4 patches, 9 splits add 3 each; 64 cores
    assert found["teacher", ""]["tokens"] == "65"
    assert not found["teacher", ""]["cosine"]
    kept = [float(found["patches", share]["cosine"]) for share in ("0.2", "0.5", "0.85")]
    assert kept == sorted(kept)
    reached = {row["knob"]: float(row["cosine"]) for row in rows if row["reaches"]}
    assert {"patches", "auto"} <= reached.keys()
    assert min(reached.values()) >= 0.9
