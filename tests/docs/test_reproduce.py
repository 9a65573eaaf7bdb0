"""`make results`: a step runs, rewrites its page, leaves a stamp and is then skipped; the list makes sense."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .world import ROOT

sys.path.insert(0, str(ROOT / "docs"))
from steps import STEPS, probe_table

from veca.cli import COMMANDS


def reproduce(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "docs/reproduce.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_a_step_is_done_once_and_rewrites_the_copy_of_its_page(tmp_path: Path) -> None:
    before = (ROOT / "docs/performance.md").read_bytes()
    arguments = ("--quick", "--only", "attention", "--results", tmp_path)
    first = reproduce(*arguments)
    assert first.returncode == 0, first.stdout + first.stderr
    page = (tmp_path / "quick/docs/performance.md").read_text(encoding="utf-8")
    section = page.split("<!-- attention:begin -->")[1].split("<!-- attention:end -->")[0]
    assert "| 128² |" in section
    assert "(bench/attention/bench.png)" in section
    assert (tmp_path / "quick/docs/bench/attention/bench.png").is_file()
    assert (ROOT / "docs/performance.md").read_bytes() == before
    done = json.loads((tmp_path / "quick/attention/done.json").read_text(encoding="utf-8"))
    assert done["command"].startswith("veca bench --paths attention")
    second = reproduce(*arguments)
    assert "attention: done before" in second.stdout
    (tmp_path / "quick/docs/bench/attention/bench.json").unlink()
    assert "attention (about" in reproduce(*arguments, "--list").stdout


def test_what_is_missing_is_named_and_left_out(tmp_path: Path) -> None:
    done = reproduce("--only", "probe-pets", "--results", tmp_path, "--shared", tmp_path / "none")
    assert done.returncode == 0
    assert "probe-pets: left out, it needs" in done.stdout
    unknown = reproduce("--only", "nothing")
    assert unknown.returncode == 1
    assert "no step is called 'nothing'" in unknown.stderr


def test_steps_have_different_names_a_command_and_marks_in_their_page() -> None:
    assert len({step.name for step in STEPS}) == len(STEPS)
    for step in STEPS:
        program, name, *_ = step.command.split()
        assert (program == "veca" and name in COMMANDS) or (program == "python" and (ROOT / name).is_file())
        assert step.minutes > 0
        assert step.outputs
        if step.table is not None:
            text = (ROOT / "docs" / step.page).read_text(encoding="utf-8")
            for mark in ("begin", "end"):
                assert text.count(f"<!-- {step.name}:{mark} -->") == 1, f"{step.page} has no marks for {step.name}"


def test_the_table_of_a_probe(tmp_path: Path) -> None:
    def row(model: str, cores: int | None, values: list[float], share: float | None) -> dict[str, object]:
        scores = {"mean": sum(values) / len(values), "deviation": 0.01, "values": values}
        return {"model": model, "cores": cores, "pixels": 28, "metrics": {"top1": scores}, "share_of_first": share}

    rows = [row("teacher", None, [0.5, 0.7], 1.0), row("veca", 8, [0.3], 0.5)]
    (tmp_path / "results.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")
    assert probe_table(tmp_path).splitlines()[2:] == [
        "| teacher | – | 28 | 0.6000 ± 0.0100 | 100.0% |",
        "| veca | 8 | 28 | 0.3000 | 50.0% |",
    ]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_flags_of_a_step_exist(step: object) -> None:
    """Each command and its quick flags parse: a flag that a command lost would only show after hours."""
    import re

    command, quick = step.command, step.quick  # type: ignore[attr-defined]
    if not command.startswith("veca"):
        return
    names = [word for word in command.split()[1:3] if re.fullmatch(r"[a-z]+", word)]
    from contextlib import redirect_stdout
    from io import StringIO

    from veca.cli import main

    text = StringIO()
    with redirect_stdout(text), pytest.raises(SystemExit):
        main([*names, "--help"])
    for flag in re.findall(r"--[a-z][a-z-]*", f"{command} {quick}"):
        assert flag in text.getvalue() or flag.replace("--no-", "--") in text.getvalue(), flag
