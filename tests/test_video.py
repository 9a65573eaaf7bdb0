"""Frames of videos, and cores that go from one to the next."""

from __future__ import annotations

import json
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image
from test_streaming import VARIANTS, small
from torch import Tensor

import veca
from veca.cli import main as run_command
from veca.errors import InputError
from veca.model import Veca
from veca.scan import spread
from veca.video import Frames, is_video, read_frames

pytestmark = pytest.mark.usefixtures("one_thread")


def by_layers(model: Veca, frames: list[Tensor], cores: int, parts: int) -> list[tuple[Tensor, Tensor]]:
    """Cores and patches (before the final norm) of every frame, with whole softmaxes and nothing merged.

    In each layer the cores read each part of the patches as it entered that layer in the frame that last read it.
    """
    patch = model.patch_size
    grid = frames[0].shape[-2] // patch, frames[0].shape[-1] // patch
    numbers = spread(torch.arange(grid[0] * grid[1]), grid).tensor_split(parts)
    logits: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in model.blocks]
    results = []
    for number, frame in enumerate(frames):
        x, _ = model.embed(frame)
        by = model.patch_rotation(grid, frame.device)
        tokens, state, pace = model.bank(cores, 1)
        for index, block in enumerate(model.blocks):
            if index:
                state = model.bank.move(state, pace, tokens, index)
            by_core = model.rotation(state.tanh())
            attn, normed, view = block.attn, block.norm_attn(tokens), block.norm_attn(x)
            query, key, value = attn.queries(normed, by_core), attn.keys(normed, by_core), attn.values(normed)
            for part in range(parts) if number == 0 else [number % parts]:
                own = view[:, numbers[part]]
                keys = attn.keys(own, by and by.at(numbers[part]))
                logits[index][part] = (query @ keys.transpose(2, 3) / query.shape[-1] ** 0.5, attn.values(own))
            scores = [query @ key.transpose(2, 3) / query.shape[-1] ** 0.5] + [a for a, _ in logits[index].values()]
            told = torch.cat(scores, -1).softmax(-1) @ torch.cat([value] + [b for _, b in logits[index].values()], 2)
            x = block.finish(x, attn.out(torch.softmax(
                attn.queries(view, by) @ key.transpose(2, 3) / query.shape[-1] ** 0.5, -1) @ value))  # fmt: skip
            tokens = block.finish(tokens, attn.out(told))
        results.append((tokens, x))
    return results


@pytest.mark.parametrize("variant", VARIANTS)
def test_carried_cores_are_those_of_an_independent_computation(variant: str) -> None:
    model = small(**VARIANTS[variant])
    patch = model.patch_size
    frames = [torch.randn(1, 3, 4 * patch, 5 * patch) for _ in range(5)]
    carried = Frames(model, cores=5, share=1 / 3, carry=True)
    with torch.no_grad():
        expected = by_layers(model, frames, 5, 3)
        for frame, (cores, patches) in zip(frames, expected, strict=True):
            found = carried(frame)
            torch.testing.assert_close(found.cores, model.output(cores), atol=2e-5, rtol=1e-4)
            torch.testing.assert_close(found.patches, model.output(patches), atol=2e-5, rtol=1e-4)


def test_while_nothing_moves_a_carried_frame_is_the_whole_pass() -> None:
    model = small()
    still, other = torch.randn(2, 1, 3, 96, 64)
    carried = Frames(model, cores=6, share=0.25, carry=True)
    with torch.no_grad():
        whole, before = model(still, cores=6), model(other, cores=6)
    torch.testing.assert_close(carried(other).patches, before.patches, atol=2e-5, rtol=1e-4)  # the first is read whole
    differences = [float((carried(still).patches - whole.patches).abs().max()) for _ in range(13)]
    assert differences[0] > 1e-3  # a cut: three quarters of what the cores know is of another picture
    assert differences[12] < 1e-4  # each of the three layers has read all four parts after the one below was right
    carried.reset()
    for _ in range(3):
        torch.testing.assert_close(carried(still).patches, whole.patches, atol=2e-5, rtol=1e-4)


def test_a_carried_scan_looks_like_the_carried_pass() -> None:
    model = small()
    frames = torch.randn(3, 1, 3, 64, 96)
    one, other = (Frames(model, cores=6, share=0.5, carry=True) for _ in range(2))
    for frame in frames:
        scan, out = one.scan(frame), other(frame)
        torch.testing.assert_close(scan.cls, out.cls[0], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(scan.look().features.flatten(0, 1), out.patches[0], atol=2e-5, rtol=1e-4)


def test_without_carry_frames_do_not_know_each_other() -> None:
    model = small()
    frames = torch.randn(2, 1, 3, 64, 64)
    plain, shared = Frames(model, cores=6), Frames(model, cores=6, share=0.5)
    for frame in frames:
        with torch.no_grad():
            torch.testing.assert_close(plain(frame).patches, model(frame, cores=6).patches)
        torch.testing.assert_close(shared(frame).cls[0], model.scan(frame, cores=6, share=0.5).cls)


def test_a_frame_of_another_size_begins_anew() -> None:
    model = small()
    carried = Frames(model, cores=4, share=0.5, carry=True)
    carried(torch.randn(1, 3, 64, 64))
    turned = torch.randn(1, 3, 96, 64)
    with torch.no_grad():
        torch.testing.assert_close(carried(turned).patches, model(turned, cores=4).patches, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"carry": True}, "one half, a third, a quarter"),
        ({"carry": True, "share": 0.4}, "one half, a third, a quarter"),
        ({"share": 0}, "share must lie above 0"),
        ({"cores": 1000}, "cores must lie between"),
    ],
)
def test_what_cannot_be_carried_is_refused(words: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Frames(small(), **words)


def test_frames_come_one_at_a_time_and_have_enough_patches() -> None:
    carried = Frames(small(), cores=4, share=0.25, carry=True)
    with pytest.raises(InputError, match="one at a time"):
        carried(torch.randn(2, 3, 64, 64))
    with pytest.raises(InputError, match="has no 4 parts"):
        carried(torch.randn(1, 3, 16, 16))


# Files


def write_video(path: Path, colours: list[tuple[int, int, int]]) -> Path:
    with av.open(str(path), "w") as file:
        stream = file.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        for colour in colours:
            pixels = np.full((64, 96, 3), colour, np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode(None))
    return path


COLOURS = [(200, 30, 30), (30, 200, 30), (30, 30, 200)]


def test_a_video_file_is_read_frame_by_frame(tmp_path: Path) -> None:
    frames = list(read_frames(write_video(tmp_path / "clip.mp4", COLOURS)))
    assert [name for name, _ in frames] == ["000000", "000001", "000002"]
    for (_, image), colour in zip(frames, COLOURS, strict=True):
        assert image.size == (96, 64)
        assert np.abs(np.asarray(image).mean((0, 1)) - colour).max() < 12  # as lossy as video is
    assert is_video("A.MP4")
    assert not is_video("a.png")


def test_a_folder_of_frames_is_read_in_order(tmp_path: Path) -> None:
    for name, colour in zip(("b.png", "a.png", "c.jpg"), COLOURS, strict=True):
        Image.new("RGB", (8, 8), colour).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no frame")
    assert [name for name, _ in read_frames(tmp_path)] == ["a.png", "b.png", "c.jpg"]


def test_frames_are_ordered_by_their_numbers_with_and_without_zeros_before(tmp_path: Path) -> None:
    names = ["shot1_8.png", "shot1_9.png", "shot1_10.png", "shot1_0100.png", "shot2_1.png", "²_1.png"]
    for name in reversed(names):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    assert [name for name, _ in read_frames(tmp_path)] == names


def test_what_is_no_video_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(b"not a video at all")
    (tmp_path / "list.mp4").write_text("ffconcat version 1.0\nfile http://127.0.0.1:9/x.mp4\n")
    (tmp_path / "empty").mkdir()
    whole = write_video(tmp_path / "whole.mp4", COLOURS * 8).read_bytes()
    (tmp_path / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    for name in ("clip.mp4", "list.mp4", "cut.mp4"):
        with pytest.raises(InputError, match="not a video that can be decoded"):
            list(read_frames(tmp_path / name))
    with pytest.raises(InputError, match="no frames in this folder"):
        list(read_frames(tmp_path / "empty"))
    with pytest.raises(InputError, match="no such file or folder"):
        list(read_frames(tmp_path / "nowhere.mp4"))


# Commands


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    return write_video(tmp_path / "clip.mp4", COLOURS)


@pytest.fixture
def model(tmp_path: Path) -> str:
    small(patch_size=16).save(tmp_path / "model")
    return str(tmp_path / "model")


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "index.jsonl").read_text().splitlines()]


def test_features_of_a_video_file_are_those_of_its_frames(clip: Path, model: str, tmp_path: Path) -> None:
    words = ["--model", model, "--cores", "6", "--size", "64", "--dense", "--dtype", "float32", "--device", "cpu"]
    assert run_command(["features", str(clip), "--out", str(tmp_path / "out"), *words]) == 0
    found = rows(tmp_path / "out")
    assert [Path(row["path"]).name for row in found] == ["000000", "000001", "000002"]
    loaded = veca.load(model)
    for row, (_, image) in zip(found, read_frames(clip), strict=True):
        with torch.no_grad():
            out = loaded(loaded.preprocess(image, size=64), cores=6)
        stored = np.load(tmp_path / "out" / row["output"])
        assert (row["size"], row["grid"]) == ([96, 64], [4, 6])
        np.testing.assert_allclose(stored["cls"], out.cls[0], atol=1e-4)
        np.testing.assert_allclose(stored["patches"], out.patches[0].unflatten(0, out.grid), atol=1e-4)


def test_carried_features_of_a_folder_of_frames_and_a_run_that_goes_on(
    clip: Path, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "frames"
    folder.mkdir()
    for name, image in read_frames(clip):
        image.save(folder / f"{name}.png")
    words = ["--model", model, "--cores", "6", "--size", "64", "--dtype", "float32", "--device", "cpu", "--carry"]
    words += ["--share", "0.5", "--out", str(tmp_path / "out")]
    assert run_command(["features", str(folder), *words]) == 0
    loaded = veca.load(model)
    carried = Frames(loaded, cores=6, share=0.5, carry=True)
    found = rows(tmp_path / "out")
    assert [Path(row["path"]) for row in found] == sorted(folder.iterdir())
    for row in found:
        expected = carried(loaded.preprocess(row["path"], size=64)).cls[0]
        np.testing.assert_allclose(np.load(tmp_path / "out" / row["output"])["cls"], expected, atol=1e-4)
    capsys.readouterr()
    last = tmp_path / "out" / found[2]["output"]
    before = np.load(last)["cls"]
    last.unlink()
    assert run_command(["features", str(folder), *words]) == 0
    assert "1 frames done, 2 were there before" in capsys.readouterr().out
    np.testing.assert_array_equal(np.load(last)["cls"], before)  # as if nothing had interrupted it


def test_scans_of_a_video_and_looking_at_a_frame(
    clip: Path, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", model, "--cores", "6", "--dtype", "float32", "--device", "cpu", "--share", "0.5", "--carry"]
    assert run_command(["scan", str(clip), "--out", str(tmp_path / "scans"), *words]) == 0
    assert run_command(["scan", str(clip), "--out", str(tmp_path / "scans"), *words]) == 0
    assert "0 frames scanned, 3 were there before" in capsys.readouterr().out
    file = tmp_path / "scans/clip.mp4/000001.scan"
    look = ["look", str(file), "--out", str(tmp_path / "seen.npy"), "--dtype", "float32", "--device", "cpu"]
    assert run_command(look) == 0
    carried = Frames(veca.load(model), cores=6, share=0.5, carry=True)
    scans = [carried.scan(np.asarray(image)) for _, image in read_frames(clip)]
    np.testing.assert_allclose(np.load(tmp_path / "seen.npy"), scans[1].look().features, atol=2e-2)  # kept in float16
    before = np.load(tmp_path / "seen.npy")
    file.unlink()
    assert run_command(["scan", str(clip), "--out", str(tmp_path / "scans"), *words]) == 0
    assert "1 frames scanned, 2 were there before" in capsys.readouterr().out
    assert run_command(look) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "seen.npy"), before)


def test_what_no_video_command_takes(
    clip: Path, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "photo.png")
    out = ["--out", str(tmp_path / "out"), "--model", model, "--cores", "6"]

    def refused(message: str, *words: object, status: int = 2) -> None:
        assert run_command([*map(str, words), *out]) == status
        assert message in capsys.readouterr().err

    refused("photos and videos need separate runs", "features", clip, tmp_path / "photo.png")
    refused("photos and videos need separate runs", "scan", tmp_path / "photo.png", "--carry", "--share", "0.5")
    refused("one half, a third, a quarter", "features", clip, "--carry")
    refused("--stride is for photos", "features", clip, "--dense", "--stride", "7")
    refused("are for single images", "scan", clip, "--tokens", "float16")
    refused("are for photos, not for videos", "features", clip, "--shard", "1/2")
    refused("share must lie above 0", "features", clip, "--share", "2")
    refused("--share is for videos", "features", tmp_path / "photo.png", "--share", "0.5")
    (tmp_path / "bad.mp4").write_bytes(b"nothing")
    refused("bad.mp4: not a video that can be decoded", "features", tmp_path / "bad.mp4", status=1)
