"""Scans that clients keep, and looks along them, asked of the real process."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load, save

import veca
from veca import Veca, preprocess
from veca.images import open_image, to_tensor
from veca.serve.scans import HEADER, largest_scan

from .process import HTTP, Server, picture

PHOTO = picture(1, 203, 117)  # 7×12 patches, and some pixels beyond them
WHOLE = slice(0, 112), slice(0, 192)


@torch.inference_mode()
def forward(library: Veca, body: bytes, cores: int = 64) -> np.ndarray:
    """The dense feature of a photo in its own size: h×w×D."""
    images = to_tensor(open_image(np.asarray(Image.open(io.BytesIO(body)).convert("RGB"))[WHOLE]))[None]
    return library(images, cores=cores).patches[0].view(7, 12, -1).numpy()


def scan(server: Server, body: bytes = PHOTO, query: str = "") -> httpx.Response:
    return HTTP.post(f"{server.url}/v1/scan{query}", content=body)


def look(server: Server, file: bytes, query: str = "", body: bytes = PHOTO) -> httpx.Response:
    files = {"image": ("photo", body), "scan": ("scan", file)}
    return HTTP.post(f"{server.url}/v1/look{query}", files=files)


def problem(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    assert "\n" not in error["message"]
    return answer.status_code, error["reason"], error["message"]


@pytest.fixture(scope="module")
def kept(server: Server) -> bytes:
    answer = scan(server)
    assert answer.status_code == 200, answer.text
    return answer.content


def test_a_look_along_a_served_scan_is_the_forward_pass(server: Server, library: Veca, kept: bytes) -> None:
    dense = forward(library, PHOTO)
    whole = look(server, kept).json()
    np.testing.assert_allclose(whole["features"], dense, atol=5e-3)  # float16
    assert {name: whole[name] for name in ("model", "cores", "share", "image", "stride", "box")} == {
        "model": "little",
        "cores": 64,
        "share": 1.0,
        "image": [203, 117],
        "stride": 16,
        "box": [0, 0, 192, 112],
    }
    assert whole["inside"][0][0] is True
    with np.load(io.BytesIO(look(server, kept, "?box=40,20,30,10&format=npz").content), allow_pickle=False) as part:
        np.testing.assert_allclose(part["features"], dense[1:2, 2:5], atol=5e-3)
        assert part["centres"][0, 0].tolist() == [40, 24]
        assert part["box"].tolist() == [32, 16, 48, 16]
        assert part["inside"].all()
    points = look(server, kept, "?points=40,24+184.2,8").json()
    np.testing.assert_allclose(points["features"], dense[[1, 0], [2, 11]], atol=5e-3)
    finer = look(server, kept, "?box=32,16,48,16&stride=8").json()
    expected = library.scan(np.asarray(Image.open(io.BytesIO(PHOTO)))).look(box=(32, 16, 48, 16), stride=8)
    np.testing.assert_allclose(finer["features"], expected.features, atol=5e-3)


def test_a_served_scan_is_a_scan_file_as_any_other(server: Server, library: Veca, tmp_path: Path) -> None:
    answer = scan(server, query="?cores=9&share=0.5")
    assert answer.headers["content-type"] == "application/octet-stream"
    used = [answer.headers[f"x-veca-{name}"] for name in ("model", "image", "cores", "grid")]
    assert used == ["little", "203x117", "9", "7x12"]
    (tmp_path / "photo.png").write_bytes(PHOTO)
    (tmp_path / "photo.scan").write_bytes(answer.content)
    found = veca.open_scan(tmp_path / "photo.scan", tmp_path / "photo.png", library)
    expected = library.scan(tmp_path / "photo.png", cores=9, share=0.5)
    torch.testing.assert_close(found.cls, expected.cls, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.look().features, expected.look().features, atol=5e-3, rtol=0)
    mask = np.ones((3, 3))
    mask[0, 0] = 0
    library.scan(tmp_path / "photo.png", where=mask).save(tmp_path / "masked.scan", image="where it lay")
    answer = look(server, (tmp_path / "masked.scan").read_bytes())  # and the other way round
    assert answer.json()["inside"] == veca.open_scan(
        tmp_path / "masked.scan", tmp_path / "photo.png", library
    ).look().inside.tolist()  # fmt: skip


def test_a_scan_of_another_size(server: Server, library: Veca) -> None:
    body = picture(2, 900, 600)
    status, reason, message = problem(scan(server, body))
    assert (status, reason) == (413, "too_many_pixels")
    assert "900×600 is over the limit of 262144 pixels for a photo in its own size" in message
    answer = scan(server, body, "?size=64&cores=16")
    assert answer.headers["x-veca-image"] == "96x64"
    found = look(server, answer.content, "?size=64&box=0,0,32,64", body).json()
    with torch.inference_mode():
        expected = library(preprocess(body, size=64, patch_size=16), cores=16).patches[0].view(4, 6, -1)
    np.testing.assert_allclose(found["features"], expected[:, :2], atol=5e-3)
    assert problem(look(server, answer.content, "?size=96", body)) == (
        *(422, "wrong_scan"),
        "the scan was made of an image of 96×64 pixels; the image has 144×96",
    )


@pytest.mark.parametrize(
    ("query", "reason", "words"),
    [
        ("?box=0,0,0,5", "bad_parameter", "is not inside the image of 203×117"),
        ("?box=190,0,20,5", "bad_parameter", "is not inside the image of 203×117"),
        ("?box=195,0,5,5", "bad_parameter", "beyond the last whole patch"),
        ("?box=1,2,3", "bad_parameter", "box: write x,y,width,height in whole pixels"),
        ("?box=-1,0,5,5", "bad_parameter", "box: write"),
        ("?box=0,0,1e3,5", "bad_parameter", "box: write"),
        ("?points=1", "bad_parameter", "points: write x,y for each"),
        ("?points=1,nan", "bad_parameter", "points: write"),
        ("?points=500,1", "bad_parameter", "the point (500, 1) is outside the image"),
        ("?points=1,1&box=0,0,5,5", "bad_parameter", "a box or at points, not both"),
        ("?stride=17", "bad_parameter", "stride: must lie between 1 and 16"),
        ("?stride=0", "bad_parameter", "stride"),
        ("?stride=1", "too_many_features", "these are 21504 features, and at most 1024 are answered at once"),
        ("?cores=8", "bad_parameter", "cores"),
    ],
)
def test_wrong_looks(server: Server, kept: bytes, query: str, reason: str, words: str) -> None:
    status, found, message = problem(look(server, kept, query))
    assert (status, found) == (422, reason)
    assert words in message


@pytest.mark.parametrize("query", ["?share=0", "?share=1.5", "?share=nan", "?cores=65", "?size=8", "?box=0,0,1,1"])
def test_wrong_scans(server: Server, query: str) -> None:
    assert problem(scan(server, query=query))[:2] == (422, "bad_parameter")


def test_photos_that_cannot_be_scanned(server: Server, kept: bytes) -> None:
    assert problem(scan(server, picture(3, 15, 40)))[:2] == (422, "too_small")
    assert problem(scan(server, b"no image"))[:2] == (415, "not_an_image")
    assert problem(look(server, kept, body=PHOTO[:2000]))[:2] == (422, "damaged_image")
    answer = HTTP.post(f"{server.url}/v1/look", content=PHOTO)
    assert problem(answer)[:2] == (422, "missing_scan")


def test_another_image_or_model_is_refused(server: Server, kept: bytes, library: Veca, tmp_path: Path) -> None:
    assert problem(look(server, kept, body=picture(4, 203, 117))) == (
        *(422, "wrong_scan"),
        "the scan was made of another image than the image: their colours differ",
    )
    other = Veca(library.config).eval()
    other.scan(np.asarray(Image.open(io.BytesIO(PHOTO)))).save(tmp_path / "other.scan")
    assert problem(look(server, (tmp_path / "other.scan").read_bytes())) == (
        *(422, "wrong_scan"),
        "the scan was made with other weights than this model's; scan the image again with this one",
    )


def rewritten(file: bytes, header: dict[str, object] | None = None, **tensors: torch.Tensor) -> bytes:
    return save(load(file) | tensors, {"scan": json.dumps(json.loads(header_of(file)) | (header or {}))})


def header_of(file: bytes) -> str:
    return str(json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])["__metadata__"]["scan"])


OTHER = "the scan: not a scan that veca wrote, or damaged"
DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut short": (lambda file: file[:900], OTHER),
    "one byte short": (lambda file: file[:-1], OTHER),
    "other bytes": (lambda file: b"\xff" * 4096, OTHER),
    "three bytes": (lambda file: b"abc", OTHER),
    "an image": (lambda file: PHOTO, OTHER),
    "no header": (lambda file: save(load(file)), OTHER),
    "nested brackets": (lambda file: save(load(file), {"scan": "[" * 50_000}), OTHER),
    "no cores": (lambda file: rewritten(file, {"cores": 0}), OTHER),
    "no tensors": (lambda file: save({}, {"scan": header_of(file)}), OTHER),
    "another dtype": (lambda file: rewritten(file, keys=load(file)["keys"].to(torch.float8_e4m3fn)), OTHER),
    "a mask of floats": (lambda file: rewritten(file, inside=torch.ones(11)), OTHER),
    "a short mask": (lambda file: rewritten(file, inside=torch.ones(3, dtype=torch.uint8)), "its mask does not fit"),
    "a newer format": (lambda file: rewritten(file, {"format": 9}), "the scan has format 9"),
    "a long format": (lambda file: rewritten(file, {"format": "x\n" * 9000}), "the scan has format"),
    "not finite": (lambda file: rewritten(file, keys=load(file)["keys"] * math.nan), "not finite"),
    "other weights": (lambda file: rewritten(file, {"weights": "0" * 64}), "the scan was made with other weights"),
    "another shape": (lambda file: rewritten(file, keys=load(file)["keys"][:1].clone()), "a model of another shape"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_scan_is_one_line(server: Server, kept: bytes, damage: str) -> None:
    change, words = DAMAGES[damage]
    status, reason, message = problem(look(server, change(kept)))
    assert (status, reason) == (422, "wrong_scan")
    assert words in message
    assert len(message) <= 500


def test_a_scan_that_is_too_large_is_not_opened(server: Server, kept: bytes) -> None:
    status, reason, message = problem(look(server, kept + bytes(200_000)))
    assert (status, reason) == (413, "too_many_bytes")
    assert message.startswith("a scan of this model has at most ")


def test_the_largest_scan_of_the_model_is_within_its_bound(library: Veca, tmp_path: Path) -> None:
    photo = np.zeros((256, 1024, 3), np.uint8)
    library.scan(photo, where=np.ones((1, 1))).save(tmp_path / "photo.scan", image="x" * 4096)
    size = (tmp_path / "photo.scan").stat().st_size
    assert size <= largest_scan(library, 1024) <= size + HEADER


def test_scans_are_counted_and_leave_nothing(server: Server, kept: bytes) -> None:
    before = server.open_files()
    assert look(server, kept).status_code == 200
    assert server.metric("veca_held_bytes") == 0
    assert server.metric("veca_queue") == 0
    assert server.open_files() == before
    text = HTTP.get(f"{server.url}/metrics").text
    assert 'veca_requests_total{route="/v1/look",status="200"}' in text
    assert 'veca_requests_total{route="/v1/scan",status="200"}' in text
