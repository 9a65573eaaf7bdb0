"""Laying out the photographs that judge, and the table of floors."""

from __future__ import annotations

import subprocess
from pathlib import Path

import judge
import judged
import pytest


def repository(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for words in (("init", "-q"), ("add", "."), (*who, "commit", "-qm", "a")):
        subprocess.run(["git", "-C", str(folder), *words], check=True)


def test_a_kind_has_photographs_to_look_among_and_others_to_judge(tmp_path: Path) -> None:
    files = {
        f"101_ObjectCategories/{kind}/{n}.jpg": f"{kind} {n}".encode() for kind in ("ant", "emu") for n in range(31)
    }
    repository(tmp_path / "MachineLearning2020+Homework2-Caltech101/repo", files)
    for out in ("one", "two"):
        judged.caltech(tmp_path, tmp_path / out)
    for kind in ("ant", "emu"):
        train, test = ({path.name for path in (tmp_path / "one" / part / kind).iterdir()} for part in ("train", "test"))
        assert (len(train), len(test), train & test) == (15, 10, set())
        assert train == {path.name for path in (tmp_path / "two/train" / kind).iterdir()}
        assert all((tmp_path / "one/test" / kind / name).read_text() == f"{kind} {Path(name).stem}" for name in test)


def test_only_large_underwater_photographs_are_laid_out(tmp_path: Path) -> None:
    folder = "VOCdevkit/VOC2007"
    files = {f"{folder}/Annotations/{n}.xml": f"<width>{width}</width>".encode() for n, width in ((1, 720), (2, 3840))}
    repository(
        tmp_path / "xieyifang0508+fasterrcnn/repo", files | {f"{folder}/JPEGImages/{n}.jpg": b"p" for n in (1, 2)}
    )
    judged.underwater(tmp_path, tmp_path / "out")
    found = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.*")}
    assert found == {"Annotations/2.xml", "JPEGImages/2.jpg"}


def test_a_floor_is_a_share_of_the_teacher_or_a_value(tmp_path: Path) -> None:
    assert judge.Line("mIoU", "64", 0.76, 0.8, 0.9).words()[3:] == ["0.8000", "95.0%", "90%", "yes"]
    assert judge.Line("mIoU", "64", 0.72, 0.8, 0.91).words()[-1] == "NO"
    assert judge.Line("RMSE", "8", 0.6, 0.5, 1.25, lower=True).words()[4:] == ["1.20 ×", "1.25 ×", "yes"]
    assert judge.Line("cosine", "8", 0.96, None, 0.985).words()[4:] == ["0.9600", "0.985", "NO"]
    (tmp_path / "results.csv").write_text("cores,top1_k20\n,0.5\n8,0.3\n64,0.45\n")
    assert [(line.cores, line.share) for line in judge.neighbours(tmp_path)] == [
        ("64", pytest.approx(0.9)),
        ("8", pytest.approx(0.6)),
    ]


def test_the_teachers_rows_are_in_the_docs(tmp_path: Path) -> None:
    """Of the same protocol: the size of a part's command is that of the step whose row is read."""
    commands = {row["step"]: row["command"] for row in judge.read_csv(judge.ROOT / "docs/numbers/commands.csv")}
    for part, step in (("pets", "probe-pets"), ("nyu-depth", "probe-nyu"), ("voc-seg", "probe-voc")):
        command = next(one.command for one in judge.PARTS if one.name == part).split()
        size = command[command.index("--size") + 1]
        assert f"--size {size} " in commands[step]
