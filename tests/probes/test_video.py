"""`veca probe video` from the command line, on tiny videos: the table, resuming, layouts, drawing and mistakes."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import veca.probes.video
from veca import create_model
from veca.backbones import load_backbone
from veca.cli import main
from veca.probes.video import eyes, follow
from veca.tasks.video.data import find_sequences

Run = Callable[..., str]
MODEL = "veca-s14"


def plant(
    folder: Path, name: str, frames: int = 5, layout: tuple[str, str] = ("frames", "masks"), seed: int = 0
) -> None:
    """A textured square that moves a patch a frame over another texture, and its masks (255, as in DAVIS 2016)."""
    draw = np.random.default_rng(seed)
    background = np.kron(draw.integers(0, 90, (16, 24, 3)), np.ones((7, 7, 1))).astype(np.uint8)
    square = np.kron(draw.integers(130, 256, (8, 8, 3)), np.ones((7, 7, 1))).astype(np.uint8)
    for part in layout:
        (folder / part / name).mkdir(parents=True)
    for number in range(frames):
        image, mask, left = background.copy(), np.zeros((112, 168), np.uint8), 14 + 14 * number
        image[28:84, left : left + 56], mask[28:84, left : left + 56] = square, 255
        Image.fromarray(image).save(folder / layout[0] / name / f"{number:05d}.png")
        Image.fromarray(mask).save(folder / layout[1] / name / f"{number:05d}.png")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    plant(tmp_path / "data", "one")
    plant(tmp_path / "data", "two", seed=1)
    return tmp_path / "data"


@pytest.fixture
def run(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """What the command prints; `status` is its exit status."""

    def probe(*words: object, where: Path = data, status: int = 0) -> str:
        common = ["--data", where, "--out", tmp_path / "out", "--size", 112, "--device", "cpu", *words]
        assert main(["probe", "video", *map(str, common)]) == status
        shown = capsys.readouterr()
        return shown.out if status == 0 else shown.err

    return probe


def results(tmp_path: Path) -> dict:
    return json.loads((tmp_path / "out/results.json").read_text())


def test_a_moving_square_is_followed(run: Run, tmp_path: Path) -> None:
    shown = run("--model", MODEL, "--cores", "16,64")
    assert shown.splitlines()[0].split()[:6] == ["model", "cores", "size", "J&F", "J", "F"]
    found = results(tmp_path)
    assert [row["cores"] for row in found["rows"]] == [16, 64]
    for row in found["rows"]:
        assert set(row["sequences"]) == {"one", "two"}
        assert row["frames"] == 6  # of five frames the first and the last do not count
        assert row["metrics"]["J"]["mean"] > 0.85
        mean = np.mean([[one["J"], one["F"]] for one in row["sequences"].values()])
        assert row["metrics"]["J&F"]["mean"] == pytest.approx(mean)
    with open(tmp_path / "out/results.csv") as file:
        assert [float(line["J&F"]) for line in csv.DictReader(file)] == pytest.approx(
            [row["metrics"]["J&F"]["mean"] for row in found["rows"]], abs=1e-5
        )
    with open(tmp_path / "out/sequences.csv") as file:
        lines = list(csv.DictReader(file))
    assert [(line["cores"], line["sequence"]) for line in lines] == [
        (cores, name) for cores in ("16", "64") for name in ("one", "two", "mean")
    ]
    for line in lines:
        row = found["rows"][["16", "64"].index(line["cores"])]
        for name in ("J&F", "J", "F"):
            right = (
                row["metrics"][name]["mean"] if line["sequence"] == "mean" else row["sequences"][line["sequence"]][name]
            )
            assert float(line[name]) == pytest.approx(right, abs=1e-5)


def test_models_sizes_and_budgets_are_one_table(run: Run, tmp_path: Path) -> None:
    for seed, name in enumerate(("small", "other")):
        torch.manual_seed(seed)
        create_model("veca_tiny", depth=1, bank=4).save(tmp_path / name)
    models = [word for name in ("small", "other") for word in ("--model", tmp_path / name)]
    shown = run(*models, "--cores", "2,4", "--size", "64,112", "--frames", "4")
    rows = results(tmp_path)["rows"]
    cells = [(row["model"], row["size"], row["cores"]) for row in rows]
    assert cells == [(name, size, cores) for name in ("small", "other") for size in (64, 112) for cores in (2, 4)]
    assert len(shown.splitlines()) >= 1 + 8
    again = [
        "--model",
        tmp_path / "other",
        "--cores",
        "4",
        "--size",
        "64",
        "--frames",
        "4",
        "--out",
        tmp_path / "alone",
    ]
    run(*again)
    (alone,) = json.loads((tmp_path / "alone/results.json").read_text())["rows"]
    assert alone["metrics"] == rows[5]["metrics"]
    assert alone["metrics"] != rows[1]["metrics"]  # of the other model


def test_masks_of_other_frames_score_near_nothing(run: Run, data: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        for number in range(1, 5):  # where the square never is
            wrong = np.zeros((112, 168), np.uint8)
            wrong[:14, 140:] = 255
            Image.fromarray(wrong).save(data / "masks" / name / f"{number:05d}.png")
    run("--model", MODEL, "--cores", "64")
    assert results(tmp_path)["rows"][0]["metrics"]["J&F"]["mean"] < 0.05


def test_a_stopped_run_goes_on_where_it_was(
    run: Run, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    follow = veca.probes.video.follow

    def counted(one, *rest):
        if one.name == "two" and len(seen) == 1:
            seen.append("killed")
            raise KeyboardInterrupt
        seen.append(one.name)
        return follow(one, *rest)

    monkeypatch.setattr(veca.probes.video, "follow", counted)
    run("--model", MODEL, "--cores", "8", status=130)
    assert list(results(tmp_path)["rows"][0]["sequences"]) == ["one"]
    run("--model", MODEL, "--cores", "8")
    assert seen == ["one", "killed", "two"]
    run("--model", MODEL, "--cores", "8", "--frames", "4")  # another measurement: nothing is reused
    assert seen[3:] == ["one", "two"]
    mask = data / "masks/two/00002.png"
    Image.fromarray(np.zeros((112, 168), np.uint8)).save(mask)  # a changed file is seen again, the others are not
    run("--model", MODEL, "--cores", "8", "--frames", "4")
    assert seen[5:] == ["two"]
    (tmp_path / "out/sequences/veca-s14-112px-8cores/one.json").write_text("{")
    run("--model", MODEL, "--cores", "8", "--frames", "4")
    assert seen[6:] == ["one"]


def test_davis_layout_lists_and_several_objects(run: Run, tmp_path: Path) -> None:
    davis = tmp_path / "DAVIS"
    for seed, name in enumerate(("bear", "camel", "dog")):
        plant(davis, name, 4, ("JPEGImages/480p", "Annotations/480p"), seed)
    for path in (davis / "Annotations/480p/dog").iterdir():  # two objects, each half of the square
        mask = np.asarray(Image.open(path)).copy()
        mask[56:][mask[56:] > 0] = 2
        mask[mask == 255] = 1
        Image.fromarray(mask).save(path)
    (davis / "ImageSets/480p").mkdir(parents=True)
    lines = [f"/JPEGImages/480p/{name}/{n:05d}.jpg /Annotations/480p/x.png" for name in ("bear", "dog") for n in (0, 1)]
    (davis / "ImageSets/480p/val.txt").write_text("\n".join(lines))
    run("--model", MODEL, "--cores", "32", where=davis)
    row = results(tmp_path)["rows"][0]
    assert list(row["sequences"]) == ["bear", "dog"]
    each = json.loads((tmp_path / "out/sequences/veca-s14-112px-32cores/dog.json").read_text())["objects"]
    assert [one["object"] for one in each] == [1, 2]
    bear = row["sequences"]["bear"]["J"]
    assert row["metrics"]["J"]["mean"] == pytest.approx((bear + each[0]["J"] + each[1]["J"]) / 3)  # over objects


def test_masks_of_any_kind_are_the_same_object(run: Run, data: Path, tmp_path: Path) -> None:
    """DAVIS 2016 has grey masks and masks in colours in one sequence; some have an alpha channel."""
    run("--model", MODEL, "--cores", "8")
    before = results(tmp_path)["rows"][0]["sequences"]["one"]
    for number, mode in enumerate(("L", "RGB", "LA", "RGBA")):
        mask = Image.open(data / f"masks/one/{number:05d}.png").convert(mode)
        mask.save(data / f"masks/one/{number:05d}.png")
    run("--model", MODEL, "--cores", "8")
    assert results(tmp_path)["rows"][0]["sequences"]["one"] == before


def test_frames_are_taken_by_their_numbers(data: Path) -> None:
    for path in (*(data / "frames/one").iterdir(), *(data / "masks/one").iterdir()):
        path.rename(path.with_name(f"{int(path.stem) + 8}.png"))
    one = find_sequences(data)[0]
    assert [path.stem for path in one.frames] == ["8", "9", "10", "11", "12"]
    assert [mask and mask.stem for mask in one.masks] == ["8", "9", "10", "11", "12"]


def test_drawn_frames_and_a_clip(run: Run, data: Path, tmp_path: Path) -> None:
    run("--model", MODEL, "--cores", "64", "--frames", "4")
    assert not (tmp_path / "out/drawn").exists()
    run("--model", MODEL, "--cores", "64", "--frames", "4", "--draw")
    folder = tmp_path / "out/drawn/veca-s14-112px-64cores"
    clip = Image.open(folder / "one.webp")
    assert (clip.n_frames, clip.size) == (4, (168, 112))
    drawn = np.asarray(Image.open(folder / "one/00002.jpg").convert("RGB")).astype(int)
    plain = np.asarray(Image.open(data / "frames/one/00002.png")).astype(int)
    change = np.abs(drawn - plain).mean(-1)
    inside = np.asarray(Image.open(data / "masks/one/00002.png")) > 0
    assert change[inside].mean() > 40
    assert change[~inside].mean() < 20


def test_a_clip_of_other_weights_is_drawn_again(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "out/drawn/model-112px-4cores"
    words = ("--model", tmp_path / "model", "--cores", "4", "--frames", "4")

    def new_weights() -> None:
        create_model("veca_tiny", depth=1, bank=4).save(tmp_path / "model")

    new_weights()
    run(*words, "--draw")
    before = (folder / "one.webp").stat().st_mtime_ns
    run(*words, "--draw")
    assert (folder / "one.webp").stat().st_mtime_ns == before
    new_weights()
    run(*words)  # scored, not drawn: the clip is still that of the weights before
    run(*words, "--draw")
    assert (folder / "one.webp").stat().st_mtime_ns > before


def test_the_score_is_that_of_the_features(data: Path) -> None:
    """Features that tell the square from the rest follow it; those of a place beside it score nothing, noise little."""
    one = find_sequences(data)[0]
    noise = torch.Generator().manual_seed(0)

    def score(change: Callable[[torch.Tensor], torch.Tensor]) -> float:
        masks = iter(one.masks)

        def see(image: Image.Image) -> torch.Tensor:
            mask = torch.from_numpy(np.asarray(Image.open(next(masks))) > 0)
            return change(nn.functional.one_hot(mask[7::14, 7::14].long(), 2).float())

        (found,) = follow(one, see, None)["objects"]
        return found["J"]

    assert score(lambda features: features) > 0.9
    shift = iter([0, 6, 6, 6, 6])  # the square is 4 patches wide, so it seems to jump beside itself
    assert score(lambda features: features.roll(next(shift), 1)) < 0.02
    chance = (4 * 4) / (2 * 8 * 12 - 4 * 4)  # of as many patches anywhere
    assert score(lambda features: torch.randn(features.shape, generator=noise)) < 2 * chance


def test_carried_cores_follow_too_and_are_another_row(run: Run, tmp_path: Path) -> None:
    run("--model", MODEL, "--cores", "64", "--share", "0.25", "--carry")
    assert results(tmp_path)["rows"][0]["metrics"]["J"]["mean"] > 0.8
    assert (tmp_path / "out/sequences/veca-s14-112px-64cores-0.25carried/one.json").is_file()


def test_the_model_is_frozen(data: Path) -> None:
    backbone = load_backbone("random:veca_tiny")
    before = {name: value.clone() for name, value in backbone.model.state_dict().items()}
    follow(find_sequences(data)[0], eyes(backbone, {"carry": False, "cores": 8, "size": 112}), None)
    assert not backbone.model.training
    assert all(not parameter.requires_grad and parameter.grad is None for parameter in backbone.model.parameters())
    assert all(bool((before[name] == value).all()) for name, value in backbone.model.state_dict().items())


def test_what_cannot_work_is_said_at_once(run: Run, data: Path, tmp_path: Path) -> None:
    def refused(message: str, *words: object, where: Path = data) -> None:
        shown = run(*words, where=where, status=2)
        assert message in shown
        assert shown.count("\n") == 1

    refused("give at least one --model")
    refused("no such folder", "--model", MODEL, where=tmp_path / "nowhere")
    refused("neither JPEGImages/ and Annotations/ nor frames/ and masks/", "--model", MODEL, where=data / "frames")
    refused("one half, a third, a quarter", "--model", MODEL, "--carry")
    refused("has budgets from 1 to 64", "--model", MODEL, "--cores", "65")
    refused("nothing to score in 2 frames", "--model", MODEL, "--frames", "2")
    Image.new("L", (8, 8)).save(data / "masks/one/00001.png")
    refused("00001.png: another size than its frame", "--model", MODEL)
    Image.new("L", (168, 112)).save(data / "masks/one/00001.png")
    Image.new("L", (168, 112)).save(data / "masks/one/00000.png")
    refused("00000.png: the first mask is empty", "--model", MODEL)
    (data / "masks/one/00000.png").unlink()
    Image.new("L", (168, 112), 255).save(data / "masks/one/00000.jpg")
    refused("JPEG does not keep the numbers of a mask", "--model", MODEL)
    (data / "masks/one/00000.jpg").unlink()
    refused("no mask of 00000", "--model", MODEL)
    assert not (tmp_path / "out/results.json").exists()
