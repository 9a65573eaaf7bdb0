"""`make results`: a step runs, rewrites its page, leaves a stamp and is then skipped; the list makes sense."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .world import ROOT

sys.path.insert(0, str(ROOT / "docs"))
import reproduce as script
from steps import STEPS, Step, probe_table

from veca import create_model
from veca.cli import COMMANDS, main

Reproduce = Callable[..., str]


@pytest.fixture
def reproduce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Reproduce:
    """Run the script with these arguments (its steps are processes): what it and they print."""
    monkeypatch.chdir(tmp_path)  # the script goes to the top of the repository; this brings the test back

    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["reproduce.py", *map(str, arguments)])
        status = script.main()
        printed = "".join(capfd.readouterr())
        assert status == 0, printed
        return printed

    return run


def test_a_step_is_done_once_and_rewrites_the_copy_of_its_page(tmp_path: Path, reproduce: Reproduce) -> None:
    before = (ROOT / "docs/performance.md").read_bytes()
    arguments = ("--quick", "--only", "attention", "--results", tmp_path)
    reproduce(*arguments)
    page = (tmp_path / "quick/docs/performance.md").read_text(encoding="utf-8")
    section = page.split("<!-- attention:begin -->")[1].split("<!-- attention:end -->")[0]
    assert "| 128² |" in section
    assert "(bench/attention/bench.png)" in section
    assert (tmp_path / "quick/docs/bench/attention/bench.png").is_file()
    assert (ROOT / "docs/performance.md").read_bytes() == before
    done = json.loads((tmp_path / "quick/attention/done.json").read_text(encoding="utf-8"))
    assert done["command"].startswith("veca bench --paths attention")
    assert "attention: done before" in reproduce(*arguments)
    (tmp_path / "quick/docs/bench/attention/bench.json").unlink()
    assert "attention (about" in reproduce(*arguments, "--list")


def test_new_weights_make_a_step_due_again(tmp_path: Path) -> None:
    create_model("veca_tiny", depth=1).save(tmp_path / "model")
    step = next(step for step in STEPS if step.name == "cost")
    run = script.Run(script.Settings(model=str(tmp_path / "model"), results=tmp_path / "r"))
    stamp = {"command": shlex.join(run.command(step)), "weights": run.weights(step)}
    (tmp_path / "r/cost").mkdir(parents=True)
    (tmp_path / "r/cost/done.json").write_text(json.dumps(stamp))
    run.outputs = lambda _: []  # type: ignore[method-assign]
    assert run.done(step) is not None
    create_model("veca_tiny", depth=1).save(tmp_path / "model")
    assert run.done(step) is None


def test_what_is_missing_is_named_and_left_out(tmp_path: Path, reproduce: Reproduce) -> None:
    printed = reproduce("--only", "probe-pets", "--results", tmp_path, "--shared", tmp_path / "none")
    assert "probe-pets: left out, it needs" in printed
    with pytest.raises(SystemExit, match="no step is called 'nothing'"):
        reproduce("--only", "nothing")


def test_a_step_that_fails_is_named_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    steps = (Step("bad", "veca bench --sizes 17", 1, ("x",)), Step("good", "veca --version", 1, ("done.json",)))
    monkeypatch.setattr(script, "STEPS", steps)
    monkeypatch.setattr(sys, "argv", ["reproduce.py", "--results", str(tmp_path)])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good").mkdir()
    (tmp_path / "good/done.json").write_text('{"command": "another"}', encoding="utf-8")
    assert script.main() == 1
    printed = capfd.readouterr().out
    assert "failed: bad" in printed
    assert "1 of 2 steps are done" in printed


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
    assert probe_table(tmp_path).splitlines() == [
        "| model | cores | pixels | top1 | of teacher |",
        "|" + " --- |" * 5,
        "| teacher | – | 28 | 0.6000 ± 0.0100 | 100.0% |",
        "| veca | 8 | 28 | 0.3000 | 50.0% |",
    ]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_flags_of_a_step_exist(step: Step, capsys: pytest.CaptureFixture[str]) -> None:
    """A flag that a command has lost would otherwise show after hours."""
    if not step.command.startswith("veca"):
        return
    names = [word for word in step.command.split()[1:3] if re.fullmatch(r"[a-z]+", word)]
    with pytest.raises(SystemExit):
        main([*names, "--help"])
    known = capsys.readouterr().out
    for flag in re.findall(r"--[a-z][a-z-]*", f"{step.command} {step.quick}"):
        assert re.search(rf"({flag}|{flag.replace('--no-', '--')})(?![\w-])", known), flag
