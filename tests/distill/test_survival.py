"""Each failure provoked for real: signals, damaged files, full disks, bad images, non-finite losses."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from distill.runs import kill, make_photos, start, tiny_settings, wait, wait_for_step, weights
from veca.distill.data import leave_signals_to_the_trainer
from veca.distill.engine import train
from veca.distill.settings import differences
from veca.distill.validation import Validation
from veca.errors import InputError
from veca.recipes.convert import Convert

pytestmark = pytest.mark.end_to_end


@pytest.fixture(scope="module")
def whole_run(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert wait(start(tiny_settings(root, out, val=(str(root / "photos"),), val_every=5, val_images=4))) == 0
    return out


@pytest.mark.parametrize("workers", [0, 2])
def test_killed_at_several_points_gives_the_same_weights(
    root: Path, whole_run: Path, tmp_path: Path, workers: int
) -> None:
    val = () if workers else (str(root / "photos"),)  # validation must not change what is trained
    settings = tiny_settings(root, tmp_path / "run", val=val, val_every=5, val_images=4, workers=workers)
    for step in (1, 6, 9):  # while forced, in the second epoch with free patches, among the late resolutions
        process = start(settings, delay=0.02)
        wait_for_step(settings.out, step, process)
        kill(process)
        assert not (settings.out / "last").exists()
    assert wait(start(settings)) == 0
    assert weights(settings.out) == weights(whole_run)
    steps = [json.loads(line)["step"] for line in (settings.out / "metrics.jsonl").read_text().splitlines()
             if '"kind": "train"' in line]  # fmt: skip
    assert steps == list(range(1, 13))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_save_before_leaving(root: Path, whole_run: Path, tmp_path: Path, number: signal.Signals) -> None:
    settings = tiny_settings(
        root, tmp_path / "run", val=(str(root / "photos"),), val_every=5, val_images=4, checkpoint_minutes=60
    )
    process = start(settings, delay=0.02)
    wait_for_step(settings.out, 3, process)
    os.kill(process.pid or 0, number)
    assert wait(process) == 0
    saved = sorted((settings.out / "checkpoints").glob("step-*.pt"))
    assert len(saved) == 1
    assert int(saved[0].name[5:13]) >= 3
    assert wait(start(settings)) == 0
    assert weights(settings.out) == weights(whole_run)


def test_a_signal_to_the_whole_group_saves_too(root: Path, tmp_path: Path) -> None:
    """Ctrl-C, `timeout` and systemd reach the data workers as well."""
    settings = tiny_settings(root, tmp_path / "run", workers=2, checkpoint_minutes=60)
    process = start(settings, delay=0.05)
    wait_for_step(settings.out, 3, process)
    workers = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert len(workers) >= 2
    for pid in (*workers, process.pid or 0):
        os.kill(pid, signal.SIGTERM)
    assert wait(process) == 0
    assert len(list((settings.out / "checkpoints").glob("step-*.pt"))) == 1


def test_a_run_that_cannot_save_ends_with_its_workers(root: Path, tmp_path: Path) -> None:
    """They take no notice of the SIGTERM that a process sends its children at its end: it would wait for minutes."""
    settings = tiny_settings(root, tmp_path / "run", steps=500, workers=1, checkpoint_minutes=60)
    process = start(settings, delay=0.05)
    wait_for_step(settings.out, 2, process)
    shutil.rmtree(settings.out)
    settings.out.write_text("something else")
    os.kill(process.pid or 0, signal.SIGTERM)
    assert wait(process, 60) == 2


def test_a_run_whose_worker_dies_ends_with_the_others(root: Path, tmp_path: Path) -> None:
    settings = tiny_settings(root, tmp_path / "run", steps=500, workers=2)
    process = start(settings, delay=0.05)
    wait_for_step(settings.out, 2, process)
    first, *_ = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(first), signal.SIGKILL)
    assert wait(process, 60) in (1, 2)  # PyTorch raises its error in the middle of whatever runs


def test_a_worker_outlives_a_signal_longer_than_any_step() -> None:
    """The trainer may need its batch for a validation of a minute yet."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM, signal.SIGTERM)}
    try:
        leave_signals_to_the_trainer(0)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signal.alarm(0) > 120
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_stopped_in_the_last_validation(
    root: Path, whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run is not finished before its last weights are judged and written."""
    settings = tiny_settings(root, tmp_path / "run", val=(str(root / "photos"),), val_every=50, val_images=4)
    judged = Validation.run
    monkeypatch.setattr(Validation, "run", lambda *_: None)  # what it answers when it is asked to stop
    train(settings)
    assert "stopped at step 12, before its validation" in capsys.readouterr().out
    assert not (settings.out / "last").exists()
    monkeypatch.setattr(Validation, "run", judged)
    train(settings)
    assert weights(settings.out) == weights(settings.out, "best") == weights(whole_run)
    train(settings)
    assert "this run is finished" in capsys.readouterr().out


def test_another_validation_chooses_the_best_anew(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = {"val": (str(root / "photos"),), "val_every": 4}
    train(tiny_settings(root, tmp_path / "run", **common, val_resolutions=(35,), stop_at=9))
    path = next((tmp_path / "run/checkpoints").glob("step-*9.*.pt"))
    before = torch.load(path, weights_only=True)["progress"]
    assert before["best"] < float("inf")
    train(tiny_settings(root, tmp_path / "run", **common, val_resolutions=(7,)))
    assert "validation has changed: the best model is chosen anew" in capsys.readouterr().out
    found = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    later = [record["loss"] for record in found if record["kind"] == "validation" and record["step"] > 9]
    path = next((tmp_path / "run/checkpoints").glob("step-*12.*.pt"))
    assert before["best"] < min(later) == torch.load(path, weights_only=True)["progress"]["best"]


def test_more_budgets_for_validation_on_the_way_still_give_curves(root: Path, tmp_path: Path) -> None:
    common = {"val": (str(root / "photos"),), "val_every": 2, "val_images": 2, "steps": 4}
    train(tiny_settings(root, tmp_path / "run", **common, val_budgets=(2,), stop_at=3))
    (tmp_path / "run/curves.png").unlink()
    train(tiny_settings(root, tmp_path / "run", **common, val_budgets=(2, 8)))
    assert (tmp_path / "run/curves.png").stat().st_size > 1000


def test_checkpoints_after_damaged_ones_are_kept(root: Path, whole_run: Path, tmp_path: Path) -> None:
    settings = tiny_settings(root, tmp_path / "run", stop_at=9)
    train(settings)
    damaged = list((settings.out / "checkpoints").glob("step-*.pt"))
    for path in damaged:
        path.write_bytes(b"rubbish")
    train(tiny_settings(root, settings.out, stop_at=3))
    kept = sorted(path.name[:13] for path in (settings.out / "checkpoints").glob("step-*.pt"))
    assert kept == ["step-00000002", "step-00000003"]
    assert not any(path.exists() for path in damaged)
    train(tiny_settings(root, settings.out))
    assert weights(settings.out) == weights(whole_run)


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    root: Path, whole_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    settings = tiny_settings(root, tmp_path / "run", stop_at=5)
    train(settings)
    last, before = sorted((settings.out / "checkpoints").glob("step-*.pt"), reverse=True)
    content = bytearray(last.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
    last.write_bytes(content[: len(content) // 2] if damage == "truncated" else content)
    capsys.readouterr()
    train(tiny_settings(root, settings.out))
    said = capsys.readouterr().out
    assert f"passing over the damaged checkpoint {last.name}" in said
    assert f"continuing {settings.out} at step {int(before.name[5:13])}" in said
    assert weights(settings.out) == weights(whole_run)


def test_a_checkpoint_that_cannot_be_read_now_is_not_given_up(root: Path, tmp_path: Path) -> None:
    """A network disk that stumbles must not restart a run at step 0 and overwrite its best model."""
    settings = tiny_settings(root, tmp_path / "run", stop_at=3)
    train(settings)
    last = max((settings.out / "checkpoints").glob("step-*.pt"))
    content = last.read_bytes()
    last.unlink()
    last.mkdir()  # reading it fails, as root too
    with pytest.raises(InputError, match=f"the checkpoint {last} cannot be read"):
        train(tiny_settings(root, settings.out))
    last.rmdir()
    last.write_bytes(content)
    train(tiny_settings(root, settings.out, stop_at=4))
    assert len(list((settings.out / "checkpoints").glob("step-00000004.*.pt"))) == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> object:
    """A file system of 3 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def fill(disk: Path) -> Path:
    """A file that takes all that is left."""
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 12)):
            pass
    return filler


def test_a_full_disk_keeps_the_previous_checkpoint(
    root: Path, whole_run: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tiny_settings(root, small_disk / "run", stop_at=3)
    train(settings)
    kept = sorted((settings.out / "checkpoints").glob("step-*.pt"))
    filler = fill(small_disk)
    capsys.readouterr()
    with pytest.raises(InputError, match=r"step 6 cannot be written \(No space left on device\); step-00000003.*stays"):
        train(tiny_settings(root, settings.out, stop_at=6))
    assert "warning: the checkpoint of step 4 cannot be written (No space left on device)" in capsys.readouterr().out
    assert sorted((settings.out / "checkpoints").glob("step-*.pt")) == kept
    filler.unlink()
    train(tiny_settings(root, settings.out))
    assert weights(settings.out) == weights(whole_run)


def test_a_full_disk_while_the_best_model_is_written(
    root: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """safetensors has an error of its own for it; the run goes on, and a later model becomes the best."""
    settings = tiny_settings(
        root,
        small_disk / "run",
        val=(str(root / "photos"),),
        val_every=4,
        val_images=4,
        checkpoint_minutes=60,
        stop_at=3,
    )
    train(settings)
    filler = fill(small_disk)
    capsys.readouterr()
    with pytest.raises(InputError, match="step 6 cannot be written"):
        train(dataclasses.replace(settings, stop_at=6))
    assert "the checkpoint of step 4 cannot be written (No space left on device)" in capsys.readouterr().out
    assert not (settings.out / "best/model.safetensors").exists()
    filler.unlink()
    train(dataclasses.replace(settings, stop_at=0))
    assert (settings.out / "best/model.safetensors").is_file()


def test_runs_of_an_older_version_go_on() -> None:
    """A setting that did not exist then had no effect; one that changed since has."""
    now = Convert(train=("x",), teacher="t", out=Path("o"), patch_share=1.0, cache_resolutions=()).to_dict()
    saved = {name: value for name, value in now.items() if name not in ("patch_share", "cache_resolutions")}
    assert differences(saved, now) == []
    assert differences(saved, now | {"patch_share": 0.5}) == ["patch-share: 1.0 → 0.5"]
    assert differences(saved | {"gone": 3}, now) == ["gone: 3 → None"]
    digest, other = "5" * 64, "6" * 64
    assert differences(saved | {"teacher weights": "7" * 16}, now | {"teacher weights": digest}) == []
    assert differences(saved | {"teacher weights": other}, now | {"teacher weights": digest}) != []


def test_changed_settings_are_refused_with_their_list(root: Path, tmp_path: Path) -> None:
    train(tiny_settings(root, tmp_path / "run", stop_at=2))
    with pytest.raises(InputError, match=r"other settings \(hints: 1.0 → 0.5; lr: 0.0002 → 0.001\)"):
        train(tiny_settings(root, tmp_path / "run", lr=1e-3, hints=0.5))
    more = shutil.copytree(root / "photos", tmp_path / "photos")
    make_photos(tmp_path / "other", 23)
    shutil.copy(tmp_path / "other" / "022.png", more)
    with pytest.raises(InputError, match="images: "):
        train(tiny_settings(root, tmp_path / "run", train=(str(more),)))
    with pytest.raises(InputError, match="4 images per step, this is 8"):
        train(tiny_settings(root, tmp_path / "run", batch=8))


def test_unreadable_images_are_skipped_counted_and_listed(root: Path, tmp_path: Path) -> None:
    photos = shutil.copytree(root / "photos", tmp_path / "photos")
    (photos / "003.png").write_bytes((photos / "003.png").read_bytes()[:60])
    (photos / "007.png").rename(photos / "two\nlines.png").write_text("not a picture")
    settings = tiny_settings(root, tmp_path / "run", train=(str(photos),), max_unreadable=0.2, workers=2)
    train(settings)
    listed = (settings.out / "unreadable.txt").read_text().splitlines()  # a name may hold a newline
    assert sorted(line.split("\t")[0] for line in listed) == [
        str(photos / name) for name in ("003.png", r"two\nlines.png")
    ]
    with pytest.raises(InputError, match=r"2 of 22 images are unreadable, more than --max-unreadable 0.05"):
        train(tiny_settings(root, tmp_path / "strict", train=(str(photos),), max_unreadable=0.05))


def test_a_folder_of_rubbish_ends_in_one_line(root: Path, tmp_path: Path) -> None:
    rubbish = tmp_path / "rubbish"
    rubbish.mkdir()
    for number in range(40):
        (rubbish / f"{number}.jpg").write_bytes(b"rubbish")
    with pytest.raises(InputError, match="32 images in a row are unreadable") as caught:
        train(tiny_settings(root, tmp_path / "run", train=(str(rubbish),), workers=2, hints=0, forcing=0,
                            fading=0, standardise=False))  # fmt: skip
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="32 images in a row are unreadable") as caught:
        train(tiny_settings(root, tmp_path / "run", val=(str(rubbish),), workers=2, steps=2))
    assert "\n" not in str(caught.value)


def test_a_loss_that_is_not_finite_skips_the_step_then_stops_the_run(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    with pytest.raises(InputError, match="not finite 3 times in a row; the last batch is in"):
        train(tiny_settings(root, out, lr=1e30, min_lr=1e30, clip=0, max_nonfinite=3))
    assert "the loss is not finite; skipped (1 in a row)" in capsys.readouterr().out
    kept = torch.load(next(out.glob("nonfinite-*.pt")), weights_only=True)
    assert kept["images"].shape == (4, 3, 28, 28)
    assert all(Path(name).is_file() for name in kept["names"])
    for path in (out / "checkpoints").glob("step-*.pt"):
        state = torch.load(path, weights_only=True)["model"]
        assert all(tensor.isfinite().all() for tensor in state.values())


def test_a_second_run_in_the_folder_is_refused_until_the_first_is_dead(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = start(tiny_settings(root, out, steps=60, workers=2), delay=0.05)
    wait_for_step(out, 2, first)
    other = start(tiny_settings(root, out, steps=60, seed=1))
    assert wait(other) == 2
    kill(first)  # its data workers live on for a few seconds
    train(tiny_settings(root, out, steps=60, workers=2, stop_at=8))
    assert json.loads((out / "settings.json").read_text())["seed"] == 0
