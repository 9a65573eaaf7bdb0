"""Lists, shards and tables in; a table out, which continues and is whole; and one share of many."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import veca
from veca.errors import InputError
from veca.extract.command import main, read_shard
from veca.extract.parquet import ParquetFolder
from veca.extract.sources import find_entries, find_files

from .conftest import CORES, SIZE, encoded, expected

if not os.environ.get("CI"):
    pytest.importorskip("pyarrow", reason="pip install 'veca[parquet]'")
    pytest.importorskip("pandas", reason="pip install pandas")
import pandas

SOURCES = {
    "photos": ("photos",),
    "list": ("list.txt",),
    "shards": ("shard-{0..1}.tar",),
    "table": ("table.parquet",),
}
WORKERS = {"table": 2}  # processes that inherit the open file


def run(world: Path, small: Path, given: tuple[str, ...], out: str, *more: object) -> int:
    paths = [f"{world}/{path}" for path in given]
    words = (*paths, "--out", world / out, "--model", small, "--size", SIZE, "--cores", CORES, "--dtype", "float32")
    return main([str(word) for word in (*words, "--workers", 0, *more)])


@pytest.mark.parametrize("kind", SOURCES)
def test_every_source_gives_the_same_table(
    kind: str, world: Path, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--format", "parquet", "--dense", "--workers", WORKERS.get(kind, 0))
    assert run(world, small, SOURCES[kind], "out", *more) == 1
    assert "5 images done, 1 could not be read" in capsys.readouterr().out
    table = pandas.read_parquet(world / "out").set_index("path")
    assert len(table) == 6
    by_number = {Path(path).stem: row for path, row in table.iterrows()}
    assert set(by_number) == {str(number) for number in range(6)}
    assert "damaged or truncated" in by_number["3"]["error"]
    assert pandas.isna(by_number["3"]["cls"])
    model = veca.load(small)
    for number, cls, grid in expected(small):
        row = by_number[str(number)]
        assert pandas.isna(row["error"])
        assert tuple(row["grid"]) == grid
        assert tuple(row["size"]) == ((60, 48) if number % 2 else (48, 90))
        np.testing.assert_allclose(row["cls"], cls, atol=1e-5)
        with torch.inference_mode():
            own = model(model.preprocess(encoded(number, *row["size"]), size=SIZE), cores=CORES).patches[0]
        assert row["patches"].dtype == np.float16
        np.testing.assert_allclose(row["patches"].reshape(own.shape), own, atol=2e-3)


def test_shards_give_npz_files_too(world: Path, small: Path) -> None:
    assert run(world, small, SOURCES["shards"], "out") == 1
    rows = [json.loads(line) for line in (world / "out" / "index.jsonl").read_text().splitlines()]
    assert {row["path"] for row in rows} == {f"{world}/shard-{n // 3}.tar/{n}.png" for n in range(6)}
    found = {Path(row["path"]).stem: np.load(world / "out" / row["output"])["cls"] for row in rows if "output" in row}
    for number, cls, _ in expected(small):
        np.testing.assert_allclose(found[str(number)], cls, atol=1e-5)


def test_a_table_continues(
    world: Path, small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("veca.extract.parquet.ROWS", 2)
    assert run(world, small, ("photos/0.png", "photos/1.png", "photos/3.png"), "out", "--format", "parquet") == 1
    parts = sorted((world / "out").glob("part-*.parquet"))
    (world / "out" / "part-cut.parquet").write_bytes(parts[0].read_bytes()[:-20])  # as a kill leaves it
    (world / "out" / ".part-hidden.parquet").write_bytes(b"PAR1")
    before = {path: path.stat().st_mtime_ns for path in parts}
    capsys.readouterr()
    (world / "photos" / "3.png").write_bytes(encoded(3))
    assert run(world, small, SOURCES["photos"], "out", "--format", "parquet") == 0
    assert "4 images done, 2 were there before" in capsys.readouterr().out
    table = pandas.read_parquet(world / "out")
    assert sorted(table["path"]) == [f"{world}/photos/{number}.png" for number in range(6)]
    assert table["error"].isnull().all()
    assert sum(path.exists() and path.stat().st_mtime_ns == time for path, time in before.items()) >= 1
    assert not list((world / "out").glob("*cut*"))
    assert not list((world / "out").glob(".part*"))
    with pytest.raises(InputError, match=r"made with dense False \(now True\)"):
        run(world, small, SOURCES["photos"], "out", "--format", "parquet", "--dense")
    assert run(world, small, SOURCES["photos"], "out", "--format", "parquet") == 0
    assert "0 images done, 6 were there before" in capsys.readouterr().out


def test_a_row_that_is_there_twice_goes(tmp_path: Path) -> None:
    """A run was killed after it had put the good rows of a part into a new one, before it removed the old."""
    out = tmp_path / "out"
    with ParquetFolder(out, {"dense": False}) as folder:
        for name in ("a", "b"):
            folder.add(name, {"cls": np.ones(3, np.float32)}, (1, 1), (1, 1))
        folder.flush()
    (part,) = out.glob("*.parquet")
    (out / "part-again.parquet").write_bytes(part.read_bytes())
    with ParquetFolder(out, {"dense": False}) as folder:
        assert folder.done == {"a", "b"}
    assert sorted(pandas.read_parquet(out)["path"]) == ["a", "b"]


def test_a_table_at_an_address(tmp_path: Path) -> None:
    """By pyarrow (file) and by fsspec (local); one that neither knows is named."""
    for kind in ("file", "local"):
        for _ in range(2):
            with ParquetFolder(f"{kind}://{tmp_path}/{kind}", {"dense": False}) as folder:
                if not folder.has("a"):
                    folder.add("a", {"cls": np.ones(3, np.float32)}, (1, 1), (1, 1))
        assert len(pandas.read_parquet(tmp_path / kind)) == 1
    with (
        pytest.raises(InputError, match="nowhere://bucket/x: neither pyarrow nor fsspec knows"),
        ParquetFolder("nowhere://bucket/x", {"dense": False}),
    ):
        pass


def test_lists_at_addresses_and_of_addresses(world: Path) -> None:
    photo = f"{world}/photos/0.png"
    (world / "far.txt").write_text(f"photos/0.png\nfile://{photo}\n")
    assert find_files((str(world / "far.txt"),)) == [photo, f"file://{photo}"]
    assert find_files((f"file://{world}/far.txt",)) == [f"file://{photo}"]
    with pytest.raises(InputError, match="addresses are read by --engine ray"):
        find_entries((world / "far.txt",))


def test_every_image_is_in_one_share(world: Path, small: Path) -> None:
    for number in (1, 2, 3, 4):
        run(world, small, SOURCES["photos"], "out", "--format", "parquet", "--shard", f"{number}/4")
    assert sorted(path.name for path in (world / "out").iterdir()) == [
        f"shard-{number}-of-4" for number in (1, 2, 3, 4)
    ]
    table = pandas.read_parquet(world / "out")
    assert sorted(table["path"]) == [f"{world}/photos/{number}.png" for number in range(6)]


@pytest.mark.parametrize("text", ["0/4", "5/4", "3", "a/b", "-1/4", "1/0"])
def test_a_share_that_is_none_is_named(text: str) -> None:
    with pytest.raises(InputError, match="such as 3/16, not"):
        read_shard(text)


@pytest.mark.parametrize("damage", [b"{", b"[]", b"null"])
def test_damaged_settings_are_one_line(damage: bytes, tmp_path: Path) -> None:
    with ParquetFolder(tmp_path / "out", {"size": 3, "dense": False}):
        pass
    (tmp_path / "out" / "_settings.json").write_bytes(damage)
    with pytest.raises(InputError, match="damaged"), ParquetFolder(tmp_path / "out", {"size": 3, "dense": False}):
        pass


def test_names_of_any_bytes_are_known_again(tmp_path: Path) -> None:
    for _ in range(2):
        with ParquetFolder(tmp_path / "out", {"dense": False}) as folder:
            if not folder.has("/x/\udcff.jpg"):
                folder.add("/x/\udcff.jpg", {"cls": np.ones(3, np.float32)}, (1, 1), (1, 1))
    assert len(pandas.read_parquet(tmp_path / "out")) == 1


def test_mistakes_get_one_line(world: Path, small: Path) -> None:
    for given, message in (
        ("s3://bucket/photos", "s3://bucket/photos: addresses are read by --engine ray"),
        ("table.csv", "no such file"),
    ):
        with pytest.raises(InputError, match=message):
            find_entries((given,))
    (world / "broken.tar").write_bytes(b"no tar" * 1000)
    with pytest.raises(InputError, match="not a readable tar file"):
        find_entries((world / "broken.tar",))
    (world / "broken.parquet").write_bytes(b"no table" * 1000)
    with pytest.raises(InputError, match="not a readable Parquet file"):
        find_entries((world / "broken.parquet",))
    with pytest.raises(InputError, match="--address is about a cluster"):
        run(world, small, SOURCES["photos"], "out", "--address", "auto")
