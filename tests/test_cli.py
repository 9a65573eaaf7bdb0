"""The command as a person meets it: help, mistakes, info."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from veca.cli import COMMANDS, main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The status and what was printed to stdout and stderr: in this process, where PyTorch is imported once."""

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            status = main(list(arguments))
        except SystemExit as left:  # --help
            status = left.code or 0  # type: ignore[assignment]
        return (status, *capsys.readouterr())

    return run


def test_help_lists_every_command(run: Run) -> None:
    status, out, _ = run("--help")
    assert status == 0
    assert all(f"  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_examples(name: str, run: Run) -> None:
    status, out, printed = run(name, "--help")
    assert status == 0, printed
    assert out.startswith(f"usage: veca {name}")
    assert "xample" in out
    assert f"veca {name}" in out.split("\n", 1)[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("fly",), "no command 'fly'"),
        (("info", "veca_giant"), "no model at 'veca_giant'"),
        (("import", "nowhere.pt", "out"), "no model at 'nowhere.pt'"),
    ],
)
def test_mistakes_are_one_line_and_status_2(arguments: tuple[str, ...], words: str, run: Run) -> None:
    status, out, printed = run(*arguments)
    assert (status, out) == (2, "")
    assert words in printed
    assert len(printed.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("features --bogus 1 --out y", "Unrecognized options: --bogus, 1"),
        ("features", "--out DIR is missing"),
        ("features x --out y --size abc", "--size: invalid literal for int"),
        ("import a", "OUT is missing"),
        ("features --stream a --out b --tokens float8", "invalid choice 'float8' for argument '--tokens'"),
        ("export veca-s14 --out", "Missing value for argument '--out'"),
        ("serve --slo 5parsec", "--slo: write it as 500ms or 2s, not '5parsec'"),
        ("serve --max-byte 3", "perhaps you meant --max-bytes BYTES"),
        ("distill laptop --step x", "--out PATH are missing; unrecognized options --step, x"),
        ("finetune segment --zork", "--data DIR, --model STR are missing"),
        ("probe classify --size", "--size"),
        ("bench --sizes many", "--sizes"),
        ("bench distill --zork", "--zork"),
        ("explore --what", "--what"),
        ("demo 1", "1"),
        ("info a b c", "Unrecognized options: b, c"),
    ],
)
def test_wrong_arguments_are_one_plain_line(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert main(arguments.split()) == 2
    out, printed = capsys.readouterr()
    assert out == ""
    assert len(printed.splitlines()) == 1, printed
    assert said in printed
    assert "--help" in printed
    assert "│" not in printed
    assert os.environ["COLUMNS"] == "40"


ANY_BYTES = [
    (b"features", b"\xff.jpg", b"--out", b"out"),
    (b"info", b"\xfe"),
    (b"\xfd",),
    (b"features", b"--\xff"),
]


@pytest.mark.parametrize("words", ANY_BYTES)
def test_an_argument_of_any_bytes_is_one_line(words: tuple[bytes, ...], run: Run) -> None:
    status, _, printed = run(*map(os.fsdecode, words))  # as Python reads the arguments of a process
    assert status == 2
    assert len(printed.splitlines()) == 1, printed


def test_the_command_is_a_process() -> None:
    """Bytes of a real command line, to a real stderr."""
    command = [sys.executable.encode(), b"-m", b"veca.cli", *ANY_BYTES[1]]
    done = subprocess.run(command, capture_output=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_a_disk_that_refuses_is_one_line_and_status_2(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    status, _, printed = run("info", "veca_tiny", "--json", str(tmp_path / "file/deeper/info.json"))
    assert status == 2
    assert printed.startswith(f"veca info: {tmp_path / 'file'}")
    assert len(printed.strip().splitlines()) == 1
    status, _, printed = run("info", "veca_tiny", "--json", str(tmp_path))
    assert status == 2
    assert len(printed.strip().splitlines()) == 1


def test_version(run: Run) -> None:
    import veca

    assert run("--version")[1] == f"veca {veca.__version__}\n"


def test_info_of_a_size_initialises_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import Tensor, nn

    from veca import info

    drawn: list[str] = []
    plain = nn.init.trunc_normal_

    def watched(tensor: Tensor, *arguments: float, **options: float) -> Tensor:
        drawn.append(tensor.device.type)
        return plain(tensor, *arguments, **options)

    monkeypatch.setattr(nn.init, "trunc_normal_", watched)
    assert info.describe("veca_large")["parameters"] == 303_195_301
    assert set(drawn) == {"meta"}


def test_info_prints_and_writes_the_same_numbers(run: Run, tmp_path: Path) -> None:
    status, out, printed = run("info", "veca_small", "--json", str(tmp_path / "info.json"))
    assert status == 0, printed
    assert "21,628,961" in out
    about = json.loads((tmp_path / "info.json").read_text())
    assert about["parameters"] == 21_628_961
    assert about["budgets"] == [8, 16, 24, 32, 40, 48, 56, 64]
    row = about["flops"][-1]
    assert (row["size"], row["patches"]) == (2048, 16384)
    patches, width = 16384, 384
    linear = 2 * (patches + 64) * width * (4 * width + 3 * 1024)
    block = linear + 4 * width * (2 * patches * 64 + 64 * 64)
    heads = 11 * 2 * 64 * width * 2
    assert row["veca"]["64"] == 12 * block + 2 * patches * 768 * width + heads
    assert row["dinov3"] > 7 * row["veca"]["64"]
    assert f"{row['veca']['64'] / 1e9:,.1f}" in out


def test_info_shows_a_card_as_it_is(run: Run, tmp_path: Path) -> None:
    import veca

    model = veca.create_model("veca_tiny", depth=1)
    model.card = {"data": "photos [of a] kind[/bold]"}
    model.save(tmp_path / "model")
    assert "photos [of a] kind[/bold]" in run("info", str(tmp_path / "model"))[1]


def test_info_tells_the_runs_of_a_model_in_their_order(run: Run) -> None:
    """`recipe` says that the last run started from veca-s14: read alone, veca-s14 was made from veca-s14."""
    status, out, printed = run("info", "veca-s14")
    assert status == 0, printed
    runs = [line.split(None, 4) for line in out.splitlines() if line.startswith("  run ")]
    assert [line[:4] for line in runs] == [["run", str(n), "of", str(len(runs))] for n in range(1, len(runs) + 1)]
    assert "convert from teacher, " in runs[0][4]
    for number, line in enumerate(runs[1:], 1):
        assert f"convert from the result of run {number}, " in line[4]
    assert out.count("veca-s14") == 1  # its name, and nothing made of itself


def test_info_without_a_model_names_them_all(run: Run) -> None:
    import veca

    status, out, printed = run("info")
    assert status == 0, printed
    assert all(name in out for name in (*veca.list_models(), *veca.bundled_models()))


def test_help_does_not_wait_for_torch() -> None:
    script = "import sys, veca.cli; veca.cli.main(['--help']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=60)


def test_public_names() -> None:
    import veca

    for name in veca.__all__:
        assert getattr(veca, name) is not None
    assert set(veca.__all__) == {*veca._PUBLIC, "__version__"}
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        veca.lod  # noqa: B018
