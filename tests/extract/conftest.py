"""A small model, and photos in every container that `veca features` takes."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import veca

SIZE, CORES = 48, 8


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("small")
    veca.create_model("veca_tiny", depth=2, width=32, heads=2, bank=16).save(folder)
    return folder


def encoded(seed: int, width: int = 60, height: int = 48) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((width, height)).save(file, "png")
    return file.getvalue()


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """The same six photos, the fourth broken, as files, as a list, as two tar shards and as a table."""
    from pyarrow import Table, parquet

    files = [encoded(seed, *((60, 48) if seed % 2 else (48, 90))) for seed in range(6)]
    files[3] = files[3][:-60]
    (tmp_path / "photos").mkdir()
    for seed, data in enumerate(files):
        (tmp_path / "photos" / f"{seed}.png").write_bytes(data)
    (tmp_path / "list.txt").write_text("# mine\n" + "".join(f"photos/{seed}.png\n" for seed in range(6)))
    for shard in (0, 1):
        with tarfile.open(tmp_path / f"shard-{shard}.tar", "w") as tar:
            for seed in range(3 * shard, 3 * shard + 3):
                info = tarfile.TarInfo(f"./{seed}.png")
                info.size = len(files[seed])
                tar.addfile(info, io.BytesIO(files[seed]))
                tar.addfile(tarfile.TarInfo(f"{seed}.json"))
    rows = [{"bytes": data, "path": f"{seed}.png"} for seed, data in enumerate(files)]
    parquet.write_table(Table.from_pydict({"image": rows, "label": list(range(6))}), tmp_path / "table.parquet", 4)
    return tmp_path


def expected(small: Path, seeds: range = range(6)) -> Iterator[tuple[int, np.ndarray, tuple[int, int]]]:
    """Number, global feature and grid of every photo that can be read, by the library."""
    model = veca.load(small)
    for seed in seeds:
        if seed != 3:
            with torch.inference_mode():
                x = model.preprocess(encoded(seed, *((60, 48) if seed % 2 else (48, 90))), size=SIZE)
                out = model(x, cores=CORES)
            yield seed, out.cls[0].numpy(), out.grid
