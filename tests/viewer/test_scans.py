"""What is asked of the scans, against scans of reduced copies made directly."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch

from veca import Veca, open_scan
from veca.errors import InputError
from veca.large.picture import open_source
from veca.viewer.app import Viewer
from veca.viewer.pyramid import Pyramid
from veca.viewer.scans import MOST, WANTED, Scans

from .conftest import SIDE, SQUARES, View, halves

WHOLE = (0, 0, 1604, 1206)


@pytest.fixture(scope="module")
def scans(image: Path, library: Veca, tmp_path_factory: pytest.TempPathFactory) -> Scans:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VECA_CACHE", str(tmp_path_factory.mktemp("cache")))
        found = Scans(library, Pyramid(open_source(image), 16), None, image)
        found.run(lambda what, share: None)
    return found


def unit(rows: torch.Tensor) -> np.ndarray:
    return torch.nn.functional.normalize(rows, dim=-1).numpy()


def test_a_look_is_that_of_the_reduced_image(scans: Scans, library: Veca, pixels: np.ndarray) -> None:
    boxes = {2: WHOLE, 1: (300, 200, 700, 700), 0: (620, 400, 333, 250)}
    for level, box in boxes.items():
        seen = scans.look(box, (700.5, 500))
        assert seen.level.number == level
        factor = 2**level
        scan = library.scan(halves(pixels, level))
        x, y = box[0] // factor, box[1] // factor
        right, bottom = -(-(box[0] + box[2]) // factor), -(-(box[1] + box[3]) // factor)
        expected = scan.look(box=(x, y, right - x, bottom - y), stride=seen.stride)
        np.testing.assert_allclose(seen.rows, unit(expected.features), atol=2e-5)
        asked = scan.look(points=[(700.5 / factor, 500 / factor)]).features[0]
        np.testing.assert_allclose(seen.query, unit(asked), atol=2e-5)


def test_a_screen_has_about_as_many_patches_at_every_zoom(scans: Scans) -> None:
    before = -1
    for width in range(1604, 30, -97):
        seen = scans.look((0, 0, width, max(1, int(width * 0.75))), None)
        cells = seen.inside.size
        if seen.stride > 1:
            assert WANTED / 2.5 < cells < 1.3 * MOST
        assert seen.box[2] >= min(width, 1584)  # all that is on the screen is covered, up to the last whole patch
        assert before == -1 or seen.level.number <= before
        before = seen.level.number
    assert before == 0


def test_places_are_the_other_squares(scans: Scans) -> None:
    for x, y in SQUARES:
        _, found = scans.places((x, y, SIDE, SIDE), 0, 12)
        for box, cosine in found[:2]:
            others = [(a, b) for a, b in SQUARES if (a, b) != (x, y)]
            near = min(abs(box[0] - a) + abs(box[1] - b) for a, b in others)
            assert near <= 64
            assert cosine > found[2][1] + 0.02
        covered = np.zeros((1206, 1604), int)
        for left, top, width, height in [box for box, _ in found]:
            covered[top : top + height, left : left + width] += 1
        assert covered.max() == 1  # no two of them overlap
        assert [cosine for _, cosine in found] == sorted((cosine for _, cosine in found), reverse=True)


def test_colours_agree_between_levels(scans: Scans) -> None:
    """Blue squares have one colour, red noise another, at whatever zoom."""
    shown = []
    for box in (WHOLE, (100, 60, 700, 700), (150, 110, 300, 250)):
        seen = scans.look(box, None)
        assert seen.level.palette is not None
        painted = seen.level.palette(seen.rows.reshape(-1, seen.rows.shape[-1])).reshape(*seen.rows.shape[:2], 3)
        side = seen.stride * seen.level.factor

        def at(x: int, y: int, painted=painted, seen=seen, side=side) -> np.ndarray:
            return painted[(y - seen.box[1]) // side, (x - seen.box[0]) // side].astype(int)

        blue, red = at(280, 240), at(170, 300)
        assert np.abs(blue - red).max() > 60
        shown.append((blue, red))
    for blue, red in shown[1:]:
        assert np.abs(blue - shown[0][0]).sum() < np.abs(blue - shown[0][1]).sum()
        assert np.abs(red - shown[0][1]).sum() < np.abs(red - shown[0][0]).sum()


def test_a_mask_of_a_scan_holds_at_every_level(
    image: Path, pixels: np.ndarray, library: Veca, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VECA_CACHE", str(tmp_path / "cache"))
    mask = np.zeros((6, 8))
    mask[:, :4] = 1
    library.scan(image, cores=8, where=mask).save(tmp_path / "left.scan")
    scans = Scans(library, Pyramid(open_source(image), 16), None, image, tmp_path / "left.scan")
    scans.run(lambda what, share: None)
    assert scans.cores == 8
    seen = scans.look(WHOLE, None)
    middle = seen.inside.shape[1] // 2
    assert seen.inside[:, : middle - 1].all()
    assert not seen.inside[:, middle + 2 :].any()


def test_the_next_start_finds_its_scans(
    image: Path, library: Veca, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VECA_CACHE", str(tmp_path))
    done: list[str] = []

    def run() -> tuple[Scans, dict[Path, int]]:
        done.clear()
        scans = Scans(library, Pyramid(open_source(image), 16), 8, image)
        scans.run(lambda what, share: done.append(what))
        return scans, {file: file.stat().st_ino for file in (tmp_path / "view").glob("*.scan")}

    first, files = run()
    assert len(files) == 3
    assert any(what.startswith("scanning") for what in done)
    second, again = run()
    assert again == files  # none was written again
    assert not any(what.startswith("scanning") for what in done)
    np.testing.assert_allclose(second.look(WHOLE, None).rows, first.look(WHOLE, None).rows, atol=0.01)  # float16
    damaged = next(iter(files))
    damaged.write_bytes(damaged.read_bytes()[:1000])
    _, mended = run()
    assert mended.keys() == files.keys()
    assert [file for file in files if files[file] != mended[file]] == [damaged]
    image.touch()  # written again: it may be another picture
    _, anew = run()
    assert len(anew) == 6


def test_a_cache_that_cannot_be_written_is_done_without(
    library: Veca, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("in the way")
    monkeypatch.setenv("VECA_CACHE", str(tmp_path / "cache"))
    np.save(tmp_path / "small.npy", np.zeros((300, 300, 3), np.uint8))
    scans = Scans(library, Pyramid(open_source(tmp_path / "small.npy"), 16), None, tmp_path / "small.npy")
    scans.run(lambda what, share: None)
    assert scans.look((0, 0, 300, 300), None).inside.all()


def test_a_damaged_part_of_the_image_is_told(library: Veca, pixels: np.ndarray, tmp_path: Path) -> None:
    file = tmp_path / "damaged.tif"
    tifffile.imwrite(file, pixels, tile=(256, 256), compression="zlib", photometric="rgb")
    with tifffile.TiffFile(file) as opened:
        place = opened.pages[0].dataoffsets[9]
    data = bytearray(file.read_bytes())
    data[place + 20 : place + 400] = bytes(380)
    file.write_bytes(data)
    viewer = Viewer(Scans(library, Pyramid(open_source(file), 16), None, file), "damaged.tif", "little")
    viewer.start(lambda what, share: None)
    viewer.scanning.join(timeout=60)
    assert "damaged.tif" in viewer.problem
    assert "tile" in viewer.problem
    assert viewer.state()["problem"] == viewer.problem
    viewer.stop()


@pytest.mark.parametrize("levels", [(1, 2), (2,)])  # all that are needed, or with a hole
def test_levels_of_a_file_are_read_from_it(levels: tuple[int, ...], pixels: np.ndarray, tmp_path: Path) -> None:
    """A pyramid whose levels are brighter than the image: what is shown tells where it came from."""
    file = tmp_path / "pyramid.ome.tif"
    with tifffile.TiffWriter(file, ome=True) as writer:
        options = {"tile": (256, 256), "photometric": "rgb"}
        writer.write(pixels // 2, subifds=len(levels), metadata={"axes": "YXS"}, **options)
        for level in levels:
            writer.write(halves(pixels, level), subfiletype=1, **options)
    pyramid = Pyramid(open_source(file), 16)
    assert sorted(pyramid.stored) == [0, *levels]
    pyramid.reduce(lambda what, done, total: None)
    assert pyramid.kept == {}
    for level in range(3):
        expected = halves(pixels, level) if level in levels else halves(pixels // 2, level)
        width, height = pyramid.sizes[level]
        np.testing.assert_array_equal(pyramid.read(level, 0, 0, width, height), expected)


def test_a_stop_while_it_scans_is_quick_and_leaves_nothing(
    start: Callable[..., View], pixels: np.ndarray, tmp_path: Path
) -> None:
    np.save(tmp_path / "large.npy", np.tile(pixels, (4, 4, 1)))
    view = start(tmp_path / "large.npy", cache=tmp_path / "cache")
    while not view.state()["doing"].startswith("scanning"):
        time.sleep(0.02)
    assert view.stop() == 0
    assert [file.name for file in (tmp_path / "cache").rglob("*.partial*")] == []


def test_a_scan_that_was_made_before_is_used(
    image: Path, library: Veca, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VECA_CACHE", str(tmp_path / "cache"))
    library.scan(image, cores=4).save(tmp_path / "mine.scan")
    scans = Scans(library, Pyramid(open_source(image), 16), None, image, tmp_path / "mine.scan")
    scans.run(lambda what, share: None)
    assert scans.cores == 4
    assert len(list((tmp_path / "cache" / "view").glob("*.scan"))) == 2  # full resolution is not scanned again
    expected = open_scan(tmp_path / "mine.scan", image, library).look(box=(64, 48, 320, 160)).features
    np.testing.assert_allclose(scans.features((64, 48, 320, 160), 0), expected.numpy(), atol=1e-5)
    monkeypatch.setattr("veca.viewer.scans.LARGEST", 100)
    with pytest.raises(InputError, match="smaller box"):
        scans.features((0, 0, 1604, 1206), 0)
