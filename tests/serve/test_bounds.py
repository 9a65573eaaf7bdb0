"""Each bound of the service, reached on purpose, one at a time."""

from __future__ import annotations

import json
import select
import socket
import struct
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import veca
from veca.cli import main
from veca.serve.settings import ServeSettings

from .process import HTTP, InThread, Server, head, picture, raw, wait_until

AUTHORISED = {"Authorization": "Bearer open-sesame"}


@pytest.fixture(scope="module")
def tight(start: Callable[..., Server]) -> Server:
    """Small bounds, a token, and a short patience with clients."""
    return start(
        *("--size", "64", "--max-size", "256", "--threads", "1", "--client-timeout", "2s", "--connections", "24"),
        *("--max-bytes", "200kB", "--max-pixels", "1000000"),
        token="open-sesame",
    )


@pytest.fixture
def held(library: veca.Veca) -> Iterator[InThread]:
    """The model is held by somebody else, so that a request ends only by its own time limit."""
    service = InThread(library, ServeSettings(size=64, threads=1, timeout=3.0, queue=3))
    service.engine.submit(service.let_go.wait, 16)
    yield service
    service.let_go.set()
    service.stop()


def bomb(side: int) -> bytes:
    """A PNG of black pixels: a few kilobytes that decode to side² bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    pixels = zlib.compress(bytes(side * (side + 1)), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def reason(answer: bytes) -> tuple[int, str]:
    start_line, _, rest = answer.partition(b"\r\n")
    body = rest.split(b"\r\n\r\n", 1)[1]
    return int(start_line.split()[1]), json.loads(body)["error"]["reason"]


def refusal(server: Server, body: bytes) -> tuple[int, str]:
    answer = HTTP.post(f"{server.url}/v1/features", content=body, headers=AUTHORISED)
    return answer.status_code, answer.json()["error"]["reason"]


def test_the_token_is_asked_for(tight: Server) -> None:
    url = f"{tight.url}/v1/features"
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic open-sesame"}):
        answer = HTTP.post(url, content=picture(0), headers=headers)
        assert (answer.status_code, answer.json()["error"]["reason"]) == (401, "unauthorised")
        assert answer.headers["www-authenticate"] == "Bearer"
    assert HTTP.post(url, content=picture(0), headers=AUTHORISED).status_code == 200
    for path in ("/metrics", "/v1/scan", "/v1/look"):
        assert HTTP.request("GET" if path == "/metrics" else "POST", f"{tight.url}{path}").status_code == 401
    assert HTTP.get(f"{tight.url}/healthz").status_code == 200


def test_an_oversized_upload_is_refused_and_the_client_hears_it(tight: Server) -> None:
    assert refusal(tight, bytes(300_000)) == (413, "too_many_bytes")
    assert refusal(tight, bytes(5_000_000)) == (413, "too_many_bytes")  # far more than fits in any socket's buffer
    chunks = b"".join(b"%x\r\n%s\r\n" % (50_000, bytes(50_000)) for _ in range(10)) + b"0\r\n\r\n"
    lines = ("Authorization: Bearer open-sesame", "Connection: close")  # no length is declared
    assert reason(raw(tight.port, head("/v1/features", None, *lines) + chunks)) == (413, "too_many_bytes")


def test_an_announced_upload_is_refused_before_it_is_sent(tight: Server) -> None:
    lines = ("Authorization: Bearer open-sesame", "Expect: 100-continue")
    with socket.create_connection(("127.0.0.1", tight.port), 60) as connection:
        connection.sendall(head("/v1/features", 10**9, *lines))
        assert connection.recv(65536).startswith(b"HTTP/1.1 413")


def test_pixels_are_counted_before_they_are_decoded(tight: Server) -> None:
    before = tight.memory()
    whole = bomb(12_000)  # 144 MB decoded, 432 MB as RGB
    assert len(whole) < 200_000
    for _ in range(5):
        assert refusal(tight, whole) == (413, "too_many_pixels")
    assert tight.memory() - before < 50
    assert HTTP.post(f"{tight.url}/v1/features", content=bomb(900), headers=AUTHORISED).status_code == 200


def test_slow_clients_are_cut_off_while_others_are_served(tight: Server) -> None:
    body = picture(1)
    slow_head = head("/v1/features", len(body), "Authorization: Bearer open-sesame")

    def one_byte_a_second(start: bytes, rest: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", tight.port), 60) as connection:
            connection.sendall(start)
            connection.settimeout(1)
            received = b""
            for index in range(60):
                try:
                    received += connection.recv(65536)
                    if received.endswith(b"}"):
                        return received
                except TimeoutError:
                    connection.sendall(rest[index : index + 1])
        raise AssertionError("a slow client was not cut off in a minute")

    with ThreadPoolExecutor(12) as pool:
        in_body = [pool.submit(one_byte_a_second, slow_head, body) for _ in range(6)]
        in_head = [pool.submit(one_byte_a_second, b"POST /v1/fea", slow_head[12:]) for _ in range(6)]
        served = 0
        while not all(future.done() for future in in_body + in_head):
            answer = HTTP.post(f"{tight.url}/v1/features", content=body, headers=AUTHORISED)
            assert answer.status_code == 200
            served += 1
        assert served > 0
        assert {reason(future.result()) for future in in_body} == {(408, "slow_upload")}
        assert {reason(future.result()) for future in in_head} == {(408, "slow_request")}


def test_a_client_that_does_not_read_is_cut_off(tight: Server) -> None:
    body = picture(2)
    request = head("/v1/features?dense=true&size=256", len(body), "Authorization: Bearer open-sesame") + body
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", tight.port))
        connection.sendall(request * 60)  # asks and asks and never reads: 14 MB are more than the sockets hold
        watch = select.poll()
        watch.register(connection, 0)
        assert watch.poll(60_000), "still connected after a minute"


def test_connections_are_counted(tight: Server) -> None:
    others = [socket.create_connection(("127.0.0.1", tight.port), 60) for _ in range(40)]
    try:
        answers = []
        for connection in others:
            connection.settimeout(30)
            answers.append(connection.recv(65536))  # refused at once, or as too slow after the client's time
        statuses = [reason(answer) for answer in answers]
        assert (503, "too_many_connections") in statuses
        assert set(statuses) == {(503, "too_many_connections"), (408, "slow_request")}
    finally:
        for connection in others:
            connection.close()
    wait_until(lambda: HTTP.get(f"{tight.url}/healthz").status_code == 200)


def test_what_is_not_http_gets_json_too(tight: Server) -> None:
    assert reason(raw(tight.port, b"\x16\x03\x01 hello\r\n\r\n")) == (400, "bad_http")
    assert reason(raw(tight.port, b"GET /" + b"a" * 100_000)) == (400, "bad_http")


def test_time_and_queue_are_bounded_and_given_up_requests_cost_nothing(held: InThread) -> None:
    def ask(seed: int) -> tuple[int, str, str | None]:
        answer = HTTP.post(f"{held.url}/v1/features", content=picture(seed))
        return answer.status_code, answer.json()["error"]["reason"], answer.headers.get("retry-after")

    ran = held.metric("veca_model_seconds_count")
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    assert set(answers) == {(504, "timeout", "1"), (503, "queue_full", "1")}
    assert answers.count((504, "timeout", "1")) >= 3
    with socket.create_connection(("127.0.0.1", held.port), 60) as connection:
        connection.sendall(head("/v1/features", len(picture(9))) + picture(9))
        wait_until(lambda: held.metric("veca_queue") == 1)
    wait_until(lambda: held.metric("veca_queue") == 0)  # the client left, and its place is free
    text = HTTP.get(f"{held.url}/metrics").text
    assert 'veca_rejected_total{reason="client_gone"} 1.0' in text
    assert held.metric("veca_model_seconds_count") == ran  # the model was not asked
    assert HTTP.get(f"{held.url}/healthz").status_code == 503  # it hangs for longer than anybody waits
    held.let_go.set()
    wait_until(lambda: HTTP.get(f"{held.url}/readyz").status_code == 200)


def test_mistakes_of_the_operator_are_one_line(
    model_folder: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in [
        (["--model", "nowhere", "--port", "0"], "no model at 'nowhere'"),
        (["--model", str(model_folder), "--port", str(server.port)], "cannot listen at 127.0.0.1"),
        (["--model", str(model_folder), "--port", "0", "--cores", "65"], "--cores must lie between 1 and 64"),
        (["--size", "2000"], "--size 2000 is over --max-size 1024"),
        (["--queue", "0"], "--queue must be at least 1"),
        (["--min-size", "64"], "an elastic service needs --slo and --min-size"),
        (["--slo", "500ms"], "an elastic service needs --slo and --min-size"),
        (["--token-file", "nowhere"], "--token-file nowhere cannot be read"),
    ]:
        assert main(["serve", *arguments]) == 2
        printed = capsys.readouterr().err
        assert message in printed
        assert len(printed.strip().splitlines()) == 1, printed


def test_help_states_every_bound(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    printed = capsys.readouterr().out
    for name in ("max-bytes", "max-pixels", "queue", "timeout", "client-timeout", "connections", "threads", "decoders"):
        assert f"--{name}" in printed
    for name in ("slo", "min-size", "host", "port", "token-file", "max-size"):
        assert f"--{name}" in printed
