"""`veca features --stream`, `veca scan`, `veca look` and `veca similar` on the files that people have."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import rasterio
import torch
import zarr
from PIL import Image

from veca import Veca, open_source
from veca.cli import main as run
from veca.large.source import Array, Source
from veca.similar import Found, SimilarSettings, write_places

from .files import aperio, cog
from .test_formats import small
from .test_picture import photo
from .test_where import tissue


@pytest.fixture
def model(tmp_path: Path) -> list[str]:
    small().save(tmp_path / "model")
    return ["--model", str(tmp_path / "model"), "--cores", "8", "--dtype", "float32"]


def test_a_scene_by_bands_and_length_and_again(
    model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = photo(320, 480, 4, np.uint16, 3000) + 1
    path = cog(tmp_path / "scene.tif", values)
    out = tmp_path / "out"
    command = ["features", "--stream", str(path), "--out", str(out), *model, "--bands", "4,3,2", "--stretch", "2,98"]
    assert run([*command, "--mpp", "20m"]) == 0
    said = capsys.readouterr()
    assert "scene.tif: 240×160 pixels, level 1 of 0 to 2, 20 m a pixel, WGS 84 / UTM zone 33N" in said.err
    with open_source(path, bands="4,3,2", stretch="2,98", scale=0.5) as picture:
        expected = small().stream(picture.rgb(0, 0, 240, 160), cores=8)
    dense = np.load(out / "scene.tif.npy")
    np.testing.assert_allclose(dense.reshape(150, 48), expected.patches[0].numpy(), atol=1e-4)
    about = json.loads(str(np.load(out / "scene.tif.npz")["about"]))
    assert (about["bands"], about["stretch"], about["size"]) == ([4, 3, 2], [2, 98], [240, 160])
    assert about["transform"] == [20, 0, 500_000, 0, -20, 5_000_000]
    assert len(about["limits"]) == 3
    assert run([*command, "--mpp", "20m"]) == 0
    assert "was there before" in capsys.readouterr().out
    assert run([*command, "--mpp", "40m"]) == 0
    assert "was there before" not in capsys.readouterr().out
    assert np.load(out / "scene.tif.npy").shape == (5, 7, 48)
    assert run([*command, "--format", "tif", "--window", "640m", "--channels", "3,7"]) == 0
    with rasterio.open(out / "scene.tif.tif") as file:
        assert (file.count, file.width, file.height, file.crs.to_epsg()) == (2, 30, 20, 32633)
        assert tuple(file.transform)[:6] == (160, 0, 500_000, 0, -160, 5_000_000)


def test_many_slides_with_the_glass_left_out(
    model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slides = [aperio(tmp_path / name, tissue()) for name in ("a.svs", "b.svs", "c.svs")]
    slides[1].write_bytes(slides[1].read_bytes()[:5000])
    out = tmp_path / "out"
    command = ["features", "--stream", *map(str, slides), "--out", str(out), *model, "--where", "auto"]
    assert run([*command, "--format", "zarr-int8"]) == 1
    said = capsys.readouterr()
    assert said.out.count(", 50% of them inside the mask") == 2
    assert [line for line in said.err.splitlines() if "could not be read" in line] == [
        line for line in said.err.splitlines() if "b.svs" in line
    ]
    for name in ("a", "c"):
        group = zarr.open_group(str(out / f"{name}.svs.zarr"), mode="r")
        scales = group["scales"][:]  # type: ignore[index]
        assert (scales[:, :15] > 0).all()  # type: ignore[index, operator]
        assert not scales[:, 15:].any()  # type: ignore[index, union-attr]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--level", "5"], "it has levels 0 to 1"),
        (["--level", "0", "--scale", "0.5"], "give one of level, mpp and scale"),
        (["--bands", "7,8,9"], "--bands takes numbers from 1 to 4"),
        (["--window", "2 miles"], "--window is a length"),
        (["--where", "none.png"], "none.png: no such file"),
        (["--channels", "1"], "give --format tif too"),
        (["--mpp", "wide"], "mpp is a length"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], said: str, model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slide = aperio(tmp_path / "slide.svs", tissue())
    assert run(["features", "--stream", str(slide), "--out", str(tmp_path / "out"), *model, *arguments]) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_a_scan_remembers_its_resolution_and_look_counts_in_the_files_pixels(
    model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = aperio(tmp_path / "slide.svs", tissue())
    scans = tmp_path / "scans"
    command = ["scan", str(path), "--out", str(scans), *model, "--mpp", "1", "--where", "auto"]
    assert run(command) == 0
    assert run(command) == 0
    assert "1 were there before" in capsys.readouterr().out
    look = ["look", str(scans / "slide.svs.scan"), "--dtype", "float32"]
    assert run([*look, "--box", "64,32,64,96", "--out", str(tmp_path / "part.npy")]) == 0
    whole = small().scan(tissue()[::2, ::2].copy(), where="auto", cores=8)
    expected = whole.look(box=(32, 16, 32, 48)).features
    np.testing.assert_allclose(np.load(tmp_path / "part.npy"), expected.numpy(), atol=2e-2)
    assert run([*look, "--points", "100,60", "--out", str(tmp_path / "points.parquet")]) == 0
    table = pyarrow.parquet.read_table(tmp_path / "points.parquet")
    assert (table.column("x").to_pylist(), table.column("y").to_pylist()) == ([100], [60])
    assert run([*look, "--out", str(tmp_path / "map.tif")]) == 0
    with rasterio.open(tmp_path / "map.tif") as file:
        assert (file.count, file.width, file.height) == (3, 15, 10)
    assert run([*look, "--points", "1,1", "--out", str(tmp_path / "map.tif")]) == 2


def marked() -> tuple[Array, list[tuple[int, int]]]:
    """Noise, and the same patch at five places of the grid."""
    generator = np.random.default_rng(5)
    values = generator.integers(90, 110, (320, 480, 3), dtype=np.uint8)
    mark = photo(16, 16)[..., ::-1]
    places = [(2, 3), (4, 20), (9, 9), (15, 5), (18, 28)]
    for row, column in places:
        values[row * 16 : row * 16 + 16, column * 16 : column * 16 + 16] = mark
    return values, places


@pytest.mark.parametrize("window", [[], ["--window", "128"]])
def test_similar_places_are_found(window: list[str], model: list[str], tmp_path: Path) -> None:
    values, places = marked()
    path, out = cog(tmp_path / "scene.tif", values), tmp_path / "similar"
    row, column = places[0]
    at = f"{column * 16 + 3},{row * 16 + 9}"
    assert run(["similar", str(path), "--at", at, "--top", "4", "--out", str(out), *model, *window]) == 0
    with open(out / "places.csv") as file:
        found = [(float(line["y"]), float(line["x"]), float(line["similarity"])) for line in csv.DictReader(file)]
    assert {(y, x) for y, x, _ in found} == {(row * 16 + 8, column * 16 + 8) for row, column in places[1:]}
    assert [score for _, _, score in found] == sorted((score for _, _, score in found), reverse=True)
    assert Image.open(out / "heat.png").size == (480, 320)
    with rasterio.open(out / "heat.tif") as heat:
        values = heat.read(1)
        assert np.unravel_index(values.argmax(), values.shape) == places[0]
    shapes = json.loads((out / "places.geojson").read_text())["features"]
    assert len(shapes) == 4
    longitude, latitude = shapes[0]["geometry"]["coordinates"][0][0]
    assert 14 < longitude < 16
    assert 44 < latitude < 46


def test_similar_needs_no_more_than_an_image_and_a_place(
    model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = photo(320, 480, 4, np.uint16, 3000) + 1
    path = cog(tmp_path / "scene.tif", values)
    monkeypatch.chdir(tmp_path)
    view = ["--bands", "4,3,2", "--stretch", "2,98", "--scale", "0.5"]
    assert run(["similar", str(path), "--at", "100,200", *view, *model]) == 0
    assert "scene.tif.similar: 20 places" in capsys.readouterr().out
    out = tmp_path / "scene.tif.similar"
    with open_source(path, bands="4,3,2", stretch="2,98", scale=0.5) as picture:
        dense = small().stream(picture, cores=8).patches[0].unflatten(0, (10, 15))
    expected = torch.cosine_similarity(dense, dense[6, 3], dim=-1).numpy()  # y 100 and x 50, of patches of 16
    with rasterio.open(out / "heat.tif") as heat:
        np.testing.assert_allclose(heat.read(1), expected, atol=1e-4)
    about = json.loads((out / "about.json").read_text())
    assert (about["at"], about["patch"], about["cores"]) == ("100,200", [96, 192, 32, 32], 8)
    assert (about["image"], about["model"]) == (str(path), str(tmp_path / "model"))
    assert (about["picture"]["bands"], about["picture"]["stretch"]) == ([4, 3, 2], [2, 98])
    assert len(about["picture"]["limits"]) == 3


def test_an_image_too_large_for_the_memory_is_one_line(
    model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    side = 2**23
    zarr.create_array(str(tmp_path / "huge.zarr"), shape=(side, side, 3), chunks=(256, 256, 3), dtype="uint8")
    out = ["--out", str(tmp_path / "out"), *model]
    assert run(["similar", str(tmp_path / "huge.zarr"), "--at", "5,5", *out]) == 2
    said = capsys.readouterr().err.splitlines()
    assert not any("Traceback" in line for line in said)
    assert said[-1].endswith("its tokens do not fit in memory; use --window, or a coarser --level or --scale")


def test_similar_places_of_a_folder_of_scans(model: list[str], tmp_path: Path) -> None:
    values, places = marked()
    for name, part in (("one.png", values), ("two.png", values[::-1, ::-1].copy()), ("query.png", values)):
        Image.fromarray(part).save(tmp_path / name)
    scans = tmp_path / "scans"
    assert run(["scan", str(tmp_path / "one.png"), str(tmp_path / "two.png"), "--out", str(scans), *model]) == 0
    at = f"{places[0][1] * 16},{places[0][0] * 16}"
    out = tmp_path / "similar"
    command = ["similar", str(tmp_path / "query.png"), "--at", at, "--out", str(out), *model]
    assert run([*command, "--among", str(scans), "--top", "5"]) == 0
    with open(out / "places.csv") as file:
        lines = list(csv.DictReader(file))
    assert {line["image"] for line in lines} == {"one.png"}  # the mark is turned in the other
    assert {(float(line["y"]), float(line["x"])) for line in lines} == {(r * 16 + 8, c * 16 + 8) for r, c in places}
    assert (out / "two.png.heat.png").is_file()
    shape = json.loads((out / "one.png.geojson").read_text())["features"][0]
    assert shape["properties"]["objectType"] == "annotation"
    assert torch.tensor(shape["geometry"]["coordinates"]).shape == (1, 5, 2)
    assert run([*command, "--among", str(tmp_path / "model")]) == 2
    assert run(["similar", str(tmp_path / "query.png"), "--at", "9999,1", "--out", str(out), *model]) == 2


def rows(out: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (out / "index.jsonl").read_text().splitlines()]


def test_a_folder_of_images_of_all_kinds_has_one_index(
    model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = tmp_path / "images", tmp_path / "out"
    (folder / "deeper").mkdir(parents=True)
    aperio(folder / "slide.svs", tissue())
    cog(folder / "deeper/scene.tif", photo(64, 64))
    zarr.create_array(str(folder / "array.zarr"), data=photo(64, 96))
    (folder / "broken.tif").write_bytes(b"II*\0")
    (folder / "notes.txt").write_text("no image")
    command = ["features", "--stream", str(folder), "--out", str(out), *model]
    assert run(command) == 1
    told = {Path(str(row["path"])).name: row for row in rows(out)}
    assert sorted(told) == ["array.zarr", "broken.tif", "scene.tif", "slide.svs"]
    assert (told["array.zarr"]["size"], told["array.zarr"]["grid"]) == ([96, 64], [4, 6])
    assert np.load(out / str(told["slide.svs"]["output"])).shape == (20, 30, 48)
    assert "broken.tif" in str(told["broken.tif"]["error"])
    Image.fromarray(photo(32, 32)).save(folder / "broken.tif")  # mended: the others are left alone
    capsys.readouterr()
    assert run(command) == 0
    assert capsys.readouterr().out.count("was there before") == 3
    assert len(rows(out)) == 4
    assert not any("error" in row for row in rows(out))
    photos = tmp_path / "photos"
    photos.mkdir()
    Image.fromarray(photo(32, 32)).save(photos / "small.png")  # `veca features` shares it
    assert run(["features", str(photos), "--out", str(out), *model, "--workers", "0", "--size", "32"]) == 0
    assert run(command) == 0
    assert run(["features", str(photos), "--out", str(out), *model, "--workers", "0", "--size", "32"]) == 0
    assert sorted(Path(str(row["path"])).name for row in rows(out)) == sorted([*told, "small.png"])


def test_one_name_in_two_folders_is_two_images(model: list[str], tmp_path: Path) -> None:
    folder, out, scans = tmp_path / "images", tmp_path / "out", tmp_path / "scans"
    values, places = marked()
    pixels = {"a/slide.svs": tissue(), "b/slide.svs": values}
    for name, part in pixels.items():
        (folder / name).parent.mkdir(parents=True)
        aperio(folder / name, part)
    assert run(["features", "--stream", str(folder), "--out", str(out), *model]) == 0
    assert [row["output"] for row in rows(out)] == [f"{name}.npy" for name in pixels]
    for name, part in pixels.items():
        expected = small().stream(part, cores=8).patches[0].numpy()
        np.testing.assert_allclose(np.load(out / f"{name}.npy").reshape(600, 48), expected, atol=1e-4)
    (out / "b/.slide.svs.0123.partial.npy").write_bytes(b"of a run that was killed")
    assert run(["features", "--stream", str(folder), "--out", str(out), *model]) == 0
    assert sorted(str(file.relative_to(out)) for file in out.rglob("*.np*")) == sorted(
        f"{name}.{end}" for name in pixels for end in ("npy", "npz")
    )
    for _ in range(2):  # the second finds all done
        assert run(["scan", str(folder), "--out", str(scans), *model]) == 0
    assert sorted(str(file.relative_to(scans)) for file in scans.rglob("*.scan")) == [f"{name}.scan" for name in pixels]
    at = f"{places[0][1] * 16},{places[0][0] * 16}"
    command = ["similar", str(folder / "b/slide.svs"), "--at", at, "--among", str(scans), "--top", "5"]
    assert run([*command, "--out", str(tmp_path / "similar"), *model]) == 0
    with open(tmp_path / "similar/places.csv") as file:
        assert {line["image"] for line in csv.DictReader(file)} == {"b/slide.svs"}
    assert (tmp_path / "similar/a/slide.svs.heat.png").is_file()
    two = ["features", "--stream", *(str(folder / name) for name in pixels), "--out", str(out), *model]
    assert run(two) == 2


def test_an_empty_folder_and_a_busy_one(model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert run(["features", "--stream", str(tmp_path / "empty"), "--out", str(tmp_path / "out"), *model]) == 2
    assert "empty: no images in this folder" in capsys.readouterr().err
    (tmp_path / "out").mkdir()
    (tmp_path / "out/index.jsonl").write_text("no row\n{}\n")
    np.save(tmp_path / "image.npy", photo(32, 32))
    command = ["features", "--stream", str(tmp_path / "image.npy"), *model]
    assert run([*command, "--out", str(tmp_path / "out")]) == 2
    assert "line 1 is not a row of an index" in capsys.readouterr().err
    assert run([*command, "--out", "/proc/veca"]) == 2
    printed = capsys.readouterr().err
    assert "cannot write /proc/veca" in printed
    assert len(printed.splitlines()) == 1


@pytest.mark.parametrize("verb", [["features", "--stream"], ["scan"], ["similar", "--at", "5,5"]])
def test_an_out_that_is_a_file_is_known_before_the_work(
    verb: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "image.npy", photo(32, 32))
    (tmp_path / "out").write_text("mine")
    given = ["--out", str(tmp_path / "out"), "--model", str(tmp_path / "none")]  # a model is not even looked for
    assert run([verb[0], *verb[1:], str(tmp_path / "image.npy"), *given]) == 2
    assert capsys.readouterr().err.endswith("out is a file, not a folder\n")
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize("window", [[], ["--window", "32"], ["--spill", "tokens"]])
def test_what_float16_cannot_hold_is_one_line_and_no_file(
    window: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small()
    with torch.no_grad():
        model.patch_embed.proj.weight.mul_(1e7)  # tokens
        model.norm.weight.mul_(1e6)  # features
    model.save(tmp_path / "loud")
    np.save(tmp_path / "image.npy", photo(64, 64))
    monkeypatch.chdir(tmp_path)
    command = ["features", "--stream", "image.npy", "--model", "loud", "--dtype", "float32", "--cores", "8", *window]
    assert run([*command, "--tokens", "float16", "--out", "out"]) == 2
    assert "too large for float16; use" in capsys.readouterr().err.splitlines()[-1]
    assert not list((tmp_path / "out").glob("*.np*"))
    assert run([*command, "--out", "out"]) == 0
    assert np.isfinite(np.load("out/image.npy.npy")).all()


def test_a_place_outside_the_mask_is_known_before_the_work(
    model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = aperio(tmp_path / "slide.svs", tissue())
    for verb in ("stream", "scan"):
        monkeypatch.setattr(Veca, verb, None)
    command = ["similar", str(path), "--at", "400,100", "--where", "auto", "--out", str(tmp_path / "out"), *model]
    for more in ([], ["--window", "128"], ["--among", str(tmp_path)]):
        (tmp_path / "some.scan").write_bytes(b"")
        assert run([*command, *more]) == 2
        assert "--at 400,100 lies outside the mask" in capsys.readouterr().err.splitlines()[-1]


def test_a_damaged_scan_does_not_end_the_search_of_the_others(
    model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values, places = marked()
    for name in ("one.png", "two.png"):
        Image.fromarray(values).save(tmp_path / name)
    scans, out = tmp_path / "scans", tmp_path / "similar"
    assert run(["scan", str(tmp_path / "one.png"), str(tmp_path / "two.png"), "--out", str(scans), *model]) == 0
    (tmp_path / "one.png").unlink()
    (scans / "a.scan").write_bytes(b"nothing")
    at = f"{places[0][1] * 16},{places[0][0] * 16}"
    command = ["similar", str(tmp_path / "two.png"), "--at", at, "--among", str(scans), "--top", "5"]
    assert run([*command, "--out", str(out), *model]) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("could not be searched")]
    assert len(lines) == 2
    with open(out / "places.csv") as file:
        found = list(csv.DictReader(file))
    assert [(line["rank"], line["image"]) for line in found] == [(str(rank), "two.png") for rank in range(1, 6)]
    assert [line["similarity"] for line in found] == ["1.0000"] * 5


def test_places_of_a_very_wide_image_keep_their_pixels(tmp_path: Path) -> None:
    class Wide(Source):
        name, levels, bands, dtype = "wide", [(3_000_000, 16)], 3, np.dtype(np.uint8)

        def read(self, x: int, y: int, width: int, height: int, level: int, bands: object) -> Array:
            raise NotImplementedError

    settings = SimilarSettings(image=Path("wide.tif"), at="0,0", out=tmp_path)
    found = [Found("wide.tif", open_source(Wide()), [(0, 150_001, 0.75)])]
    write_places(found, 15, settings)
    assert (tmp_path / "places.csv").read_text().splitlines()[1] == "1,wide.tif,2250022.5,7.5,0.7500"
    (shape,) = json.loads((tmp_path / "places.geojson").read_text())["features"]
    assert shape["properties"]["measurements"] == {"similarity": 0.75}  # QuPath's table
    assert shape["geometry"]["coordinates"][0][0] == [2_250_015, 0]
