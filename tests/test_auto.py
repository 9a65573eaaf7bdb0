"""Budgets that choose themselves: the signal, the choice, the file, and `veca calibrate`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from test_mixed import TENSORS, images_of
from test_streaming import same, small
from torch import Tensor

import veca
from veca.auto import Busy, Calibration, Line, least
from veca.calibrate import SAFETY, calibrate, fit
from veca.cli import main
from veca.errors import InputError
from veca.mixed import choose_cells
from veca.model import Veca

pytestmark = pytest.mark.usefixtures("one_thread")
BANK = 8


def by_hand() -> Calibration:
    """4 cores cost 0.05 whatever the image; half of the patches cost nothing of a smooth image, much of a rough one."""
    settings = [(BANK, 1.0, 1.0, 0.0), (4, 1.0, 0.95, 0.0), (BANK, 0.5, 1.0, 0.04), (4, 0.5, 0.95, 0.04)]
    return Calibration(tuple(Line(32, *setting) for setting in settings), 10)


@pytest.fixture
def model() -> Veca:
    made = small(bank=BANK)
    made.calibration = by_hand()
    return made


def smooth_and_rough(model: Veca) -> Tensor:
    images = images_of(model, 3, (8, 8)).clamp(-1, 1)
    images[1] = 0.3
    return images


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8, 1.0])
def test_what_is_lost_is_what_averaging_the_cells_takes_away(share: float) -> None:
    image = torch.randn(1, 3, 9 * 4, 11 * 4)
    seen = torch.full_like(image, float("nan"))
    for x, y, side in choose_cells(image, 4, share if share < 1 else 1e-9).places[0].tolist():
        part = image[..., 4 * y : 4 * (y + side), 4 * x : 4 * (x + side)]
        means = part.unflatten(-1, (4, side)).mean(-1).unflatten(-2, (4, side)).mean(-2)
        seen[..., 4 * y : 4 * (y + side), 4 * x : 4 * (x + side)] = means.repeat_interleave(side, -1).repeat_interleave(
            side, -2
        )
    expected = (image - seen).square().sum(1).mean().sqrt()
    other = torch.zeros_like(image)
    assert Busy(torch.cat((other, image)), 4).lost(share).tolist() == pytest.approx([0, float(expected)], rel=1e-4)


def test_every_image_gets_the_fewest_tokens_that_its_own_line_allows(model: Veca) -> None:
    images = smooth_and_rough(model)
    # By hand: with half of the patches a rough image keeps 1 − 0.04 log(1 + lost/0.005), and on the way to all of them
    # what lies between this and 1; shares come in steps of 0.005.
    rough = []
    for image in (images[:1], images[2:]):
        kept = 1 - 0.04 * math.log1p(float(Busy(image, model.patch_size).lost(0.5)) / 0.005)
        assert kept < 0.9
        rough.append(0.005 * math.ceil((0.5 + 0.5 * (0.97 - kept) / (1 - kept)) / 0.005))
    out = model(images, patches="auto", tolerance=0.97)
    assert out.chosen == [(BANK, pytest.approx(rough[0])), (BANK, 0.5), (BANK, pytest.approx(rough[1]))]
    assert all(0.85 < share < 1 for share in rough)
    assert model(images, patches="auto", tolerance=1.0).chosen == [(BANK, 1.0), (BANK, 0.5), (BANK, 1.0)]
    assert model(images, patches="auto", tolerance=1e-3).chosen == [(BANK, 0.5)] * 3
    assert model(images, cores=4, patches="auto", tolerance=0.97).chosen == [(4, 1.0)] * 3  # no setting reaches it
    chosen = model(images, cores="auto", patches="auto", tolerance=0.95).chosen
    assert chosen is not None
    assert [cores for cores, _ in chosen] == [BANK] * 3  # rough ones spend fewer tokens with all cores
    assert model(images[1:2], cores="auto", patches="auto", tolerance=0.94).chosen == [(4, 0.5)]
    assert model(images, cores="auto", patches=0.6, tolerance=0.9).chosen == [(BANK, 0.6)] * 3  # rough ones need all
    assert model(images[1:2], cores="auto", patches=0.6, tolerance=0.9).chosen == [(4, 0.6)]
    assert model(images, patches=0.5).chosen is None


def test_between_two_sizes_lies_what_lies_between_their_lines() -> None:
    image = torch.randn(1, 3, 64, 80)
    lines = [Line(size, 8, share, cosine, 0.0) for size, share, cosine in ((32, 0.5, 0.9), (128, 0.5, 0.98))]
    found = Calibration((*lines, Line(32, 8, 1.0, 1.0, 0.0), Line(128, 8, 1.0, 1.0, 0.0)), 10)
    assert found.ladder(Busy(image, 4), 0, 8) == [(0.5, pytest.approx(0.94)), (1.0, 1.0)]  # 64 is half-way, doubling
    small, large = (Busy(torch.randn(1, 3, side, side), 4) for side in (16, 256))  # beyond both: as the nearer
    assert [found.ladder(busy, 0, 8)[0][1] for busy in (small, large)] == pytest.approx([0.9, 0.98])


def test_a_share_above_which_a_worse_one_lies_is_not_chosen() -> None:
    assert least([(0.2, 0.99), (0.5, 0.9), (0.8, 0.98), (1.0, 1.0)], 0.98) == 0.8
    assert least([(0.2, 0.99), (0.5, 0.985)], 0.98) == 0.2
    assert least([(0.2, 0.8), (1.0, 0.95)], 0.98) is None


def test_a_batch_is_its_images_one_by_one(model: Veca) -> None:
    images = smooth_and_rough(model)
    with torch.inference_mode():
        whole = model(images, patches="auto", tolerance=0.97)
        assert whole.chosen is not None
        for number, image in enumerate(images):
            one = model(image[None], patches="auto", tolerance=0.97)
            same(one, whole._replace(**{name: getattr(whole, name)[number, None] for name in TENSORS}))
            assert one.chosen == [whole.chosen[number]]
            cores, share = whole.chosen[number]
            assert torch.equal(one.patches, model(image[None], cores=cores, patches=share).patches)


def test_what_cannot_be_chosen_is_one_line(model: Veca) -> None:
    images = smooth_and_rough(model)
    for tolerance in (0, 1.1, True, "much"):
        with pytest.raises(InputError, match=r"^tolerance must be a cosine above 0 and at most 1, not [^\n]*$"):
            model(images, patches="auto", tolerance=tolerance)
    with pytest.raises(InputError, match="without 'auto'"):
        model(images, cores="auto", return_attention=True)
    with pytest.raises(InputError, match=r"^cores must be a whole number from 1 to 8, or None for all, not 'many'$"):
        model(images, cores="many", patches="auto")
    model.calibration = None
    with pytest.raises(InputError, match=r"not calibrated.* run `veca calibrate MODEL --photos …`$"):
        model(images, patches="auto")


def test_a_line_falls_and_has_a_quarter_below_it() -> None:
    source = np.random.default_rng(0)
    lost = source.random(400)
    seen = np.log1p(lost / 0.005)
    cosines = 0.99 - 0.01 * seen + source.normal(0, 0.01, 400)
    top, slope, relief = fit(lost.tolist(), [1.0] * 400, cosines.tolist())
    assert relief == 0  # all are as busy
    assert slope == pytest.approx(-np.polyfit(seen, cosines, 1)[0], abs=1e-5)
    assert (cosines < top - slope * seen).mean() == pytest.approx(SAFETY, abs=0.005)
    assert fit([0.0, 1.0], [0.0, 1.0], [0.5, 0.9])[1] == 0  # a rising line would reward what is lost
    assert fit([1.0, 1.0], [1.0, 1.0], [0.8, 0.8]) == (0.8, 0.0, 0.0)


def test_what_is_lost_counts_less_where_all_is_busy() -> None:
    source = np.random.default_rng(0)
    most = source.random(400)
    lost = most * source.random(400)
    seen = np.log1p(np.stack([lost, most]) / 0.005)
    cosines = 0.97 - 0.02 * seen[0] + 0.01 * seen[1] + source.normal(0, 0.001, 400)
    line = Line(448, 8, 0.5, *fit(lost.tolist(), most.tolist(), cosines.tolist()))
    plain = np.linalg.lstsq(np.stack([-seen[0], seen[1], np.ones(400)], axis=1), cosines, rcond=None)[0]
    assert (line.slope, line.relief) == pytest.approx(tuple(plain[:2]), abs=1e-5)
    said = np.array([line.at(*pair) for pair in zip(lost, most, strict=True)])
    assert (cosines < said).mean() == pytest.approx(SAFETY, abs=0.005)
    wrong = fit(lost.tolist(), most.tolist(), (0.99 - 0.02 * seen[0] - 0.01 * seen[1]).tolist())
    assert wrong[2] == 0
    assert fit(lost[:12].tolist(), most[:12].tolist(), cosines[:12].tolist())[2] == 0  # of so few nobody can tell
    assert line._replace(cosine=2.0).at(0.0, 0.0) == 1


def test_it_is_measured_against_the_full_pass() -> None:
    model = small(bank=BANK)
    photos = [images_of(model, 1, (6, 8)) for _ in range(3)]
    found = calibrate(model, photos, 48)
    assert found[0] == Line(48, BANK, 1.0, 1.0, 0.0)
    line = next(line for line in found if (line.cores, line.patches) == (4, 0.5))
    with torch.inference_mode():
        both = [(model(photo).patches[0], model(photo, cores=4, patches=0.5).patches[0]) for photo in photos]
    cosines = [float(torch.cosine_similarity(*pair, dim=-1).mean()) for pair in both]
    lost = [float(Busy(photo, model.patch_size).lost(0.5)) for photo in photos]
    most = [float(Busy(photo, model.patch_size).lost(1.0)) for photo in photos]
    assert (line.cosine, line.slope, line.relief) == fit(lost, most, cosines)


def test_a_model_folder_keeps_it(model: Veca, tmp_path: Path) -> None:
    model.save(tmp_path / "model")
    assert veca.load(tmp_path / "model").calibration == by_hand()
    model.calibration = None
    model.save(tmp_path / "model")  # other weights: what was known of the old ones goes
    assert veca.load(tmp_path / "model").calibration is None


SETTING = {"size": 448, "cores": 8, "patches": 0.5, "cosine": 0.9, "slope": 0.1}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        "[" * 100_000,
        json.dumps({"photos": 1, "settings": []}),
        *(
            json.dumps({"photos": 1, "settings": [SETTING | wrong]})
            for wrong in (
                {"cores": 9},
                {"cores": True},
                {"size": 0},
                {"size": 4.5},
                {"patches": 0},
                {"patches": "1"},
                {"cosine": float("nan")},
                {"slope": -1},
                {"relief": -1},
                {"more": 1},
            )
        ),
        json.dumps({"size": 448, "photos": 1, "settings": [{"cores": 8, "patches": 0.5, "cosine": 0.9, "slope": 0.1}]}),
        json.dumps({"photos": "1", "settings": [SETTING]}),
        json.dumps({"photos": 1, "settings": [SETTING]}) + " " * 1_000_000,
    ],
)
def test_a_wrong_file_is_one_line(model: Veca, tmp_path: Path, text: str) -> None:
    model.save(tmp_path)
    (tmp_path / "calibration.json").write_text(text)
    with pytest.raises(InputError, match=r"^[^\n]*calibration\.json is (damaged|no calibration)[^\n]*$"):
        veca.load(tmp_path)


# The command


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    source = np.random.default_rng(0)
    for number in range(9):
        pixels = source.integers(0, 256, (40, 50, 3)) * number / 9
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
    return folder


def test_the_same_photos_give_the_same_file(tmp_path: Path, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small(bank=BANK).save(tmp_path / "model")
    assert main(["calibrate", str(tmp_path / "model"), "--photos", str(photos), "--size", "48", "24"]) == 0
    said = capsys.readouterr().out
    assert said == f"{tmp_path / 'model' / 'calibration.json'}: 64 settings on 9 photographs\n"
    out = str(tmp_path / "copy")
    assert (
        main(["calibrate", str(tmp_path / "model"), "--photos", str(photos), "--size", "48", "24", "--out", out]) == 0
    )
    first, second = ((tmp_path / name / "calibration.json").read_bytes() for name in ("model", "copy"))
    assert first == second
    model = veca.load(tmp_path / "copy")
    out_of_it = model(model.preprocess(photos / "3.png", 48), cores="auto", patches="auto", tolerance=0.5)
    assert out_of_it.chosen is not None


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["veca-s14", "--photos", "{photos}"], "no model folder to write to: name one for a copy with --out"),
        (["{model}", "--photos", "{photos}", "--images", "3"], "--images must be at least 8, not 3"),
        (["{model}", "--photos", "{photos}", "--size", "0"], "--size must be at least 1, not 0"),
        (["{model}", "--photos", "{photos}", "--size"], "--size must be at least 1, not 0"),
        (["{model}", "--photos", "{photos}/1.png"], "1 photographs are too few"),
        (["{model}"], "--photos"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], line: str, tmp_path: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()  # refused before it is read
    assert main(["calibrate", *(word.format(model=model, photos=photos) for word in arguments)]) == 2
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1
