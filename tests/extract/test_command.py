"""`veca features` as users run it: a process, on folders with good, broken and duplicate images, killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from PIL import Image

import veca
from veca.cli import main as run_command
from veca.errors import InputError
from veca.extract.command import main
from veca.extract.decoding import PENDING, Decoded, batches
from veca.extract.folder import FeatureFolder
from veca.extract.sources import find_entries
from veca.mixed import tokens_of

SIZE, CORES = 48, 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with the real layout; what it computes is not the subject here."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    veca.create_model("veca_tiny", depth=2, width=32, heads=2, bank=16).save(folder)
    return folder


def photo(seed: int, width: int = 60, height: int = 48) -> Image.Image:
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((width, height))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two grids; names that repeat in another folder, with another suffix, and with another content."""
    top = tmp_path / "photos"
    for name, seed, size in (
        ("a.jpg", 1, (60, 48)),
        ("a.png", 2, (60, 48)),
        ("deep/er/a.jpg", 3, (48, 90)),
        ("deep/b.webp", 4, (48, 90)),
        ("deep/copy of a.jpg", 1, (60, 48)),
        ("other/deep/b.webp", 5, (60, 48)),
    ):
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        photo(seed, *size).save(path)
    (top / "notes.txt").write_text("not an image, and not taken for one")
    (top / "._a.jpg").write_bytes(b"what another system leaves beside a.jpg")
    return top


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "veca.cli", "features", *map(str, arguments)]


def options(model: Path, out: Path, *more: object) -> list[str]:
    return [
        str(value)
        for value in ("--out", out, "--model", model, "--size", SIZE, "--cores", CORES, "--dtype", "float32", *more)
    ]


def rows(out: Path) -> dict[str, dict[str, Any]]:
    """The index by path; each path has one row."""
    lines = [json.loads(line) for line in (out / "index.jsonl").read_text().splitlines()]
    assert len({line["path"] for line in lines}) == len(lines)
    return {line["path"]: line for line in lines}


def check(out: Path, row: dict[str, Any], model: veca.Veca, dense: bool) -> None:
    """What was written is what the library computes of this image alone."""
    x = veca.preprocess(row["path"], size=SIZE, patch_size=model.patch_size)
    with torch.inference_mode():
        expected = model(x, cores=CORES)
    with np.load(out / row["output"]) as features:
        assert set(features) == ({"cls", "patches"} if dense else {"cls"})
        assert features["cls"].dtype == np.float32
        assert np.allclose(features["cls"], expected.cls[0], atol=1e-5)
        if dense:
            assert features["patches"].shape == (*expected.grid, model.num_features)
            assert np.allclose(features["patches"], expected.patches[0].reshape(*expected.grid, -1), atol=1e-5)
    assert tuple(row["grid"]) == expected.grid
    with Image.open(row["path"]) as image:
        assert tuple(row["size"]) == image.size


def test_a_folder_with_good_broken_and_duplicate_images(photos: Path, model: Path, tmp_path: Path) -> None:
    broken = photos / "deep" / "broken.jpg"
    whole = (photos / "a.jpg").read_bytes()
    broken.write_bytes(whole[: len(whole) - 200])
    text = tmp_path / "list.dat"
    text.write_text("named by the user, so it is tried")
    out = tmp_path / "out"
    arguments = (photos, text, photos / "a.jpg", *options(model, out, "--dense", "--batch", 4, "--workers", 2))
    run = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=120)

    assert run.returncode == 1, run.stderr
    assert "6 images done, 2 could not be read" in run.stdout
    assert f"{broken}: damaged or truncated image" in run.stderr
    assert f"{text}: not an image" in run.stderr
    assert "Traceback" not in run.stderr
    assert "8/8" in run.stderr
    assert "images/s" in run.stderr
    index = rows(out)
    found = {str(path) for path in photos.rglob("*.*") if path.name not in ("notes.txt", "._a.jpg")}
    assert set(index) == found | {str(text)}
    assert {path for path, row in index.items() if "error" in row} == {str(broken), str(text)}
    good = [row for row in index.values() if "output" in row]
    assert len({row["output"] for row in good}) == 6
    assert {tuple(row["grid"]) for row in good} == {(3, 4), (6, 3)}
    loaded = veca.load(model)
    for row in good:
        check(out, row, loaded, dense=True)
    assert json.loads((out / "settings.json").read_text())["size"] == SIZE


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="stops the command where it is")
@pytest.mark.end_to_end
def test_killed_in_the_middle_and_resumed(model: Path, tmp_path: Path) -> None:
    top, out, count = tmp_path / "photos", tmp_path / "out", 60
    top.mkdir()
    for number in range(count):
        photo(number).save(top / f"{number:02d}.png")
    arguments = (top, *options(model, out, "--batch", 1, "--workers", 1))
    process = subprocess.Popen(command(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        index = out / "index.jsonl"
        deadline = time.monotonic() + 120
        while not index.exists() or index.read_bytes().count(b"\n") < 4:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(InputError, match="another run is writing"):
            main([str(top), *options(model, out)])
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    first = rows(out)
    done = len(first)
    assert 4 <= done < count
    assert [Path(path).name for path in first] == [f"{number:02d}.png" for number in range(done)]
    times = {row["output"]: (out / row["output"]).stat().st_mtime_ns for row in first.values()}
    folder = (out / first[str(top / "00.png")]["output"]).parent
    # A kill can also fall inside a write: half a row, and half a feature file under its temporary name.
    with open(index, "a") as file:
        file.write('{"path": "' + str(top / "59.png") + '", "outp')
    (folder / ".59.png.abcd.partial.npz").write_bytes(b"PK\3\4")

    run = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    there = sum((folder / f"{number:02d}.png.npz").stat().st_mtime_ns in times.values() for number in range(count))
    assert f"{count - there} images done, {there} were there before" in run.stdout
    assert {output: (out / output).stat().st_mtime_ns for output in times} == times
    second = rows(out)
    assert sorted(second) == sorted(str(path) for path in top.iterdir())
    assert sorted(path.name for path in folder.iterdir()) == [f"{number:02d}.png.npz" for number in range(count)]
    loaded = veca.load(model)
    for row in second.values():
        check(out, row, loaded, dense=False)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.end_to_end
def test_workers_end_with_a_run_that_is_killed(model: Path, tmp_path: Path) -> None:
    """Large pictures fill the queue, so that the workers wait for a reader who is gone."""
    top, out = tmp_path / "photos", tmp_path / "out"
    top.mkdir()
    for number in range(40):
        photo(number).resize((600, 600)).save(top / f"{number}.png")
    arguments = (top, "--out", out, "--model", model, "--size", 592, "--cores", 8, "--batch", 1, "--workers", 3)
    process = subprocess.Popen(command(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def workers() -> list[int]:
        return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if str(out) in text(path)]

    def text(path: Path) -> str:
        try:
            return path.read_text()
        except OSError:
            return ""

    try:
        wait_for(lambda: (out / "index.jsonl").exists() and (out / "index.jsonl").read_bytes().count(b"\n") > 2)
        assert len(workers()) == 4
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not workers())


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("it did not happen in a minute")


def test_run_again_does_only_what_is_missing(
    photos: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = [str(photos), *options(model, out, "--workers", 0)]
    good = (photos / "a.jpg").read_bytes()
    (photos / "a.jpg").write_bytes(b"")
    assert main(arguments) == 1
    assert "5 images done, 1 could not be read" in capsys.readouterr().out
    assert main(arguments) == 1  # still broken, still said
    captured = capsys.readouterr()
    assert "0 images done, 5 were there before, 1 could not be read" in captured.out
    assert str(photos / "a.jpg") in captured.err
    (photos / "a.jpg").write_bytes(good)
    (out / rows(out)[str(photos / "a.png")]["output"]).unlink()
    photo(9).save(photos / "new.png")
    assert main(arguments) == 0
    assert "3 images done, 4 were there before" in capsys.readouterr().out
    assert len(rows(out)) == 7
    assert main(arguments) == 0
    assert "0 images done, 7 were there before" in capsys.readouterr().out
    assert all((out / row["output"]).is_file() for row in rows(out).values())


@pytest.mark.parametrize("kind", ["npz", "parquet"])
def test_a_share_of_the_patches_is_noted(kind: str, photos: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    more = ("--workers", 0, "--format", kind, "--size", 128)
    assert main([str(photos), *options(model, out, *more, "--patches", 0.5)]) == 0
    found = list(rows(out).values()) if kind == "npz" else pandas.read_parquet(out).to_dict("records")
    assert len(found) == 6
    for row in found:
        grid = tuple(int(side) for side in row["grid"])
        assert row["tokens"] == tokens_of(grid, 0.5) < grid[0] * grid[1]
    with pytest.raises(InputError, match=r"made with patches 0.5 \(now 1.0\)"):
        main([str(photos), *options(model, out, *more)])


def test_a_table_of_before_mixed_scale_is_continued(photos: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = [str(photos), *options(model, out, "--workers", 0, "--format", "parquet")]
    assert main(arguments) == 0
    settings = json.loads((out / "_settings.json").read_text())
    del settings["patches"], settings["share"]
    (out / "_settings.json").write_text(json.dumps(settings))
    assert main(arguments) == 0


def test_other_settings_in_the_same_folder_are_refused(photos: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    start = [str(photos), *options(model, out, "--workers", 0)]
    assert main(start) == 0
    before = (out / "index.jsonl").read_bytes()
    for change, message in (
        (("--size", 64), r"made with size 48 \(now 64\)"),
        (("--cores", 4), r"made with cores 8 \(now 4\)"),
        (("--dense",), r"made with dense False \(now True\)"),
        (("--dense", "--stride", 8), r"made with dense False \(now True\), stride None \(now 8\)"),
        (("--dtype", "bfloat16"), r"made with dtype float32 \(now bfloat16\); use"),
    ):
        with pytest.raises(InputError, match=message):
            main([*start, *map(str, change)])
    other = tmp_path / "other"
    veca.create_model("veca_tiny", depth=2, width=32, heads=2, bank=16).save(other)
    with pytest.raises(InputError, match="with other weights"):
        main([*start, "--model", str(other)])
    assert (out / "index.jsonl").read_bytes() == before
    model.rename(tmp_path / "moved")  # the same weights under another name are the same model
    try:
        assert main([*start, "--model", str(tmp_path / "moved")]) == 0
    finally:
        (tmp_path / "moved").rename(model)


def test_a_folder_of_before_there_was_a_choice_of_precision_is_float32(
    photos: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = [str(photos), *options(model, tmp_path / "out", "--workers", 0)]
    assert main(start) == 0
    file = tmp_path / "out" / "settings.json"
    file.write_text(
        json.dumps({name: value for name, value in json.loads(file.read_text()).items() if name != "dtype"})
    )
    with pytest.raises(InputError, match=r"made with dtype float32 \(now bfloat16\)"):
        main([*start, "--dtype", "bfloat16"])
    assert main(start) == 0
    assert "0 images done, 6 were there before" in capsys.readouterr().out


@pytest.mark.parametrize("stride", [8, 7, 16])
def test_a_finer_map(stride: int, photos: Path, model: Path, tmp_path: Path) -> None:
    """Each cell has the feature centred on it (tests/test_scan.py says what that is); at the border, moved inside."""
    out, loaded = tmp_path / "out", veca.load(model)
    assert main([str(photos), *options(model, out, "--workers", 0, "--dense", "--stride", stride)]) == 0
    assert json.loads((out / "settings.json").read_text())["stride"] == stride
    index = rows(out)
    assert len(index) == 6
    for path, row in index.items():
        x = veca.preprocess(path, size=SIZE, patch_size=16)
        with torch.inference_mode():
            whole = loaded(x, cores=CORES)
            cells = loaded.scan(x[0], cores=CORES)
        height, width = x.shape[-2:]
        with np.load(out / row["output"]) as file:
            cls, patches = torch.from_numpy(file["cls"]), torch.from_numpy(file["patches"])
        assert tuple(row["grid"]) == patches.shape[:2] == (-(-height // stride), -(-width // stride))
        torch.testing.assert_close(cls, whole.cls[0], atol=1e-5, rtol=0)
        if stride == 16:
            torch.testing.assert_close(patches, whole.patches[0].unflatten(0, whole.grid), atol=1e-5, rtol=0)
        middles = [(j + 0.5, i + 0.5) for i in range(row["grid"][0]) for j in range(row["grid"][1])]
        inside = [(min(max(a * stride, 8), width - 8), min(max(b * stride, 8), height - 8)) for a, b in middles]
        points = cells.look(points=inside).features
        torch.testing.assert_close(patches.flatten(0, 1), points, atol=1e-5, rtol=0)


@pytest.mark.parametrize("streamed", [False, True])
def test_bfloat16_is_near_float32_on_a_photograph(streamed: bool, tmp_path: Path) -> None:
    folder = Path(str(pytest.importorskip("skimage.data").__file__)).parent
    with Image.open(folder / "astronaut.png") as image:
        image.convert("RGB").resize((224, 224)).save(tmp_path / "photo.png")
    found = {}
    for dtype in ("float32", "bfloat16"):
        out = tmp_path / dtype
        words = [str(tmp_path / "photo.png"), "--out", str(out), "--dtype", dtype]
        more = ["--stream"] if streamed else ["--size", "224", "--workers", "0", "--dense"]
        assert main([*words, *more]) == 0
        if streamed:
            dense, cls = np.load(out / "photo.png.npy"), np.load(out / "photo.png.npz")["cls"]
        else:
            assert json.loads((out / "settings.json").read_text())["dtype"] == dtype
            (row,) = rows(out).values()
            with np.load(out / row["output"]) as file:
                dense, cls = file["patches"], file["cls"]
        assert (dense.dtype, cls.dtype, dense.shape) == (np.float32, np.float32, (16, 16, 384))
        found[dtype] = torch.from_numpy(dense).flatten(0, 1), torch.from_numpy(cls)[None]
    for ours, exact in zip(found["bfloat16"], found["float32"], strict=True):
        assert not torch.equal(ours, exact)
        assert float(torch.cosine_similarity(ours, exact).mean()) > 0.999


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{photos}/absent.jpg"], "absent.jpg: no such file or folder"),
        ([], "name at least one image or folder"),
        (["{empty}"], "no images in"),
        (["{photos}", "--model", "veca_tiny"], "no model at 'veca_tiny'"),
        (["{photos}", "--cores", "17"], "cores must be a whole number from 1 to 16"),
        (["{photos}", "--size", "0"], "--size must be at least 1"),
        (["{photos}", "--stride", "8"], "--stride is about the feature of every patch: it needs --dense"),
        (["{photos}", "--dense", "--stride", "17"], "--stride lies between 1 and this model's patch size 16, not 17"),
        (["{photos}", "--dense", "--stride", "0"], "--stride lies between 1 and this model's patch size 16, not 0"),
        (["{photos}", "--batch", "0"], "--batch must be at least 1"),
        (["{photos}", "--workers", "-1"], "--workers must be at least 0"),
        (["{photos}", "--device", "nowhere"], "--device nowhere cannot be used here"),
        (["{photos}", "--out", "{photos}/a.jpg"], "is a file, not a folder"),
        (["{photos}", "--out", "{photos}/a.jpg/b"], "cannot write"),
    ],
)
def test_mistakes_get_one_line(arguments: list[str], message: str, photos: Path, model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    given = [argument.format(photos=photos, empty=tmp_path / "empty") for argument in arguments]
    out = tmp_path / "out"
    with pytest.raises(InputError, match=message) as caught:
        main([*options(model, out), *given])
    assert "\n" not in str(caught.value)
    assert not out.exists()


def test_help_has_examples_and_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert "veca features photos/ --out features/" in shown
    assert "Exit status" in shown


# --- the parts


def test_images_are_found_once_in_a_fixed_order(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_entries((photos,))
    assert [str(Path(entry.name).relative_to(photos)) for entry in found] == [
        "a.jpg",
        "a.png",
        "deep/b.webp",
        "deep/copy of a.jpg",
        "deep/er/a.jpg",
        "other/deep/b.webp",
    ]
    monkeypatch.chdir(photos)
    assert find_entries((Path("deep/../deep"), Path(), Path("a.png"))) == [*found[2:5], *found[:2], found[5]]


def some(shapes: list[int], taken: list[int]) -> Iterator[Decoded]:
    for number, shape in enumerate(shapes):
        taken.append(number)
        yield Decoded(Path(str(number)), (shape, 1), np.zeros((16 * shape, 16, 3), np.uint8) if shape else None, "")


def test_batches_hold_equal_grids_and_few_images_wait() -> None:
    rng = np.random.default_rng(0)
    shapes = [int(shape) for shape in rng.integers(0, 40, 500)]  # 0 is an unreadable one
    taken: list[int] = []
    seen: list[int] = []
    for batch in batches(some(shapes, taken), 4):
        assert 1 <= len(batch) <= 4
        assert len({shapes[int(item.path.name)] for item in batch}) == 1
        assert batch[0].pixels is not None or len(batch) == 1
        assert len(taken) - len(seen) <= PENDING * 4 + 1
        seen += [int(item.path.name) for item in batch]
    assert sorted(seen) == list(range(500))
    assert [len(batch) for batch in batches(some([1, 2] * 9, []), 4)] == [4, 4, 4, 4, 1, 1]


def test_output_names_differ_and_fit_the_file_system(tmp_path: Path) -> None:
    long = "é" * 120  # 240 bytes
    paths = [Path("/x/a.jpg"), Path("/y/x/a.jpg"), Path("/x/a.png"), Path("/a.jpg"), Path(f"/x/{long}.jpg")]
    paths += [Path(f"/x/{long}.png"), Path(f"/{long}/a.jpg"), Path("/x/line\nbreak.jpg"), Path("/x/\udcff.jpg")]
    with FeatureFolder(tmp_path / "out", {}) as folder:
        for path in paths:
            folder.add(path, {"cls": np.zeros(2, np.float32)}, (1, 1), (1, 1))
    with FeatureFolder(tmp_path / "out", {}) as folder:
        assert all(folder.has(path) for path in paths)
    assert len(list((tmp_path / "out").glob("*/*.npz"))) == len(paths)


def test_an_index_that_is_none_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    index = out / "index.jsonl"
    index.write_text("the user's own\nfile\n")
    with pytest.raises(InputError, match="line 1 is not a row of an index"):
        FeatureFolder(out, {}).__enter__()
    (out / "settings.json").write_text("{}")
    with pytest.raises(InputError, match="line 1 is not a row"):
        FeatureFolder(out, {}).__enter__()
    assert index.read_text() == "the user's own\nfile\n"
    (out / "settings.json").write_text("{")
    with pytest.raises(InputError, match="is damaged: not JSON"):
        FeatureFolder(out, {}).__enter__()


WAITS_INSIDE = """
import sys, time
from veca.errors import InputError
from veca.extract.folder import FeatureFolder
try:
    with FeatureFolder(sys.argv[1], {"seed": sys.argv[2]}):
        print("inside", flush=True)
        sys.stdin.read()
except InputError as error:
    print(error, flush=True)
"""


def test_of_two_first_runs_one_proceeds(tmp_path: Path) -> None:
    """Both begin in a folder that is not there; the second must not replace what the first has locked."""
    for round_ in range(5):
        words = [sys.executable, "-c", WAITS_INSIDE, str(tmp_path / str(round_))]
        runs = [
            subprocess.Popen([*words, str(seed)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for seed in range(3)
        ]
        said = [run.stdout.readline() for run in runs if run.stdout is not None]
        for run in runs:
            run.communicate()
        assert sorted("another run is writing" in line for line in said) == [False, True, True], said


@pytest.mark.parametrize("damage", [b"[" * 100_000, b"[]", b"\xff\xfe", b"{", b"null"])
def test_a_damaged_folder_is_one_line(damage: bytes, tmp_path: Path) -> None:
    with FeatureFolder(tmp_path / "out", {"size": 3}) as folder:
        folder.add(Path("/a.jpg"), {"cls": np.ones(3)}, (1, 1), (1, 1))
    for name in ("settings.json", "index.jsonl"):
        path = tmp_path / "out" / name
        content = path.read_bytes()
        path.write_bytes(damage + b"\n")
        with pytest.raises(InputError, match=name), FeatureFolder(tmp_path / "out", {"size": 3}):
            pass
        path.write_bytes(content)
    with FeatureFolder(tmp_path / "out", {"size": 3}) as folder:
        assert folder.has(Path("/a.jpg"))


@pytest.mark.parametrize("keep", [0, 10, 200])
def test_features_that_the_disk_lost_are_made_again(keep: int, tmp_path: Path) -> None:
    with FeatureFolder(tmp_path / "out", {"size": 3}) as folder:
        folder.add(Path("/a.jpg"), {"cls": np.ones(300)}, (1, 1), (1, 1))
        written = tmp_path / "out" / folder.output(Path("/a.jpg"))
    written.write_bytes(written.read_bytes()[:keep])
    with FeatureFolder(tmp_path / "out", {"size": 3}) as folder:
        assert not folder.has(Path("/a.jpg"))


@pytest.mark.end_to_end
def test_names_of_any_bytes(model: Path, tmp_path: Path) -> None:
    top, out = tmp_path / "photos", tmp_path / "out"
    top.mkdir()
    photo(0).save(top / "a.png")
    (top / "a.png").rename(os.fsdecode(os.fsencode(top) + b"/\xff\xfe [bold].png"))
    (top / "two\nlines.png").write_bytes(b"no image")
    run = subprocess.run(command(top, *options(model, out)), capture_output=True, timeout=120)
    assert run.returncode == 1, run.stderr
    assert b"1 images done, 1 could not be read" in run.stdout
    assert b"two\\nlines.png" in run.stderr
    assert b"Traceback" not in run.stderr
    again = subprocess.run(command(top, *options(model, out)), capture_output=True, timeout=120)
    assert b"1 were there before" in again.stdout
    streamed = subprocess.run(
        command("--stream", *top.glob("*bold*"), "--out", tmp_path / "s", "--model", model, "--cores", CORES),
        capture_output=True,
        timeout=120,
    )
    assert streamed.returncode == 0, streamed.stderr


def test_a_place_that_takes_no_folder_is_one_line(
    photos: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["features", str(photos), "--model", str(model), "--out", "/proc/veca", "--cores", "8"]) == 2
    printed = capsys.readouterr().err
    assert "cannot write /proc/veca" in printed
    assert len(printed.splitlines()) == 1
