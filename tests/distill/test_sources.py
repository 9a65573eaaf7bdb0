"""Folders, lists and shards as one index."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest
import webdataset

from distill.runs import make_photos
from veca.distill import sources
from veca.distill.cache import describe
from veca.distill.sources import expand_braces, index_images
from veca.errors import InputError


def contents(images: sources.TrainingImages) -> list[bytes]:
    return [images.read(number) for number in range(len(images))]


def test_a_folder_with_subfolders(tmp_path: Path) -> None:
    make_photos(tmp_path / "b" / "deep", 3)
    make_photos(tmp_path / "a", 2)
    (tmp_path / "a" / "notes.txt").write_text("not an image")
    (tmp_path / "a" / ".hidden.png").write_bytes(b"")
    (tmp_path / "b" / "loop").symlink_to(tmp_path)  # must not go round for ever
    images = index_images([str(tmp_path)])
    names = [images.name(number) for number in range(len(images))]
    assert names == [f"{tmp_path}/{n}" for n in ("a/000.png", "a/001.png", "b/deep/000.png", "b/deep/001.png",
                                                 "b/deep/002.png")]  # fmt: skip
    assert contents(images) == [Path(name).read_bytes() for name in names]


def test_a_list_holds_relative_and_absolute_paths(tmp_path: Path) -> None:
    photos = make_photos(tmp_path / "photos", 2)
    (tmp_path / "list.txt").write_text(f"# two photographs\nphotos/000.png\n\n{photos / '001.png'}\n")
    assert contents(index_images([str(tmp_path / "list.txt")])) == [p.read_bytes() for p in sorted(photos.iterdir())]
    odd = tmp_path / os.fsdecode(b"caf\xe9.png")  # a name that is no UTF-8, and so the list is none
    odd.write_bytes((photos / "000.png").read_bytes())
    (tmp_path / "odd.txt").write_bytes(b"caf\xe9.png\n")
    assert contents(index_images([str(tmp_path / "odd.txt")])) == [odd.read_bytes()]


def test_shards_written_by_webdataset(tmp_path: Path) -> None:
    photos = sorted(make_photos(tmp_path / "photos", 5).iterdir())
    for shard, part in (("00", photos[:3]), ("01", photos[3:])):
        with webdataset.TarWriter(str(tmp_path / f"s-{shard}.tar")) as writer:
            for path in part:
                writer.write({"__key__": path.stem, "png": path.read_bytes(), "json": {"label": 1}})
    for source in (f"{tmp_path}/s-{{00..01}}.tar", f"{tmp_path}/s-*.tar"):
        images = index_images([source])
        assert images.groups == [3, 2]
        assert contents(images) == [path.read_bytes() for path in photos]
    (tmp_path / "photos").rename(tmp_path / "elsewhere")
    only_shards = tmp_path / "shards"
    only_shards.mkdir()
    (tmp_path / "s-00.tar").rename(only_shards / "s-00.tar")
    assert len(index_images([str(only_shards)])) == 3
    assert images.name(4) == f"{tmp_path}/s-01.tar/004.png"


def test_the_index_is_remembered_until_something_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_photos(tmp_path / "photos" / "sub", 3).parent
    first = index_images([str(folder)])
    scans = []
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: scans.append(path) or scan(path))
    again = index_images([str(folder)])
    assert not scans
    assert again.digest() == first.digest()
    (folder / "sub" / "000.png").rename(folder / "sub" / "new.png")
    changed = index_images([str(folder)])
    assert scans
    assert changed.digest() != first.digest()


def test_a_damaged_index_is_made_again(tmp_path: Path) -> None:
    folder = make_photos(tmp_path / "photos", 2)
    index_images([str(folder)])
    for index in (Path(os.environ["VECA_CACHE"]) / "index").iterdir():
        index.write_bytes(index.read_bytes()[:20])
    assert len(index_images([str(folder)])) == 2


def test_braces() -> None:
    assert expand_braces("a-{08..11}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]
    assert expand_braces("{x,y}-{0..1}") == ["x-0", "x-1", "y-0", "y-1"]
    assert expand_braces("plain") == ["plain"]
    with pytest.raises(InputError, match="the numbers in braces run backwards"):
        expand_braces("a-{5..0}.tar")


def test_mistakes_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.md").write_text("")
    (tmp_path / "cut.tar").write_bytes(b"x" * 700)
    with tarfile.open(tmp_path / "none.tar", "w"):
        pass
    for source, message in (
        ("nothing", "there is no such file or folder"),
        ("*.png", "there is no such file or folder"),
        ("empty", "holds no images"),
        ("none.tar", "holds no images"),
        ("notes.md", "images are given as folders"),
        ("cut.tar", "not a readable tar file"),
    ):
        with pytest.raises(InputError, match=message):
            index_images([f"{tmp_path}/{source}"])


@pytest.mark.parametrize("pattern", ["{0..99999999}.tar", "{0..999}-{0..999}.tar", "{1..9999999999999999999999}"])
def test_braces_that_stand_for_too_many_are_refused(pattern: str) -> None:
    with pytest.raises(InputError, match="the braces stand for more than"):
        expand_braces(pattern)


def test_a_list_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_bytes(b"a.jpg\nb\0.jpg\n")
    with pytest.raises(InputError, match="its entry 2 holds a NUL byte"):
        index_images([str(tmp_path / "list.txt")])


@pytest.mark.parametrize("damage", ["{", "[]", "{}", '{"layers": 3}', 100_000 * "["])
def test_a_damaged_cache_is_one_line(damage: str, tmp_path: Path) -> None:
    (tmp_path / "cache.json").write_text(damage)
    with pytest.raises(InputError, match=r"cache\.json is damaged"):
        describe(tmp_path, {"layers": True})
