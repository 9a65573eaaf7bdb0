"""Records stay readable whatever the disk does, and a log without a terminal says where the run is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from veca.training import records
from veca.training.records import Records, append_line, keep_until, read_metrics

# A limit on the size of files cuts a line in the middle, as a full disk does.
FULL = """
import resource, signal, sys
from pathlib import Path
from veca.training.records import Records
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
out = Path(sys.argv[1])
records = Records(out, total=9, start=0, board=False)
records.train(1, {"loss": 1.0}, "first")
size = (out / "metrics.jsonl").stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))
records.train(2, {"loss": 2.0}, "does not fit")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
records.train(3, {"loss": 3.0}, "third")
"""


def test_a_full_disk_leaves_no_half_line(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "records cannot be written (File too large); training goes on" in done.stdout
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 3]


@pytest.mark.parametrize("left", [b'{"kind": "train", "st', b"", b"x" * 200_000])
def test_what_a_kill_left_of_a_line_is_cut_off(tmp_path: Path, left: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + left)
    append_line(path, '{"step": 2}')
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"step": 1}, {"step": 2}]


def test_a_resumed_run_leaves_the_records_readable(tmp_path: Path) -> None:
    """As an older version left them: half a line, and the next record glued to it."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo{"step": 3}\n\xff\x00\n7\n{"step": 4}\n{"step": 5}\n')
    assert [record["step"] for record in read_metrics(path)] == [1, 4, 5]
    keep_until(path, 4)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"step": 1}, {"step": 4}]


def test_a_log_without_a_terminal_says_where_the_run_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = Records(tmp_path, total=200, start=100, board=False)
    log.beat(101)
    assert capsys.readouterr().out == ""  # nothing new to say yet
    monkeypatch.setattr(records, "SILENCE", -1)
    log.began -= 7200
    log.beat(150)
    assert capsys.readouterr().out == "step 150/200  2 h 00 min left\n"
