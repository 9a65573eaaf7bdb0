"""Requests that no page of ours sends, and commands that cannot work."""

from __future__ import annotations

import io
import json
import re
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from veca import Veca
from veca.cli import main

from .conftest import HTTP, SIZE, View


def raw(view: View, *lines: str) -> bytes:
    """Send a request as it is written; what comes back until the connection ends."""
    with socket.create_connection(("127.0.0.1", view.port), 30) as connection:
        connection.sendall("\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1"))
        return b"".join(iter(lambda: connection.recv(65536), b""))


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "localhost@evil"])
def test_another_host_is_refused(view: View, host: str) -> None:
    answer = raw(view, f"GET /{view.secret}/ HTTP/1.1", f"Host: {host}")
    assert status(answer) in (400, 421)
    assert b"squares" not in answer


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9000", "[::1]:8400", "LOCALHOST:1"])
def test_this_machine_may_have_any_of_its_names(view: View, host: str) -> None:
    assert status(raw(view, f"GET /{view.secret}/ HTTP/1.1", f"Host: {host}")) == 200


@pytest.mark.parametrize(
    "line",
    [
        "Origin: http://evil.example",
        "Origin: null",
        "Origin: https://127.0.0.1",
        "Sec-Fetch-Site: cross-site",
        "Sec-Fetch-Site: same-site",
    ],
)
def test_another_site_is_refused(view: View, line: str) -> None:
    answer = raw(view, f"GET /{view.secret}/state HTTP/1.1", f"Host: 127.0.0.1:{view.port}", line)
    assert status(answer) == 403
    assert b"squares" not in answer


def test_without_the_secret_there_is_nothing(view: View) -> None:
    root = f"http://127.0.0.1:{view.port}"
    for path in ("/", "/state", "/tile/0/0/0.jpg", f"/{view.secret[:-1]}/state", f"/{view.secret}", "//state"):
        answer = HTTP.get(root + path)
        assert answer.status_code == 404
        assert "squares" not in answer.text


def test_only_named_files_are_served(view: View) -> None:
    for path in ("page.html", "app.py", "..%2fapp.py", "%2e%2e/app.py", "/etc/passwd", "openseadragon.LICENSE.txt"):
        assert view.get(path).status_code == 404
    assert status(raw(view, f"GET /{view.secret}/../../../etc/passwd HTTP/1.1", "Host: localhost")) == 404
    for path in ("", "page.js", "page.css", "words.js", "colours.js", "openseadragon.min.js"):
        assert view.get(path).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_only_get_is_answered(view: View, method: str) -> None:
    assert HTTP.request(method, view.url + "state").status_code == 405


def test_a_body_is_refused(view: View) -> None:
    assert HTTP.request("GET", view.url + "state", content=b"x" * 1000).status_code == 413


BOX = {"x": "0", "y": "0", "width": "100", "height": "100"}


@pytest.mark.parametrize(
    "change",
    [
        {"x": "-1"},
        {"x": "1604"},
        {"width": "0"},
        {"width": "1605"},
        {"width": "9" * 40},
        {"height": "NaN"},
        {"height": "1e3"},
        {"y": "٣"},
        {"y": ""},
        {"y": " 1"},
        {"at": "1"},
        {"at": "nan,1"},
        {"at": "9999,1"},
        {"at": "1,1,1"},
        {"at": "1e2,1"},
        {"level": "0"},
        {"x": ["0", "1"]},
    ],
)
def test_wrong_numbers_are_one_line(view: View, change: dict) -> None:
    answer = view.get("look", params={**BOX, **change})
    assert answer.status_code == 422
    message = answer.json()["error"]
    assert message
    assert "\n" not in message
    assert "Traceback" not in message


def test_missing_numbers_and_levels_that_are_not(view: View) -> None:
    assert view.get("look").status_code == 422
    for path in ("features.npy", "places"):
        assert view.get(path, params={**BOX, "level": "9"}).status_code == 422
        assert view.get(path, params=BOX).status_code == 422


def test_tiles(view: View, pixels: np.ndarray) -> None:
    shown = np.asarray(Image.open(io.BytesIO(view.get("tile/0/3/2.jpg").content)))
    assert shown.shape == (1206 - 1024, 1604 - 1536, 3)
    assert np.abs(shown.astype(int) - pixels[1024:, 1536:]).mean() < 12
    for path in ("tile/0/4/0.jpg", "tile/0/0/3.jpg", "tile/3/0/0.jpg", "tile/0/-1/0.jpg", f"tile/0/{'9' * 400}/0.jpg"):
        assert view.get(path).status_code == 404


def test_every_answer_has_its_headers(view: View) -> None:
    for path in ("", "state", "page.js", "nothing", "look", "tile/0/0/0.jpg"):
        headers = view.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers
        assert "server" not in headers


def test_a_look_tells_its_time_and_covers_its_box(view: View) -> None:
    answer = view.get("look", params={**BOX, "at": "50,50.5"})
    assert float(re.fullmatch(r"look;dur=([0-9.]+)", answer.headers["server-timing"])[1]) > 0
    body = answer.content
    length = int.from_bytes(body[:4], "little")
    table = json.loads(body[4 : 4 + length])
    cells = table["grid"][0] * table["grid"][1]
    assert len(body) == 4 + length + cells * (table["depth"] + 4) + (table["cores"] + 1) * table["depth"]


def test_many_at_once_are_bounded_and_it_lives_on(view: View) -> None:
    found: list[int] = []

    def ask() -> None:
        box = {"x": "0", "y": "0", "width": str(SIZE[0]), "height": str(SIZE[1])}
        found.append(view.get("look", params=box).status_code)

    threads = [threading.Thread(target=ask) for _ in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) <= {200, 503}
    assert 200 in found
    assert view.get("look", params=BOX).status_code == 200


def test_damaged_requests_do_no_harm(view: View) -> None:
    for data in (b"\x00\xff\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20000 + b"\r\n"):
        with socket.create_connection(("127.0.0.1", view.port), 30) as connection:
            try:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(65536)
            except ConnectionError:
                pass
    assert view.get("state").status_code == 200


def test_it_listens_on_loopback_only(view: View) -> None:
    lines = Path("/proc/net/tcp").read_text().splitlines() + Path("/proc/net/tcp6").read_text().splitlines()
    own = [line.split()[1] for line in lines if line.split()[1].endswith(f":{view.port:04X}") and " 0A " in line]
    assert own == [f"0100007F:{view.port:04X}"]


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["view", *map(str, arguments), "--no-open"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("veca view: ")
    assert said.count("\n") == 1
    return said


@pytest.mark.timeout(300)  # what is not refused is served
def test_what_cannot_be_opened_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, image: Path, model_folder: Path, library: Veca
) -> None:
    given = ("--model", model_folder, "--dtype", "float32")
    assert "no such file" in refused(capsys, tmp_path / "none.png", *given)
    assert "folder" in refused(capsys, tmp_path, *given)
    (tmp_path / "text.png").write_text("no image")
    assert "text.png" in refused(capsys, tmp_path / "text.png", *given)
    np.save(tmp_path / "small.npy", np.zeros((8, 8, 3), np.uint8))
    assert "smaller than a patch" in refused(capsys, tmp_path / "small.npy", *given)
    np.save(tmp_path / "thin.npy", np.zeros((16, 300_000, 3), np.uint8))
    assert "long and thin" in refused(capsys, tmp_path / "thin.npy", *given)
    assert "no such file" in refused(capsys, image, "--scan", tmp_path / "none.scan", *given)
    assert "give --scan or those" in refused(capsys, image, "--scan", tmp_path / "none.scan", "--cores", 4, *given)
    other = np.zeros((SIZE[1], SIZE[0], 3), np.uint8)
    library.scan(other).save(tmp_path / "other.scan")
    assert "another image" in refused(capsys, image, "--scan", tmp_path / "other.scan", *given)
    assert "--port" in refused(capsys, image, "--port", 70000, *given)
    assert "cores" in refused(capsys, image, "--cores", 0, *given)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "cannot listen" in refused(capsys, image, "--port", taken.getsockname()[1], *given)


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["view", "--help"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert "Examples:" in said
    assert "--scan" in said
