"""`make results`: a step runs, rewrites its page, leaves a stamp and is then skipped; the list makes sense."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import reproduce as script
from docs.flags import unknown_flags
from plots import PLOTS, draw_all
from steps import STEPS, Step, own_rows, probe_rows, read_csv

from veca import create_model
from veca.cli import COMMANDS

ROOT = Path(__file__).parents[2]

Reproduce = Callable[..., str]

NOT_RUN = {"judge", "stability", "blank", "windows"}  # they wait for the second edition of veca-s14
NOT_RUN |= {"ranks", "ranks-training", "carry-davis"}  # they wait for a quiet machine
NOT_RUN |= {"cells-patches", "elastic-voc-448", "smaller-voc-448", "cores-voc-448", "cores-voc-896"}  # likewise
NOT_RUN |= {f"{name}-voc" for name in ("grid", "finer", "larger", "half", "quarter", "eighth")}  # so do these


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


@pytest.mark.end_to_end
def test_a_step_is_done_once_and_rewrites_copies_of_the_page_and_its_rows(tmp_path: Path, reproduce: Reproduce) -> None:
    kept = [ROOT / "docs" / name for name in ("results.md", "numbers/commands.csv", "numbers/small.csv")]
    before = [path.read_bytes() for path in kept]
    arguments = ("--quick", "--only", "small", "--results", tmp_path)
    reproduce(*arguments)
    docs = tmp_path / "quick/docs"
    section = (docs / "results.md").read_text(encoding="utf-8").split("<!-- small:begin -->")[1].split("<!-- small")[0]
    assert "--sizes 64 128" in section
    assert "(numbers/small.csv)" in section
    rows = read_csv(docs / "numbers/small.csv")
    assert {row["size"] for row in rows} == {"64", "128"}
    assert {"veca, 8 cores", "veca, 64 cores", "dinov3"} <= {row["arm"] for row in rows}
    (entry,) = (row for row in read_csv(docs / "numbers/commands.csv") if row["step"] == "small")
    assert entry["command"] in section
    assert [path.read_bytes() for path in kept] == before
    done = json.loads((tmp_path / "quick/small/done.json").read_text(encoding="utf-8"))
    assert done["command"] == entry["command"]
    assert "small: done before" in reproduce(*arguments)
    (tmp_path / "quick/small/bench.csv").unlink()
    assert "small (about" in reproduce(*arguments, "--list")


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
    printed = reproduce("--only", "random-davis", "--results", tmp_path, "--data", tmp_path / "none")
    assert f"random-davis: left out, it needs {tmp_path / 'none/davis'}" in printed
    with pytest.raises(SystemExit, match="no step is called 'nothing'"):
        reproduce("--only", "nothing")


@pytest.mark.end_to_end
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


def test_steps_have_different_names_and_a_command() -> None:
    assert len({step.name for step in STEPS}) == len(STEPS)
    for step in STEPS:
        program, name, *_ = step.command.split()
        assert (program == "veca" and name in COMMANDS) or (program == "python" and (ROOT / name).is_file())
        assert step.minutes > 0
        assert step.outputs


def test_every_number_of_the_docs_has_its_command_machine_and_date() -> None:
    numbers, text = ROOT / "docs/numbers", {path: path.read_text(encoding="utf-8") for path in ROOT.glob("docs/*.md")}
    entries = {entry["step"]: entry for entry in read_csv(numbers / "commands.csv")}
    assert entries.keys() == {path.stem for path in numbers.glob("*.csv")} - {"commands"}
    assert entries.keys() == {step.name for step in STEPS if step.rows is not None} - NOT_RUN
    assert all(value for entry in entries.values() for value in entry.values())
    steps, marked = {step.name: step for step in STEPS}, 0
    for path, page in text.items():
        for name in set(re.findall(r"<!-- (\S+):begin -->", page)) & entries.keys():
            section = script.section(steps[name], entries[name], read_csv(numbers / f"{name}.csv"))
            assert f"<!-- {name}:begin -->\n{section}\n<!-- {name}:end -->" in page, (path.name, name)
            marked += 1
    assert marked > 6


def test_a_table_of_what_a_step_shows() -> None:
    step = Step("s", "veca", 1, (), shown=("J&F", "J"))
    entry = {"step": "s", "command": "veca x", "machine": "cpu", "date": "today"}
    rows = [
        {"model": "t", "cores": "", "sequence": "dog", "J&F": "0.9", "J": "0.9"},
        {"model": "t", "cores": "", "sequence": "mean", "J&F": "0.8", "J": "0.75"},
        {"model": "veca-s14", "cores": "8", "sequence": "mean", "J&F": "0.6", "J": "0.7"},
    ]
    assert script.section(step, entry, rows).splitlines() == [
        "`veca x`; cpu, today. [Rows](numbers/s.csv).",
        "",
        "| model | cores | J&F | J | of teacher |",
        "|---|---|---|---|---|",
        "| teacher | – | 0.800 | 0.750 | 100.0 % |",
        "| veca-s14 | 8 | 0.600 | 0.700 | 75.0 % |",
    ]
    nothing = script.section(step, entry, [{**rows[1], "J&F": "0"}, {**rows[2], "J&F": "0"}])
    assert nothing.endswith("| veca-s14 | 8 | 0.000 | 0.700 | – |")
    alone = script.section(step, entry, rows[2:]).splitlines()
    assert alone[2:] == ["| model | cores | J&F | J |", "|---|---|---|---|", "| veca-s14 | 8 | 0.600 | 0.700 |"]


def test_the_rows_of_a_probe(tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text(
        "model,source,cores,size,pixels,seeds,top1,top1_deviation,share_of_first\n"
        "teacher,../t,,30,28,2,0.6,0.0141421356,1.000000\nveca,veca-s14,8,30,28,2,0.3,0.000000,0.5\n"
    )
    assert probe_rows(tmp_path) == [
        {"model": "teacher", "cores": "", "pixels": "28", "seeds": "2", "top1": "0.6", "top1_deviation": "0.0141421",
         "share_of_first": "1"},
        {"model": "veca", "cores": "8", "pixels": "28", "seeds": "2", "top1": "0.3", "top1_deviation": "0",
         "share_of_first": "0.5"},
    ]  # fmt: skip


def test_rows_of_a_tool_are_csv_or_json(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('[{"read": "everything", "seconds": 4.5}]')
    (tmp_path / "rows.csv").write_text("read,seconds\neverything,4.5\n")
    assert own_rows("rows.json")(tmp_path) == [{"read": "everything", "seconds": 4.5}]
    assert own_rows("rows.csv")(tmp_path) == [{"read": "everything", "seconds": "4.5"}]


def test_the_plots_are_drawn_from_the_rows(tmp_path: Path) -> None:
    drawn = draw_all(ROOT / "docs/numbers", tmp_path)
    assert {path.stem.removeprefix("results-") for path in drawn} == PLOTS.keys() - {"floors", "stability"}  # NOT_RUN's
    page = "".join((ROOT / f"docs/{name}.md").read_text(encoding="utf-8") for name in ("results", "elastic"))
    for path in drawn:
        assert f"(images/{path.name})" in page
        assert (ROOT / "docs/images" / path.name).is_file()
        assert path.stat().st_size < 60_000


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_flags_of_a_step_exist(step: Step) -> None:
    """A flag that a command has lost would otherwise show after hours."""
    if step.command.startswith("veca"):
        assert not unknown_flags(f"{step.command} {step.quick}".split()[1:])
