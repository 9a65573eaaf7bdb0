"""What the routes answer, asked of the real process."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

import veca
from veca.analysis.similarity import cosine_map

from .process import HTTP, Server, expected, picture

SHAPES = [(160, 120), (120, 160), (100, 100), (300, 90), (333, 217)]


def post(server: Server, path: str, body: bytes | None = None, **options: object) -> httpx.Response:
    return HTTP.post(f"{server.url}{path}", content=body, **options)  # type: ignore[arg-type]


def npz(answer: httpx.Response) -> dict[str, np.ndarray]:
    assert answer.status_code == 200, answer.text
    with np.load(io.BytesIO(answer.content), allow_pickle=False) as file:
        return dict(file)


def test_concurrent_clients_of_mixed_sizes_get_the_librarys_features(server: Server, library: veca.Veca) -> None:
    asked = [
        (
            picture(index, *SHAPES[index % 5], kind=("PNG", "JPEG", "WEBP")[index % 3]),
            (64, 128)[index % 2],
            (8, 40)[index % 2],
        )
        for index in range(60)
    ]

    def ask(item: tuple[bytes, int, int]) -> httpx.Response:
        body, size, cores = item
        return post(server, f"/v1/features?size={size}&cores={cores}&dense=true&format=npz", body)

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, asked))
    for (body, size, cores), answer in zip(asked, answers, strict=True):
        out, got = expected(library, body, size, cores), npz(answer)
        np.testing.assert_allclose(got["cls"], out.cls[0], atol=1e-5)
        np.testing.assert_allclose(got["patches"].reshape(out.patches[0].shape), out.patches[0], atol=1e-5)
        assert (got["size"], got["cores"], tuple(got["grid"])) == (size, cores, out.grid)


def test_json_says_what_was_used(server: Server, library: veca.Veca) -> None:
    body = picture(1, 200, 100)
    answer = post(server, "/v1/features?dense=true", body)
    values = answer.json()
    out = expected(library, body, 96, 64)
    assert {name: values[name] for name in ("model", "size", "spent", "cores", "lowered", "grid", "image")} == {
        "model": "little",
        "size": 96,
        "spent": 1.0,
        "cores": 64,
        "lowered": False,
        "grid": [6, 12],
        "image": [200, 100],
    }
    np.testing.assert_allclose(values["cls"], out.cls[0], atol=1e-5)
    np.testing.assert_allclose(np.array(values["patches"]).reshape(72, 64), out.patches[0], atol=1e-5)
    used = [answer.headers[f"x-veca-{name}"] for name in ("model", "size", "patches", "cores", "lowered", "grid")]
    assert used == ["little", "96", "1", "64", "false", "6x12"]
    assert "patches" not in post(server, "/v1/features", body).json()


def test_a_form_is_as_good_as_a_plain_body(server: Server) -> None:
    body = picture(2)
    form = post(server, "/v1/features", files={"image": ("../../etc/passwd", body, "text/plain")})
    assert form.json()["cls"] == pytest.approx(post(server, "/v1/features", body).json()["cls"], abs=1e-5)


def test_a_photo_is_turned_as_its_exif_says(server: Server, library: veca.Veca) -> None:
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    Image.open(io.BytesIO(picture(3, 200, 100))).save(file, "JPEG", exif=exif)
    values = post(server, "/v1/features", file.getvalue()).json()
    assert (values["image"], values["grid"]) == ([100, 200], [12, 6])
    np.testing.assert_allclose(values["cls"], expected(library, file.getvalue(), 96, 64).cls[0], atol=1e-5)


def test_similarity_of_a_point(server: Server, library: veca.Veca) -> None:
    body = picture(4, 160, 120)
    answer = post(server, "/v1/similarity?x=155&y=3&cores=16&format=npz", body)
    out = expected(library, body, 96, 16)
    wanted = cosine_map(out.patches[0][out.grid[1] - 1], out.patches[0]).reshape(out.grid)  # the top right patch
    np.testing.assert_allclose(npz(answer)["map"], wanted, atol=1e-5)
    as_json = post(server, "/v1/similarity?x=155&y=3&cores=16&format=json", body).json()
    np.testing.assert_allclose(as_json["map"], wanted, atol=1e-5)
    assert as_json["high"] == pytest.approx(1.0, abs=1e-5)


def test_similarity_of_two_images(server: Server, library: veca.Veca) -> None:
    bodies = {"image": picture(5, 160, 120), "other": picture(6, 100, 140)}
    files = {name: (name, body) for name, body in bodies.items()}
    first, second = (expected(library, body, 96, 64) for body in bodies.values())
    got = npz(post(server, "/v1/similarity?format=npz", files=files))
    np.testing.assert_allclose(got["map"].ravel(), cosine_map(first.cls[0], second.patches[0]), atol=1e-5)
    assert float(got["global"]) == pytest.approx(float(cosine_map(first.cls[0], second.cls)[0]), abs=1e-5)
    got = npz(post(server, "/v1/similarity?format=npz&x=0&y=0", files=files))
    np.testing.assert_allclose(got["map"].ravel(), cosine_map(first.patches[0][0], second.patches[0]), atol=1e-5)
    assert tuple(got["grid"]) == second.grid


def test_similarity_as_a_picture(server: Server) -> None:
    body = picture(4, 160, 120)
    answer = post(server, "/v1/similarity?x=155&y=3", body)
    assert answer.headers["content-type"] == "image/png"
    image = Image.open(io.BytesIO(answer.content))
    assert image.size == (128, 96)
    shades = np.asarray(image.convert("L")).astype(int)
    values = npz(post(server, "/v1/similarity?x=155&y=3&format=npz", body))["map"]
    low = np.unravel_index(values.argmin(), values.shape)
    assert shades[2, -3] > shades[16 * low[0] + 8, 16 * low[1] + 8] + 100  # the point is light, the least like it dark
    low_high = [float(word) for word in answer.headers["x-veca-range"].split()]
    assert low_high == pytest.approx([values.min(), values.max()], abs=1e-5)


def test_explore_gives_a_whole_page(server: Server) -> None:
    answer = post(server, "/v1/explore?size=64", picture(7))
    assert answer.headers["content-type"].startswith("text/html")
    assert "<!doctype html>" in answer.text[:100].lower()
    assert 'src="http' not in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]


@pytest.mark.end_to_end
def test_a_service_in_bfloat16(start: Callable[..., Server], library: veca.Veca) -> None:
    server = start("--size", "96", "--threads", "1", "--dtype", "bfloat16")
    got = npz(post(server, "/v1/features?dense=true&format=npz", picture(3)))
    out = expected(library, picture(3), 96, 64)
    assert got["patches"].dtype == got["cls"].dtype == np.float32
    ours, exact = torch.from_numpy(got["patches"]).flatten(0, 1), out.patches[0]
    assert not torch.equal(ours, exact)
    assert float(torch.cosine_similarity(ours, exact, dim=-1).mean()) > 0.999
    assert "<!doctype html>" in post(server, "/v1/explore?size=64", picture(7)).text[:100].lower()


@pytest.mark.parametrize(
    ("path", "status", "reason"),
    [
        ("/v1/features?size=banana", 422, "bad_parameter"),
        ("/v1/features?size=0", 422, "bad_parameter"),
        ("/v1/features?size=257", 422, "bad_parameter"),
        ("/v1/features?size=15", 422, "bad_parameter"),
        ("/v1/features?cores=65", 422, "bad_parameter"),
        ("/v1/features?cores=-1", 422, "bad_parameter"),
        ("/v1/features?core=8", 422, "bad_parameter"),
        ("/v1/features?format=pickle", 422, "bad_parameter"),
        ("/v1/similarity?x=1", 422, "bad_parameter"),
        ("/v1/similarity?x=nan&y=1", 422, "bad_parameter"),
        ("/v1/similarity?x=160&y=1", 422, "bad_parameter"),
        ("/v1/similarity", 422, "missing_point"),
        ("/v1/nothing", 404, "not_found"),
        ("/v1/../../etc/passwd", 404, "not_found"),
        ("/%2e%2e/%2e%2e/etc/passwd", 404, "not_found"),
        ("/healthz", 405, "method_not_allowed"),
    ],
)
def test_wrong_requests_are_refused_in_words(server: Server, path: str, status: int, reason: str) -> None:
    answer = post(server, path, picture(8))
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["reason"] == reason
    assert error["message"]
    assert "Traceback" not in answer.text


def test_bodies_that_are_no_image(server: Server) -> None:
    whole = picture(9, 300, 200)
    form = {"content-type": "multipart/form-data; boundary=x"}
    for body, headers, status, reason in [
        (b"", {}, 422, "missing_image"),
        (b"GIF89a but not really", {}, 415, "not_an_image"),
        (json.dumps({"image": "/etc/passwd"}).encode(), {"content-type": "application/json"}, 415, "not_an_image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>", {}, 415, "not_an_image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", {}, 415, "not_an_image"),
        (whole[: len(whole) // 2], {}, 422, "damaged_image"),
        (b"--x\r\n", form, 400, "bad_form"),
        (b"nonsense", form, 400, "bad_form"),
        (b"", {"content-type": "multipart/form-data"}, 400, "bad_form"),
        (b'--x\r\nContent-Disposition: form-data; name="size"\r\n\r\n9\r\n--x--\r\n', form, 422, "unknown_field"),
        (b'--x\r\nContent-Disposition: form-data; name="image"\r\n\r\n\r\n--x--\r\n', form, 422, "missing_image"),
        (b"--x\r\nContent-Disposition: form-data\r\n\r\n9\r\n--x--\r\n", form, 400, "bad_form"),
    ]:
        answer = post(server, "/v1/features", body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["reason"]) == (status, reason), (body[:40], answer.text)


def test_a_thin_strip_is_refused_before_it_is_blown_up(server: Server) -> None:
    answer = post(server, "/v1/features?size=256", picture(10, 4000, 2))
    assert (answer.status_code, answer.json()["error"]["reason"]) == (422, "too_elongated")
    assert post(server, "/v1/features?size=16", picture(10, 400, 10)).status_code == 200


def test_health_and_metrics(server: Server) -> None:
    assert HTTP.get(f"{server.url}/healthz").json() == {"alive": True}
    assert HTTP.get(f"{server.url}/readyz").json() == {"ready": True, "model": "little"}
    post(server, "/v1/features", picture(11))
    post(server, "/v1/features", b"no image")
    families = {
        family.name: family for family in text_string_to_metric_families(HTTP.get(f"{server.url}/metrics").text)
    }
    for name in (
        "requests",
        "rejected",
        "request_seconds",
        "model_seconds",
        "queue",
        "wait_seconds",
        "elastic_size",
        "elastic_patches",
    ):
        assert f"veca_{name}" in families
    counts = {tuple(sample.labels.values()): sample.value for sample in families["veca_requests"].samples}
    assert counts["/v1/features", "200"] >= 1
    reasons = {sample.labels["reason"]: sample.value for sample in families["veca_rejected"].samples}
    assert reasons["not_an_image"] >= 1
    assert families["veca_queue"].samples[0].value == 0  # nobody is left in it


def test_the_description_states_the_bounds_and_needs_no_other_host(server: Server) -> None:
    schema = HTTP.get(f"{server.url}/openapi.json").json()
    size, cores = (
        next(item for item in schema["paths"]["/v1/features"]["post"]["parameters"] if item["name"] == name)
        for name in ("size", "cores")
    )
    assert (size["schema"]["anyOf"][0]["minimum"], size["schema"]["anyOf"][0]["maximum"]) == (16, 256)
    assert cores["schema"]["anyOf"][0]["maximum"] == 64
    for path in ("/", "/docs"):
        page = HTTP.get(f"{server.url}{path}")
        assert page.status_code == 200
        assert "http://" not in page.text
        assert "https://" not in page.text
        assert "{{" not in page.text
