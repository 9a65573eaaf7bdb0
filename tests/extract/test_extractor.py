"""`veca.Extractor` against the model itself: arrays in, named arrays out, on any process."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas
import pyarrow
import pytest
import torch
from PIL import Image

import veca
from veca.backbones import Backbone, load_backbone
from veca.errors import InputError
from veca.images import MEAN, STD, normalise
from veca.scan import scanned


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    veca.create_model("veca_tiny", depth=2, width=32, heads=2, bank=16).save(folder)
    return folder


def pictures(count: int, height: int = 48, width: int = 64) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def expected(folder: Path, images: np.ndarray, cores: int = 8) -> veca.VecaOutput:
    """By numpy's arithmetic, one image at a time."""
    x = torch.from_numpy((images / 255 - np.array(MEAN)) / np.array(STD)).permute(0, 3, 1, 2).float()
    model = veca.load(folder)
    with torch.inference_mode():
        outs = [model(one[None], cores=cores) for one in x]
    return veca.VecaOutput(*(torch.cat(values) for values in list(zip(*outs, strict=True))[:4]), outs[0].grid)


def extractor(folder: Path, **more: object) -> veca.Extractor:
    return veca.Extractor(folder, cores=8, dtype="float32", device="cpu", **more)  # type: ignore[arg-type]


def test_named_arrays_are_what_the_model_says(folder: Path) -> None:
    images = pictures(3)
    out, own = extractor(folder, dense=True)(images), expected(folder, images)
    assert set(out) == {"cls", "grid", "patches"}
    assert {name: (values.dtype.name, values.shape) for name, values in out.items()} == {
        "cls": ("float32", (3, 32)),
        "grid": ("int32", (3, 2)),
        "patches": ("float32", (3, 3, 4, 32)),
    }
    assert (out["grid"] == own.grid).all()
    np.testing.assert_allclose(out["cls"], own.cls, atol=1e-5)
    np.testing.assert_allclose(out["patches"].reshape(3, 12, 32), own.patches, atol=1e-5)
    assert set(extractor(folder)(images)) == {"cls", "grid"}
    assert extractor(folder)(images[:0])["cls"].shape == (0, 32)


def test_arrays_that_may_not_be_written_are_taken_without_a_warning(folder: Path) -> None:
    """Of shared memory and of Ray, for instance."""
    images = pictures(2)
    images.flags.writeable = False
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = extractor(folder).compute(images)
    finally:
        torch.set_warn_always(False)
    np.testing.assert_allclose(found.cls, expected(folder, images).cls, atol=1e-5)


def test_images_of_any_sizes_keep_their_order(folder: Path) -> None:
    wide, tall = pictures(2), pictures(2, 80, 32)
    mixed = [wide[0], tall[0], wide[1], tall[1]]
    out = extractor(folder, dense=True)({"image": mixed, "name": ["a", "b", "c", "d"]})
    assert out["name"] == ["a", "b", "c", "d"]
    for row, image in enumerate(mixed):
        own = expected(folder, image[None])
        assert tuple(out["grid"][row]) == own.grid
        np.testing.assert_allclose(out["cls"][row], own.cls[0], atol=1e-5)
        np.testing.assert_allclose(out["patches"][row], own.patches[0].unflatten(0, own.grid), atol=1e-5)


def test_files_and_files_that_cannot_be_read(folder: Path) -> None:
    file = io.BytesIO()
    Image.fromarray(pictures(1, 60, 90)[0]).save(file, "png")
    rows = {"bytes": [file.getvalue(), b"no image", file.getvalue()[:-40]], "path": np.array(["a", "b", "c"])}
    out = extractor(folder, size=48)(rows)
    assert list(out["path"]) == ["a", "b", "c"]
    assert "bytes" not in out
    assert out["error"][0] == ""
    assert "not an image" in out["error"][1]
    assert "damaged or truncated" in out["error"][2]
    assert out["grid"].tolist() == [[3, 5], [0, 0], [0, 0]]
    assert np.isnan(out["cls"][1:]).all()
    model = veca.load(folder)
    with torch.inference_mode():
        own = model(model.preprocess(file.getvalue(), size=48), cores=8)
    np.testing.assert_allclose(out["cls"][0], own.cls[0], atol=1e-5)


def test_what_engines_hand_around_comes_back_as_they_want_it(folder: Path) -> None:
    """Spark's tables of pandas, one after another; Daft's and Arrow's columns; Hugging Face's cells."""
    mine, files = extractor(folder, size=48, dense=True), []
    for image in pictures(3, 60, 90):
        file = io.BytesIO()
        Image.fromarray(image).save(file, "png")
        files.append(file.getvalue())
    cells = [files[0], None, *files[1:]]
    own = mine({"bytes": files})
    expected = [own["cls"][0], np.full(own["cls"].shape[1], np.nan), *own["cls"][1:]]
    table = pandas.DataFrame({"path": list("abcd"), "content": [bytearray(files[0]), *cells[1:]]}, index=[5, 6, 7, 8])
    answers = mine(iter([table[:3], table[3:]]))
    assert isinstance(answers, Iterator)
    found = pandas.concat(list(answers))
    assert list(found.columns) == ["path", "cls", "grid", "patches", "error"]
    assert list(found.index) == [5, 6, 7, 8]
    arrow = pyarrow.Table.from_pandas(found)  # as Spark does: no array of several dimensions
    tables = [arrow.to_pylist()]
    tables.append(mine(pyarrow.array(cells)))
    tables.append(mine(pyarrow.array([{"bytes": cell, "path": None} for cell in cells])))
    for rows in tables:
        assert len(rows) == 4
        assert [bool(row["error"]) for row in rows] == [False, True, False, False]
        assert [list(row["grid"]) for row in rows] == [[3, 5], [0, 0], [3, 5], [3, 5]]
        np.testing.assert_allclose(np.array([row["cls"] for row in rows], float), expected, atol=1e-6)
        np.testing.assert_allclose(rows[3]["patches"], own["patches"][2].ravel(), atol=1e-6)
    pixels = np.empty(2, dtype=object)  # uint8 images in a column of objects
    pixels[:] = [mine.prepare(file) for file in files[:2]]
    assert set(mine({"image": pixels})) == {"cls", "grid", "patches"}
    np.testing.assert_array_equal(mine({"image": pixels})["cls"], mine(pixels)["cls"])
    np.testing.assert_allclose(mine({"image": pixels})["cls"], own["cls"][:2], atol=1e-6)


OTHER_PROCESS = """
import pickle, sys, numpy as np
extractor, images = pickle.load(sys.stdin.buffer)
sys.stdout.buffer.write(pickle.dumps(extractor(images)["cls"]))
"""


@pytest.mark.parametrize("named", [True, False])
def test_another_process_computes_the_same(named: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    mine = extractor(Path(folder.name)) if named else veca.Extractor(veca.load(folder), cores=8)
    data = pickle.dumps((mine, pictures(2)))
    assert named == (len(data) < 30_000)  # by its name, no weights travel
    run = subprocess.run([sys.executable, "-c", OTHER_PROCESS], input=data, capture_output=True, timeout=120, cwd="/")
    assert run.returncode == 0, run.stderr.decode()
    np.testing.assert_allclose(pickle.loads(run.stdout), mine(pictures(2))["cls"], atol=1e-6)


def test_machines_of_several_kinds_compute_alike(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` is decided where the extractor is made, not anew on every machine that it is sent to."""
    monkeypatch.setattr("veca.devices.fast_bfloat16", lambda device: True)
    sent = pickle.dumps(veca.Extractor(folder, cores=8, device="cpu"))
    monkeypatch.setattr("veca.devices.fast_bfloat16", lambda device: False)
    assert pickle.loads(sent).backbone.dtype == torch.bfloat16


class Small(veca.Veca):
    """Has memory for `most` images."""

    most = 3

    def forward(self, images: torch.Tensor, cores: int | None = None, *_: object) -> veca.VecaOutput:  # type: ignore[override]
        if len(images) > self.most:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
        return super().forward(images, cores)


def test_a_batch_that_does_not_fit_is_halved_and_one_image_is_refused(folder: Path) -> None:
    model = Small(veca.load(folder).config).eval()
    model.load_state_dict(veca.load(folder).state_dict())
    mine, images = veca.Extractor(model, cores=8, dense=True), pictures(8)
    whole = mine(images)
    own = expected(folder, images)
    np.testing.assert_allclose(whole["cls"], own.cls, atol=1e-5)
    np.testing.assert_allclose(whole["patches"].reshape(8, 12, 32), own.patches, atol=1e-5)
    model.most = 0
    with pytest.raises(InputError, match="not enough memory for an image of 64×48: use a smaller size"):
        mine(images)


def test_other_failures_are_not_taken_for_memory(folder: Path) -> None:
    mine = veca.Extractor(veca.load(folder))
    mine.backbone.veca.blocks[0].fc1 = torch.nn.Identity()  # type: ignore[union-attr, assignment]
    with pytest.raises((RuntimeError, AttributeError)) as caught:
        mine(pictures(1))
    assert not isinstance(caught.value, InputError)


def test_a_finer_map_and_a_share(folder: Path) -> None:
    images = pictures(2)
    model = veca.load(folder)
    x = torch.cat([model.preprocess(image, size=48) for image in images])
    finer = extractor(folder, dense=True, stride=8)(images)
    with torch.inference_mode():
        own, half = scanned(model, x, 8, stride=8), scanned(model, x, 8, share=0.5)
    assert finer["grid"].tolist() == [[6, 8]] * 2
    np.testing.assert_allclose(finer["patches"], own.patches.unflatten(1, own.grid), atol=1e-5)
    found = veca.Extractor(Backbone("m", model).reading(0.5, None), cores=8).compute(images)
    torch.testing.assert_close(found.cls, half.cls, atol=1e-5, rtol=0)


def test_a_share_of_the_patches(folder: Path) -> None:
    """As the model says, with how many squares were spent; also by name, in another process, and finer."""
    images = np.random.default_rng(0).integers(0, 256, (2, 128, 96, 3), np.uint8)
    model = veca.load(folder)
    mixed = extractor(folder, dense=True, patches=0.5)
    with torch.inference_mode():
        expected = model(normalise(torch.from_numpy(images)), cores=8, patches=0.5)
    for one in (mixed, pickle.loads(pickle.dumps(mixed)), veca.Extractor(model, cores=8, dense=True, patches=0.5)):
        found = one(images)
        np.testing.assert_allclose(found["cls"], expected.cls, atol=1e-5)
        np.testing.assert_allclose(found["patches"], expected.patches.unflatten(1, (8, 6)), atol=1e-5)
        assert found["tokens"].tolist() == expected.tokens == [24, 24]
    finer = extractor(folder, dense=True, patches=0.5, stride=8)(images)
    assert finer["grid"].tolist() == [[16, 12]] * 2
    assert finer["tokens"].tolist() == [24, 24]
    np.testing.assert_allclose(finer["cls"], expected.cls, atol=1e-5)
    assert "tokens" not in extractor(folder)(images)


def test_a_teacher_is_a_model_too(shared: Path) -> None:
    teacher = load_backbone(str(shared / "teacher" / "dav2-small-encoder"))
    images = pictures(2, 42, 56)
    out = veca.Extractor(teacher, dense=True)(images)
    x = torch.from_numpy((images / 255 - np.array(MEAN)) / np.array(STD)).permute(0, 3, 1, 2).float()
    with torch.inference_mode():
        own = teacher.model(x, grid=(3, 4))
    np.testing.assert_allclose(out["cls"], own.cls, atol=1e-4)
    np.testing.assert_allclose(out["patches"].reshape(2, 12, -1), own.patches, atol=1e-4)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (np.zeros((1, 48, 64, 3)), "B×H×W×3 of uint8, not 1×48×64×3 of float64"),
        (np.zeros((1, 3, 48, 64), np.uint8), "B×H×W×3 of uint8, not 1×3×48×64 of uint8"),
        (np.zeros((48, 64, 3), np.uint8), "B×H×W×3 of uint8, not 48×64×3"),
        (np.zeros((1, 50, 64, 3), np.uint8), "multiples of the patch size 16, not 1×50×64×3: extractor.prepare"),
        ({"path": ["a"]}, "a batch: no column of images; it needs one of image, bytes, content"),
    ],
)
def test_wrong_batches_get_one_line(batch: object, message: str, folder: Path) -> None:
    with pytest.raises(InputError, match=message):
        extractor(folder)(batch)  # type: ignore[arg-type]


def test_wrong_settings_are_refused_at_once(folder: Path) -> None:
    with pytest.raises(InputError, match="no model at 'absent'"):
        veca.Extractor("absent")
    with pytest.raises(InputError, match="cores must be a whole number from 1 to 16, not 17"):
        veca.Extractor(folder, cores=17)
    with pytest.raises(InputError, match="patches must lie above 0"):
        veca.Extractor(folder, patches=0)
    with pytest.raises(InputError, match="between 1 and this model's patch size 16, not 17"):
        veca.Extractor(folder, stride=17)
