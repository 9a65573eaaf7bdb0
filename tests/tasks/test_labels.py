"""Data sets: what is found, what the labels become, and one clear line for each thing that can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from veca.errors import InputError
from veca.tasks.base.classes import Example, read_classes, read_examples
from veca.tasks.base.pairs import IGNORE, DepthReader, MaskReader, Pair, check_pairs, find_pairs, read_values
from veca.tasks.base.presets import DEPTH, SEGMENT, DepthPreset, Layout, SegmentPreset

NOWHERE = Layout("", "")


def picture(path: Path, size: tuple[int, int] = (8, 6)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (200, 30, 90)).save(path)
    return path


def mask(path: Path, values: object, dtype: type = np.uint8) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(values, dtype)).save(path)
    return path


def flat(value: int, size: tuple[int, int] = (8, 6)) -> np.ndarray:
    return np.full(size[::-1], value)


# ---- class labels


def test_class_folders(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for name in ("cat", "dog", "class10", "class9"):
            picture(tmp_path / part / name / "a.png")
    data = read_classes(tmp_path)
    assert data.classes == ("cat", "class9", "class10", "dog")
    assert [example.labels for example in data.train] == [(0,), (2,), (1,), (3,)]
    assert not data.several
    assert data.validation == ()


def test_val_beside_test_is_the_validation_part(tmp_path: Path) -> None:
    for part in ("train", "val", "test"):
        for name in ("cat", "dog"):
            picture(tmp_path / part / name / f"{part}.png")
    data = read_classes(tmp_path)
    assert {example.path.name for example in data.validation} == {"val.png"}
    assert {example.path.name for example in data.test} == {"test.png"}


def test_csv_with_several_labels(tmp_path: Path) -> None:
    picture(tmp_path / "images" / "a.png")
    (tmp_path / "train.csv").write_text("path,labels\nimages/a.png,sky; tree\nimages/a.png,\n")
    (tmp_path / "val.csv").write_text("labels,path\ntree,images/a.png\n")
    data = read_classes(tmp_path)
    assert data.several
    assert [example.labels for example in data.train] == [(0, 1), ()]
    assert [example.labels for example in data.test] == [(1,)]


@pytest.mark.parametrize("labels", ["", "cat;dog"])
def test_one_label_an_image_holds_for_every_part(tmp_path: Path, labels: str) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "train.csv").write_text("path,labels\na.png,cat\na.png,dog\n")
    (tmp_path / "test.csv").write_text(f"path,labels\na.png,{labels}\n")
    with pytest.raises(InputError, match=r"a.png has [02] labels, while every training image has exactly one"):
        read_classes(tmp_path)


def test_an_empty_class_is_named(tmp_path: Path) -> None:
    picture(tmp_path / "train" / "cat" / "a.png")
    picture(tmp_path / "test" / "cat" / "a.png")
    (tmp_path / "train" / "dog").mkdir()
    with pytest.raises(InputError, match="train/dog: this class has no images"):
        read_classes(tmp_path)


def test_a_class_that_was_not_trained_is_named(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        picture(tmp_path / "train" / name / "a.png")
    picture(tmp_path / "test" / "cow" / "a.png")
    with pytest.raises(InputError, match="test/cow: the class 'cow' is not among the 2"):
        read_classes(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a.png,cat\n", "train.csv: its first line must name the columns"),
        ("path,labels\nb.png,cat\n", "train.csv, line 2: no image at .*b.png"),
        ("path,labels\n", "train.csv: holds no images"),
        ("path,labels\na.png,cat\n", "1 class in the training part"),
        ("path,labels\na.png,Kätzchen\n", "train.csv: not text in UTF-8"),
    ],
)
def test_a_bad_csv_is_named(tmp_path: Path, content: str, message: str) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "train.csv").write_text(content, encoding="latin-1")
    (tmp_path / "test.csv").write_text("path,labels\na.png,cat\n")
    with pytest.raises(InputError, match=message):
        read_classes(tmp_path)


def test_a_folder_without_parts_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"needs train and test \(or val\)"):
        read_classes(tmp_path)
    with pytest.raises(InputError, match="no such folder"):
        read_classes(tmp_path / "nothing")


def test_numbered_folders_count_the_classes(tmp_path: Path) -> None:
    """ImageNetV2 names its folders 0 … 999."""
    for name in ("0", "1", "2"):
        picture(tmp_path / name / "a.png")
    found = read_examples(tmp_path, ("n01", "n02", "n03"))
    assert [example.labels for example in found] == [(0,), (1,), (2,)]
    named = read_examples(tmp_path, ("2", "1", "0"))
    assert [example.labels for example in named] == [(2,), (1,), (0,)]


def test_real_labels_are_matched_by_the_number_in_the_file_name(tmp_path: Path) -> None:
    images = [Example(tmp_path / f"ILSVRC2012_val_0000000{number}.JPEG", (0,)) for number in (3, 1)]
    (tmp_path / "real.json").write_text(json.dumps([[0, 2], [], [1]]))
    found = read_examples(tmp_path / "real.json", ("a", "b", "c"), images)
    assert [example.labels for example in found] == [(1,), (0, 2)]
    with pytest.raises(InputError, match="not numbers below 2"):
        read_examples(tmp_path / "real.json", ("a", "b"), images)
    with pytest.raises(InputError, match="does not end in a number"):
        read_examples(tmp_path / "real.json", ("a", "b", "c"), [Example(tmp_path / "cat.jpg", (0,))])


# ---- labels per pixel


def plain(folder: Path, kind: str = "masks", values: object = None, dtype: type = np.uint8) -> Path:
    for part in ("train", "val"):
        picture(folder / part / "images" / "a.jpg")
        mask(folder / part / kind / "a.png", flat(1) if values is None else values, dtype)
    return folder


def test_plain_folders(tmp_path: Path) -> None:
    data = find_pairs(plain(tmp_path), "masks", None)
    assert data.train == (Pair(tmp_path / "train/images/a.jpg", tmp_path / "train/masks/a.png"),)
    assert data.test[0].label == tmp_path / "val/masks/a.png"


def test_a_missing_mask_is_named(tmp_path: Path) -> None:
    picture(plain(tmp_path) / "val" / "images" / "b.jpg")
    with pytest.raises(InputError, match=r"val/images/b.jpg: has no label .*val/masks/b.png"):
        find_pairs(tmp_path, "masks", None)


def test_sizes_must_agree(tmp_path: Path) -> None:
    data = find_pairs(plain(tmp_path, values=flat(1, (6, 8))), "masks", None)
    with pytest.raises(InputError, match=r"train/masks/a.png: is 6×8, but a.jpg is 8×6"):
        check_pairs(data.train, MaskReader(SegmentPreset(NOWHERE, 2)), "masks")


@pytest.mark.parametrize("suffix", ["jpg", "tif"])
def test_a_photo_turned_by_exif_matches_its_upright_mask(tmp_path: Path, suffix: str) -> None:
    image = Image.new("RGB", (8, 6))
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(tmp_path / f"a.{suffix}", exif=exif)
    check_pairs(
        [Pair(tmp_path / f"a.{suffix}", mask(tmp_path / "a.png", flat(0, (6, 8))))],
        MaskReader(SegmentPreset(NOWHERE, 2)),
        "masks",
    )


def test_a_label_outside_the_range_is_named(tmp_path: Path) -> None:
    path = mask(tmp_path / "a.png", [[0, 1, 7, 255]])
    with pytest.raises(InputError, match=r"a.png: holds the label 7, outside the 3 classes \(ignore index 255"):
        MaskReader(SegmentPreset(NOWHERE, 3))(path)
    assert MaskReader(SegmentPreset(NOWHERE, 8))(path).tolist() == [[0, 1, 7, IGNORE]]


def test_a_coloured_mask_is_refused_and_a_palette_is_not_applied(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a label has one channel"):
        MaskReader(SegmentPreset(NOWHERE, 3))(picture(tmp_path / "rgb.png"))
    indexed = Image.fromarray(np.array([[0, 2]], np.uint8), mode="P")
    indexed.putpalette([9, 9, 9] * 256)
    indexed.save(tmp_path / "p.png")
    assert MaskReader(SegmentPreset(NOWHERE, 3))(tmp_path / "p.png").tolist() == [[0, 2]]


@pytest.mark.parametrize(
    ("preset", "stored", "expected"),
    [
        ("voc2012", [0, 20, 255], [0, 20, IGNORE]),
        ("context60", [0, 59, 255], [0, 59, IGNORE]),
        ("ade20k", [0, 1, 150, 255], [IGNORE, 0, 149, IGNORE]),
        ("coco_stuff", [0, 10, 11, 12, 181, 255], [0, 10, IGNORE, 11, 170, IGNORE]),
        ("coco_object", [0, 12, 89, 91, 181, 255], [1, 12, 80, 0, 0, IGNORE]),
        ("cityscapes", [7, 33, 0, 255], [0, 18, IGNORE, IGNORE]),
    ],
)
def test_presets_read_labels(tmp_path: Path, preset: str, stored: list[int], expected: list[int]) -> None:
    path = mask(tmp_path / "a.png", [stored])
    assert MaskReader(SEGMENT[preset])(path).tolist() == [expected]


PUBLISHED = {
    "voc2012": ("JPEGImages/a.jpg", "SegmentationClass/a.png", "ImageSets/Segmentation/{}.txt", "train", "val"),
    "context60": (
        *("JPEGImages/a.jpg", "SegmentationClassContext/a.png"),
        *("ImageSets/SegmentationContext/{}.txt", "train", "val"),
    ),
    "ade20k": ("images/{}/a.jpg", "annotations/{}/a.png", "", "training", "validation"),
    "coco_stuff": ("images/{}/a.jpg", "annotations/{}/a.png", "", "train2017", "val2017"),
    "coco_object": ("images/{}/a.jpg", "annotations/{}/a.png", "", "train2017", "val2017"),
    "cityscapes": (
        *("leftImg8bit/{}/ulm/ulm_0_leftImg8bit.png", "gtFine/{}/ulm/ulm_0_gtFine_labelIds.png"),
        *("", "train", "val"),
    ),
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_find_published_layouts(tmp_path: Path, preset: str) -> None:
    image, label, names, train, test = PUBLISHED[preset]
    for part in (train, test):
        picture(tmp_path / image.format(part))
        mask(tmp_path / label.format(part), flat(1))
        if names:
            (tmp_path / names.format(part)).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / names.format(part)).write_text("a\n")
    data = find_pairs(tmp_path, "masks", SEGMENT[preset].layout)
    assert data.train == (Pair(tmp_path / image.format(train), tmp_path / label.format(train)),)
    assert data.test == (Pair(tmp_path / image.format(test), tmp_path / label.format(test)),)
    check_pairs(data.train, MaskReader(SEGMENT[preset]), "masks")
    (tmp_path / label.format(test)).unlink()
    with pytest.raises(InputError, match="has no label"):
        find_pairs(tmp_path, "masks", SEGMENT[preset].layout)


def test_a_preset_without_its_files_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Segmentation/train.txt: no such file; the preset needs this list"):
        find_pairs(tmp_path, "masks", SEGMENT["voc2012"].layout)


def test_kitti_list_crop_and_scale(tmp_path: Path) -> None:
    for part in ("train", "test"):
        picture(tmp_path / "input" / "2011" / "1.png", (1242, 375))
        mask(tmp_path / "gt_depth" / "sync" / "1.png", flat(2560, (1242, 375)), np.uint16)
        (tmp_path / f"kitti_eigen_{part}.txt").write_text("2011/1.png sync/1.png 721.5\n2011/2.png None 721.5\n")
    data = find_pairs(tmp_path, "depth", DEPTH["kitti"].layout)
    assert len(data.train) == 1
    depth = DepthReader(DEPTH["kitti"]).trimmed(data.train[0].label)
    assert depth.shape == (352, 1216)
    rows, columns = np.nonzero(depth)
    assert (rows.min(), rows.max() + 1, columns.min(), columns.max() + 1) == (144, 349, 44, 1172)
    assert depth.max() == 10.0


def test_nyu_crop_leaves_out_the_frame(tmp_path: Path) -> None:
    path = mask(tmp_path / "a.png", flat(2500, (640, 480)), np.uint16)
    rows, columns = np.nonzero(DepthReader(DEPTH["nyu"]).trimmed(path))
    assert (rows.min(), rows.max() + 1, columns.min(), columns.max() + 1) == (45, 471, 41, 601)


def test_depth_outside_the_range_is_unknown(tmp_path: Path) -> None:
    path = mask(tmp_path / "a.png", [[0, 500, 4000, 60000]], np.uint16)
    assert DepthReader(DepthPreset(NOWHERE, 1e-3, 0.6, 10.0))(path).tolist() == [[0, 0, 4, 0]]
    with pytest.raises(InputError, match="depth needs 16 bits"):
        DepthReader(DEPTH["nyu"])(mask(tmp_path / "b.png", [[1, 2]]))


def test_labels_are_opened_as_carefully_as_photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No format that starts another program, no limit below that of the photos, one line for what is damaged."""
    (tmp_path / "mask.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n")
    with pytest.raises(InputError, match="not an image this can read"):
        read_values(tmp_path / "mask.png")
    path = mask(tmp_path / "whole.png", flat(3))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4)
    assert (read_values(path) == 3).all()
    path = mask(tmp_path / "whole.png", np.random.default_rng(0).integers(0, 20, (64, 64)))
    path.write_bytes(path.read_bytes()[:800])
    with pytest.raises(InputError, match=r"whole\.png: damaged"):
        read_values(path)


def test_an_image_smaller_than_the_trim_is_named(tmp_path: Path) -> None:
    path = mask(tmp_path / "a.png", flat(9), np.uint16)
    with pytest.raises(InputError, match=r"a.png: 8×6 is smaller than the 1216×352"):
        DepthReader(DEPTH["kitti"]).trimmed(path)


def test_the_real_data_is_sound(shared: Path) -> None:
    masks = find_pairs(shared / "data" / "voc-seg", "masks", SEGMENT["voc2012"].layout)
    depth = find_pairs(shared / "data" / "nyu-depth", "depth", DEPTH["nyu"].layout)
    pets = read_classes(shared / "data" / "pets")
    assert [len(part) for part in (masks.train, masks.test, depth.train, depth.test)] == [366, 182, 398, 218]
    assert (len(pets.train), len(pets.test), len(pets.classes)) == (925, 444, 37)
    check_pairs(masks.test[:40], MaskReader(SEGMENT["voc2012"]), "masks")
    check_pairs(depth.test[:40], DepthReader(DEPTH["nyu"]), "depth")
