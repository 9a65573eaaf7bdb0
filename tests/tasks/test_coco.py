"""COCO's JSON: what is there is read, what is wrong is one line."""

import json

import pytest
from PIL import Image

from veca.errors import InputError
from veca.tasks.base.coco import Thing, read_coco


def table(name="a.png", box=(2, 3, 10, 20), category=7, **more):
    return {
        "images": [{"id": 1, "file_name": name, "width": 40, "height": 30}],
        "annotations": [{"id": 5, "image_id": 1, "category_id": category, "bbox": list(box), **more}],
        "categories": [{"id": 7, "name": "cat"}, {"id": 3, "name": "dog"}],
    }


@pytest.fixture
def folder(tmp_path):
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        Image.new("RGB", (40, 30)).save(tmp_path / part / "a.png")
        (tmp_path / f"{part}.json").write_text(json.dumps(table()))
    return tmp_path


def test_boxes_become_corners_and_categories_numbers(folder):
    data = read_coco(folder)
    assert data.classes == ("dog", "cat")  # by id
    assert data.train[0].things == (Thing(1, (2, 3, 12, 23)),)
    assert data.train[0].path == folder / "train" / "a.png"
    assert data.validation == ()
    assert data.test[0].path == folder / "test" / "a.png"


def test_outlines_and_crowds_are_kept_on_request(folder):
    (folder / "train.json").write_text(json.dumps(table(segmentation=[[1, 1, 5, 1, 5, 5]], iscrowd=1)))
    assert read_coco(folder).train[0].things[0] == Thing(1, (2, 3, 12, 23), crowd=True)
    assert read_coco(folder, segments=True).train[0].things[0].segmentation == [[1, 1, 5, 1, 5, 5]]


def test_the_published_layout(folder):
    (folder / "annotations").mkdir()
    for part in ("train", "test"):
        named = "val" if part == "test" else part
        (folder / f"{part}.json").rename(folder / "annotations" / f"instances_{named}2017.json")
        (folder / part).rename(folder / f"{named}2017")
    data = read_coco(folder)
    assert data.test[0].path == folder / "val2017" / "a.png"


def test_validation_is_a_part_of_its_own(folder):
    (folder / "val.json").write_text(json.dumps(table()))
    (folder / "test" / "a.png").rename(folder / "a.png")  # one place for all is found too
    (folder / "train" / "a.png").unlink()
    data = read_coco(folder)
    assert [part[0].path for part in (data.train, data.validation, data.test)] == [folder / "a.png"] * 3


def test_boxes_are_cut_at_the_edges_and_empty_ones_left_out(folder):
    (folder / "train.json").write_text(json.dumps(table(box=(-5, 20, 100, 100))))
    assert read_coco(folder).train[0].things[0].box == (0, 20, 40, 30)
    (folder / "train.json").write_text(json.dumps(table(box=(5, 5, 0, 10))))
    assert read_coco(folder).train[0].things == ()


def without(name):
    rest = table()
    del rest[name]
    return rest


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not readable as JSON"),
        ("[" * 100_000, "not readable as JSON"),
        ("[]", "not COCO's format"),
        (json.dumps(without("images")), "its 'images' is no list"),
        (json.dumps({**table(), "annotations": [3]}), "its 'annotations' is no list"),
        (json.dumps(table(name="../../secret.png")), "leads out of the folder"),
        (json.dumps(table(name="/etc/passwd")), "leads out of the folder"),
        (json.dumps(table(name="n" * 300)), "longer than"),
        (json.dumps(table(name="b.png")), "neither in"),
        (json.dumps(table(category=9)), "unknown category 9"),
        (json.dumps(table(category=[9])), "unknown category"),
        (json.dumps(table(box=(1, 2, 3))), "a bbox is"),
        (json.dumps(table(box=(1, 2, float("nan"), 3))), "a bbox is"),
        (json.dumps(table(box=(1, 2, 10**400, 3))), "a bbox is"),
        (json.dumps({**table(), "categories": []}), "names no categories"),
        (json.dumps({**table(), "categories": [{"id": 1, "name": "a"}, {"id": 1, "name": "b"}]}), "of its own"),
        (json.dumps({**table(), "images": []}), "holds no images"),
        (json.dumps({**table(), "images": [{"id": 1, "file_name": "a.png", "width": 30, "height": 40}]}), "is 40×30"),
        (json.dumps({**table(), "images": [{"id": 1, "file_name": "a.png", "width": 10**400}]}), "needs a width"),
        (json.dumps({**table(), "images": [{"id": {}, "file_name": "a.png"}]}), "an id of its own"),
    ],
)
def test_damaged_files_are_one_line(folder, content, message):
    (folder / "train.json").write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        read_coco(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_folder_without_parts_is_refused(tmp_path):
    with pytest.raises(InputError, match="needs train"):
        read_coco(tmp_path)
