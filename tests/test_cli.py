"""The command as a person meets it: help, mistakes, info."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from veca.cli import COMMANDS, main


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "veca.cli", *arguments], capture_output=True, text=True, timeout=120)


def test_help_lists_every_command() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert all(f"  {name} " in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_examples(name: str) -> None:
    done = run(name, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: veca {name}")
    assert "xample" in done.stdout
    assert f"veca {name}" in done.stdout.split("\n", 1)[1]


def test_mistakes_are_one_line_and_status_2() -> None:
    for arguments, words in (
        (("fly",), "no command 'fly'"),
        (("info", "veca_giant"), "no model at 'veca_giant'"),
        (("import", "nowhere.pt", "out"), "no model at 'nowhere.pt'"),
    ):
        done = run(*arguments)
        assert done.returncode == 2
        assert words in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
        assert done.stdout == ""


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
        ("bench serve --clients many", "--clients"),
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


def test_an_argument_of_any_bytes_is_one_line() -> None:
    for words in (
        (b"features", b"\xff.jpg", b"--out", b"out"),
        (b"info", b"\xfe"),
        (b"\xfd",),
        (b"features", b"--\xff"),
    ):
        done = subprocess.run([sys.executable.encode(), b"-m", b"veca.cli", *words], capture_output=True, timeout=120)
        assert done.returncode == 2, done.stderr
        assert len(done.stderr.splitlines()) == 1, done.stderr


def test_a_disk_that_refuses_is_one_line_and_status_2(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    done = run("info", "veca_tiny", "--json", str(tmp_path / "file/deeper/info.json"))
    assert done.returncode == 2
    assert done.stderr.startswith(f"veca info: {tmp_path / 'file'}")
    assert len(done.stderr.strip().splitlines()) == 1
    done = run("info", "veca_tiny", "--json", str(tmp_path))
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1


def test_version() -> None:
    import veca

    assert run("--version").stdout == f"veca {veca.__version__}\n"


def test_info_of_a_size_initialises_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import Tensor, nn

    from veca import info

    drawn: list[str] = []
    plain = nn.init.trunc_normal_

    def watched(tensor: Tensor, *arguments: float, **options: float) -> Tensor:
        drawn.append(tensor.device.type)
        return plain(tensor, *arguments, **options)

    monkeypatch.setattr(nn.init, "trunc_normal_", watched)
    monkeypatch.setattr(info, "SIZES", (256,))
    assert info.describe("veca_large")["parameters"] == 303_195_301
    assert set(drawn) == {"meta"}


def test_info_prints_and_writes_the_same_numbers(tmp_path: Path) -> None:
    done = run("info", "veca_small", "--json", str(tmp_path / "info.json"))
    assert done.returncode == 0, done.stderr
    assert "21,628,961" in done.stdout
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
    assert f"{row['veca']['64'] / 1e9:,.1f}" in done.stdout


def test_info_shows_a_card_as_it_is(tmp_path: Path) -> None:
    import veca

    model = veca.create_model("veca_tiny", depth=1)
    model.card = {"data": "photos [of a] kind[/bold]"}
    model.save(tmp_path / "model")
    assert "photos [of a] kind[/bold]" in run("info", str(tmp_path / "model")).stdout


def test_info_without_a_model_names_them_all() -> None:
    import veca

    done = run("info")
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in (*veca.list_models(), *veca.bundled_models()))


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
