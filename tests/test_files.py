"""Whole files or none: modes, kills, and what a killed writer leaves."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import veca
from veca.files import remove_partials, whole_file, whole_folder, write_text

WRITES_FOR_EVER = """
import sys, time
from veca.files import whole_file, whole_folder
folder = sys.argv[1].endswith(".zarr")
with (whole_folder if folder else whole_file)(sys.argv[1]) as temporary:
    (temporary / "0" if folder else temporary).write_text("half")
    print("writing", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def strict_mask() -> object:
    before = os.umask(0o077)
    yield
    os.umask(before)


def writer(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", WRITES_FOR_EVER, path], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    return process


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "a.txt", "a")
        with whole_folder(tmp_path / "folder") as folder:
            write_text(folder / "b.txt", "b")
    finally:
        os.umask(before)
    assert [mode(tmp_path / name) for name in ("a.txt", "folder", "folder/b.txt")] == [0o640, 0o750, 0o640]


@pytest.mark.usefixtures("strict_mask")
def test_the_umask_of_other_threads_is_left_alone(tmp_path: Path) -> None:
    """It belongs to the whole process: to read it by setting it opens a moment in which files are everybody's."""
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            write_text(tmp_path / "mine.txt", "mine")

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for number in range(3000):
            path = tmp_path / f"{number}.txt"
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o666))
            assert mode(path) == 0o600
    finally:
        stop.set()
        thread.join()


def test_what_a_killed_writer_left_is_removed_and_what_is_being_written_stays(tmp_path: Path) -> None:
    killed = [writer(tmp_path / name) for name in ("model.safetensors", "slide.zarr")]
    alive = [writer(tmp_path / name) for name in ("config.json", "scene.zarr")]
    for process in killed:
        process.kill()
        process.wait()
    assert len(list(tmp_path.glob(".*.partial*"))) == 4
    try:
        remove_partials(tmp_path)
        assert sorted(path.name.split(".")[1] for path in tmp_path.glob(".*.partial*")) == ["config", "scene"]
    finally:
        for process in alive:
            process.kill()
            process.wait()
    veca.create_model("veca_tiny", depth=1).save(tmp_path)
    assert not list(tmp_path.glob(".*.partial*"))
    assert (tmp_path / "config.json").is_file()


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with whole_file(tmp_path / "a.txt") as temporary:
            temporary.write_text("half")
            raise KeyError("no")

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_file_name_is_one_line() -> None:
    for name in ("", ".", "..", "/"):
        with pytest.raises(veca.InputError, match="is no name of a file"):
            write_text(name, "text")


def test_a_write_that_fails_without_a_reason_names_the_file(tmp_path: Path) -> None:
    """numpy's errors of a full disk have neither a number nor a name; those of a plain write have no name."""
    for error in (OSError("Not enough free space to write 22127616 bytes"), OSError(errno.EDQUOT, "quota")):
        with pytest.raises(OSError, match="part") as caught, whole_file(tmp_path / "part.npy"):
            raise error
        assert caught.value.filename == str(tmp_path / "part.npy")
        assert caught.value.errno == (error.errno or errno.ENOSPC)
        assert not list(tmp_path.iterdir())
