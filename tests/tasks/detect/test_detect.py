"""Detection: planted boxes, readers, a frozen backbone, resumption, and what `veca probe predict` draws."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import veca
from veca.cli import main
from veca.errors import InputError
from veca.tasks.base.coco import Picture, Thing, read_coco
from veca.tasks.base.heads import load_head
from veca.tasks.detect.head import decode, loss, new_head
from veca.tasks.detect.scores import average_precision
from veca.tasks.detect.task import Detect, targets
from veca.tasks.detect.yolo import read_yolo

SMALL = ("--size", 64, "--queries", 8, "--layers", 1, "--device", "cpu")


def run(*words: object) -> int:
    return main([str(word) for word in words])


def planted(count: int = 12) -> list[Picture]:
    draw = random.Random(0)

    def thing() -> Thing:
        left, top = draw.uniform(0, 60), draw.uniform(0, 40)
        return Thing(draw.randrange(3), (left, top, left + draw.uniform(8, 40), top + draw.uniform(8, 40)))

    return [Picture(Path(f"{number}.jpg"), 100, 80, tuple(thing() for _ in range(4))) for number in range(count)]


def said(picture: Picture) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The boxes of a photo as a detector would say them that is right about all."""
    shares = torch.tensor([thing.box for thing in picture.things]) / torch.tensor([100, 80, 100, 80])
    return torch.linspace(0.9, 0.5, 4), torch.tensor([thing.label for thing in picture.things]), shares


def test_boxes_that_are_there_score_1_and_shuffled_ones_near_0() -> None:
    pictures = planted()
    exact = average_precision([said(one) for one in pictures], pictures, 3)
    assert exact["mAP"] == exact["mAP50"] == pytest.approx(1.0)
    assert exact["per_class"] == pytest.approx([1.0] * 3)
    shuffled = average_precision([said(one) for one in pictures[1:] + pictures[:1]], pictures, 3)
    assert shuffled["mAP"] < 0.05


def test_no_answer_and_absent_classes_score_nothing() -> None:
    pictures = planted(2)
    nothing = (torch.zeros(0), torch.zeros(0, dtype=torch.long), torch.zeros(0, 4))
    scores = average_precision([nothing, nothing], pictures, 4)
    assert scores["mAP"] == 0
    assert scores["per_class"][3] is None


def test_crowds_are_neither_missed_nor_trained_on() -> None:
    crowd = Picture(Path("a.jpg"), 100, 80, (Thing(0, (0, 0, 50, 40)), Thing(0, (50, 40, 100, 80), crowd=True)))
    first = (torch.tensor([0.9]), torch.tensor([0]), torch.tensor([[0, 0, 0.5, 0.5]]))
    assert average_precision([first], [crowd], 1)["mAP"] == pytest.approx(1.0)
    assert len(targets(crowd, (0, 0, 1, 1), False)) == 1


def test_targets_follow_the_crop_and_the_mirror() -> None:
    picture = Picture(Path("a.jpg"), 100, 80, (Thing(2, (10, 20, 30, 60)), Thing(1, (90, 70, 100, 80))))
    whole = targets(picture, (0, 0, 1, 1), False)
    torch.testing.assert_close(whole[0], torch.tensor([2, 0.2, 0.5, 0.2, 0.5]))
    mirrored = targets(picture, (0, 0, 1, 1), True)
    torch.testing.assert_close(mirrored[0], torch.tensor([2, 0.8, 0.5, 0.2, 0.5]))
    left_half = targets(picture, (0, 0, 0.5, 1), False)  # the second thing is outside
    torch.testing.assert_close(left_half, torch.tensor([[2, 0.4, 0.5, 0.4, 0.5]]))


def test_a_loaded_view_shows_its_box(boxes: Path) -> None:
    """The pixels inside the box that `load` tells are the square's, whatever the crop and the mirror."""
    task = Detect(read_coco(boxes))
    for number in range(4):
        for seed in range(3):
            pixels, label = task.load(number, 96, random.Random(seed))
            for row in label:
                x, y = (row[1:3] * 95).round().int().tolist()
                channel = 0 if int(row[0]) == 0 else 2
                assert int(pixels[y, x].argmax()) == channel
                assert int(pixels[y, x, channel]) > 180


def test_decoding_reads_classes_and_corners() -> None:
    logits = torch.full((1, 3, 2), -9.0)
    logits[0, 1, 1], logits[0, 2, 0] = 3.0, 1.0
    centres = torch.tensor([[[0.5, 0.5, 1, 1], [0.25, 0.5, 0.5, 1], [0.9, 0.9, 0.4, 0.4]]])
    scores, classes, corners = decode(logits, centres, most=2)[0]
    assert classes.tolist() == [1, 0]
    torch.testing.assert_close(scores, torch.tensor([3.0, 1.0]).sigmoid())
    torch.testing.assert_close(corners, torch.tensor([[0, 0, 0.5, 1], [0.7, 0.7, 1, 1]]))


def test_photos_without_a_box_can_be_trained_on() -> None:
    torch.manual_seed(0)
    head = new_head(32, ["a", "b"], queries=8, groups=2, layers=1).train()
    maps = torch.randn(2, 32, 4, 4)
    some = loss(head, maps, [torch.tensor([[1, 0.5, 0.5, 0.2, 0.2]]), torch.zeros(0, 5)])
    none = loss(head, maps, [torch.zeros(0, 5)] * 2)
    (some + none).backward()
    assert torch.isfinite(some)
    assert torch.isfinite(none)
    with pytest.raises(InputError, match="8 queries need as many patches"):
        head(torch.randn(1, 32, 2, 2))


def test_the_loss_is_that_of_the_last_layer_and_of_those_before() -> None:
    """`RfDetrForObjectDetection` with labels, in float32, says the same."""
    torch.manual_seed(0)
    head = new_head(32, ["a", "b"], queries=8, groups=2, layers=2).train()
    maps, label = torch.randn(2, 32, 4, 4), torch.tensor([[1, 0.5, 0.5, 0.2, 0.2], [0, 0.3, 0.6, 0.4, 0.3]])
    theirs = [{"class_labels": label[:, 0].long(), "boxes": label[:, 1:]}] * 2
    torch.testing.assert_close(loss(head, maps, [label] * 2), head(maps, labels=theirs).loss)


def yolo(boxes: Path, folder: Path) -> Path:
    """The same data as YOLO's text files."""
    data = read_coco(boxes)
    for part, pictures in (("train", data.train), ("test", data.test)):
        for kind in ("images", "labels"):
            (folder / kind / part).mkdir(parents=True)
        for picture in pictures:
            shutil.copy(picture.path, folder / "images" / part)
            rows = targets(picture, (0, 0, 1, 1), False).tolist()
            lines = [f"{int(row[0])} " + " ".join(map(str, row[1:])) for row in rows]
            (folder / "labels" / part / f"{picture.path.stem}.txt").write_text("\n".join(lines))
    (folder / "data.yaml").write_text("names:\n  0: red\n  1: blue\n")
    return folder


def test_yolo_says_the_same_as_coco(boxes: Path, tmp_path: Path) -> None:
    ours, theirs = read_coco(boxes), read_yolo(yolo(boxes, tmp_path))
    assert theirs.classes == ours.classes == ("red", "blue")
    by_name = {picture.path.name: picture for picture in theirs.train}
    for picture in ours.train:
        thing, other = picture.things[0], by_name[picture.path.name].things[0]
        assert other.label == thing.label
        np.testing.assert_allclose(other.box, thing.box, atol=1e-3)


def test_yolo_from_files_to_drawn_boxes(boxes: Path, start: Path, tmp_path: Path) -> None:
    folder, out = yolo(boxes, tmp_path / "yolo"), tmp_path / "run"
    words = ("--model", start, *SMALL, "--head-only", "--epochs", 0.5, "--batch", 8, "--out", out)
    assert run("finetune", "detect", "--data", folder, *words) == 0
    (row,) = json.loads((out / "results.json").read_text())["rows"]
    assert 0 <= row["metrics"]["mAP"]["mean"] <= 1
    assert load_head(out / "head").about["classes"] == ["red", "blue"]
    assert run("probe", "predict", out / "head", folder / "images/test/0.png", "--out", tmp_path / "seen") == 0
    (answer,) = json.loads((tmp_path / "seen/results.json").read_text())
    assert Image.open(tmp_path / "seen" / answer["picture"]).size == (64, 48)


def test_yolo_outlines_become_boxes(boxes: Path, tmp_path: Path) -> None:
    folder = yolo(boxes, tmp_path)
    (folder / "labels/train/0.txt").write_text("1 0.25 0.25 0.75 0.5 0.5 0.75\n\n")
    (folder / "labels/train/1.txt").unlink()
    found = {picture.path.stem: picture.things for picture in read_yolo(folder).train}
    assert found["0"] == (Thing(1, (16, 12, 48, 36)),)
    assert found["1"] == ()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("labels/train/0.txt", "0 0.5 0.5 0.2", "line 1: not `class x y width height`"),
        ("labels/train/0.txt", "0 0.5 0.5 0.2 nan", "line 1: not"),
        ("labels/train/0.txt", "cat 0.5 0.5 0.2 0.2", "line 1: not"),
        ("labels/train/0.txt", "7 0.5 0.5 0.2 0.2", "class 7, but there are 0 to 1"),
        ("data.yaml", "names: [red, [blue]]", "must name the classes"),
        ("data.yaml", "names: [red, red]", "each once"),
        ("data.yaml", "a: [", "not readable as YAML"),
        ("data.yaml", "!!python/object/apply:os.system ['true']", "not readable as YAML"),
        ("data.yaml", "train: images", "has no list of `names`"),
    ],
)
def test_damaged_yolo_files_are_one_line(boxes: Path, tmp_path: Path, name: str, content: str, message: str) -> None:
    folder = yolo(boxes, tmp_path)
    (folder / name).write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        read_yolo(folder)
    assert "\n" not in str(caught.value)


def test_mistakes_are_one_line(boxes: Path, start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--model", start, "--out", tmp_path / "out", "--cache", tmp_path / "cache")
    assert run("probe", "detect", "--data", tmp_path, *common) == 2
    assert run("probe", "detect", "--data", boxes, *common, "--queries", 0) == 2
    assert run("probe", "detect", "--data", boxes, *common, "--steps", 0) == 2
    assert run("probe", "detect", "--data", boxes, *common, "--size", 32, "--queries", 100, "--steps", 1) == 2
    said = capsys.readouterr().err
    assert "100 queries need as many patches" in said
    assert "Traceback" not in said


def test_probe_and_predict(boxes: Path, start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    common = ("--data", boxes, "--model", start, "--cores", 8, "--cache", tmp_path / "cache", "--out", out, *SMALL)
    assert run("probe", "detect", *common, "--steps", 120, "--rate", 5e-4) == 0
    results = json.loads((out / "results.json").read_text())
    assert results["rows"][0]["metrics"]["mAP50"]["mean"] > 0.2  # of squares in one of two colours
    head = out / results["rows"][0]["head"]
    photo = boxes / "test" / "0.png"
    assert run("probe", "predict", head, photo, "--out", tmp_path / "seen") == 0
    answer = json.loads((tmp_path / "seen/results.json").read_text())[0]
    assert Image.open(tmp_path / "seen" / answer["picture"]).size == (64, 48)
    assert answer["boxes"]
    assert all(0 <= value <= 64 for row in answer["boxes"] for value in row["box"])

    again = ("--start-head", head, "--head-only", "--cores", 8, "--epochs", 0.4, "--head-lr", 1e-6)
    assert run("finetune", "detect", "--data", boxes, "--model", start, "--out", tmp_path / "on", *again, *SMALL) == 0
    tuned = json.loads((tmp_path / "on/results.json").read_text())["rows"][0]["metrics"]["mAP50"]["mean"]
    assert tuned == pytest.approx(results["rows"][0]["metrics"]["mAP50"]["mean"], abs=0.1)

    damaged = tmp_path / "damaged"
    shutil.copytree(head, damaged)
    about = json.loads((damaged / "head.json").read_text())
    for change in ({"queries": 10**9}, {"queries": 9}, {"classes": "x"}, {"width": None}):
        (damaged / "head.json").write_text(json.dumps({**about, **change}))
        assert run("probe", "predict", damaged, photo, "--out", tmp_path / "seen") == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_stopped_run_ends_as_an_uninterrupted_one_and_frozen_stays_frozen(
    boxes: Path, start: Path, tmp_path: Path
) -> None:
    common = ("--data", boxes, "--model", start, *SMALL, "--head-only", "--epochs", 1, "--batch", 8)
    assert run("finetune", "detect", *common, "--out", tmp_path / "whole") == 0
    assert run("finetune", "detect", *common, "--out", tmp_path / "parts", "--stop-at", 2) == 0
    assert not (tmp_path / "parts/results.json").exists()
    assert run("finetune", "detect", *common, "--out", tmp_path / "parts") == 0
    whole, parts = (load_head(tmp_path / name / "head").stored() for name in ("whole", "parts"))
    torch.testing.assert_close(whole, parts, atol=0, rtol=0)
    before, after = (veca.load(path).state_dict() for path in (start, tmp_path / "whole/model"))
    torch.testing.assert_close(before, after, atol=0, rtol=0)


def test_the_whole_backbone_learns_too(boxes: Path, start: Path, tmp_path: Path) -> None:
    common = ("--data", boxes, "--model", start, *SMALL, "--epochs", 0.5, "--batch", 8, "--cores", "4,8", "--lr", 1e-3)
    assert run("finetune", "detect", *common, "--out", tmp_path / "run") == 0
    before, after = (veca.load(path) for path in (start, tmp_path / "run/model"))
    assert not torch.equal(before.blocks[0].fc1.weight, after.blocks[0].fc1.weight)
    rows = json.loads((tmp_path / "run/results.json").read_text())["rows"]
    assert [row["cores"] for row in rows] == [8, 4]
