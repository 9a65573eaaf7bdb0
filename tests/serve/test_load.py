"""Many requests at once: hostile ones among them, more than the service can do, and a SIGTERM in the middle."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

import veca
from veca.serve.elastic import ladder

from .process import HTTP, Server, expected, head, picture, raw
from .test_bounds import bomb, wait_until

pytestmark = pytest.mark.end_to_end

AUTHORISED = {"Authorization": "Bearer open-sesame"}
SEND = "Authorization: Bearer open-sesame"


def test_two_thousand_requests_a_tenth_of_them_hostile(
    start: Callable[..., Server], library: veca.Veca, tmp_path: Path
) -> None:
    server = start(
        *("--size", "48", "--max-size", "128", "--threads", "1", "--client-timeout", "3s"),
        *("--max-bytes", "100kB", "--max-pixels", "250000"),
        token="open-sesame",
        cwd=tmp_path,
    )
    url = f"{server.url}/v1/features"
    good = [picture(seed, *shape) for seed, shape in enumerate([(64, 48), (48, 64), (80, 80), (96, 48)])]
    features = [expected(library, body, 48, 16).cls[0].numpy() for body in good]
    large, huge = picture(99, 700, 700), bomb(9000)
    outcomes: Counter[str] = Counter()

    def honest(index: int, client: httpx.Client) -> str:
        body = good[index % 4]
        answer = client.post(f"{url}?cores=16", content=body, headers=AUTHORISED)
        assert answer.status_code == 200, answer.text
        np.testing.assert_allclose(answer.json()["cls"], features[index % 4], atol=1e-5)
        return "features"

    def refused(client: httpx.Client, status: int, content: bytes, query: str = "", **headers: str) -> str:
        answer = client.post(url + query, content=content, headers={**AUTHORISED, **headers})
        assert answer.status_code == status, (status, answer.status_code, answer.text)
        assert set(answer.json()["error"]) == {"reason", "message"}
        return answer.json()["error"]["reason"]

    def leave(send: bytes) -> str:
        with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
            connection.sendall(send)
        return "left"

    def slow() -> str:
        body = good[0]
        with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
            connection.sendall(head("/v1/features", len(body), SEND))
            connection.settimeout(1)
            for index in range(30):
                try:
                    answer = connection.recv(65536)
                    assert answer.startswith(b"HTTP/1.1 408"), answer
                    return "slow_upload"
                except TimeoutError:
                    connection.sendall(body[index : index + 1])
        raise AssertionError("a slow client was not cut off")

    hostile: list[Callable[[httpx.Client], str]] = [
        lambda client: refused(client, 413, bytes(150_000)),
        lambda client: refused(client, 415, b"this is no image"),
        lambda client: refused(client, 422, good[0][:-200]),
        lambda client: refused(client, 413, huge),
        lambda client: refused(client, 413, large[:50_000]),
        lambda client: refused(client, 422, good[0], "?size=banana"),
        lambda client: refused(client, 422, good[0], "?cores=1000"),
        lambda client: refused(client, 401, good[0], Authorization="Bearer guess"),
        lambda client: refused(client, 400, b"--x\r\n" * 1000, **{"Content-Type": "multipart/form-data; boundary=x"}),
        lambda client: leave(head("/v1/features", 50_000, SEND) + bytes(1000)),
        lambda client: leave(head("/v1/features", len(good[0]), SEND) + good[0]),
        lambda client: "bad_http" if b"bad_http" in raw(server.port, b"\x00\xff\r\n\r\n") else "nothing",
    ]
    order = list(range(2000))
    random.Random(0).shuffle(order)
    memory: list[float] = []
    lock = threading.Lock()

    def run(position: int) -> None:
        index = order[position]
        if position in (500, 1999):
            memory.append(server.memory())
        client = clients[position % len(clients)]
        outcome = honest(index, client) if index >= 190 else hostile[index % len(hostile)](client)
        with lock:
            outcomes[outcome] += 1

    clients = [httpx.Client(timeout=60) for _ in range(4)]
    with ThreadPoolExecutor(10) as slow_pool, ThreadPoolExecutor(8) as pool:
        slow_ones = [slow_pool.submit(slow) for _ in range(10)]  # with them 2,010 requests, 200 of them hostile
        list(pool.map(run, range(2000)))
        outcomes.update(future.result() for future in slow_ones)
    for client in clients:
        client.close()

    print(f"resident MB after 500 and 2,000 requests: {memory}; {dict(outcomes)}")
    assert outcomes["features"] == 1810
    assert outcomes["slow_upload"] == 10
    assert outcomes["nothing"] == 0
    assert {"too_many_bytes", "too_many_pixels", "not_an_image", "damaged_image", "unauthorised"} <= set(outcomes)
    assert memory[1] - memory[0] < 80, memory  # megabytes
    wait_until(lambda: server.metric("veca_queue", AUTHORISED) == 0)
    wait_until(lambda: server.metric("veca_held_bytes", AUTHORISED) == 0)
    wait_until(lambda: server.metric("veca_connections", AUTHORISED) <= 2)
    assert HTTP.get(f"{server.url}/healthz").json() == {"alive": True}
    assert honest(0, HTTP) == "features"
    assert server.open_files() == []
    assert list(tmp_path.iterdir()) == []
    assert server.stop() == 0
    assert "Traceback" not in "".join(server.log)


def test_sigterm_loses_no_accepted_request(start: Callable[..., Server], library: veca.Veca) -> None:
    server = start("--size", "1024", "--threads", "1", "--timeout", "5m")
    bodies = [picture(seed) for seed in range(8)]
    late = picture(8)

    def ask(body: bytes) -> httpx.Response:
        return httpx.post(f"{server.url}/v1/features", content=body, timeout=60)

    with ThreadPoolExecutor(8) as pool, socket.create_connection(("127.0.0.1", server.port), 60) as uploading:
        answers = [pool.submit(ask, body) for body in bodies]
        uploading.sendall(head("/v1/features", len(late), "Connection: close") + late[:100])
        wait_until(lambda: server.metric("veca_queue") >= 4)
        server.process.terminate()
        wait_until(lambda: refuses(server.port))
        uploading.sendall(late[100:])  # accepted before the signal, so it is answered
        rest = b"".join(iter(lambda: uploading.recv(65536), b""))
        assert rest.startswith(b"HTTP/1.1 200"), rest[:200]
        for body, future in zip(bodies, answers, strict=True):
            assert future.result().status_code == 200
            wanted = expected(library, body, 1024, 64).cls[0]
            np.testing.assert_allclose(future.result().json()["cls"], wanted, atol=1e-5)
    assert server.process.wait(timeout=60) == 0
    assert "Traceback" not in "".join(server.log)


def refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except ConnectionRefusedError:
        return True
    return False


def test_under_load_patches_and_size_fall_and_rise_again(start: Callable[..., Server], library: veca.Veca) -> None:
    server = start(
        *("--size", "1024", "--threads", "1", "--queue", "128", "--timeout", "5m", "--slo", "1s", "--min-size", "512"),
        *("--max-held", "1GB"),  # 64 waiting pictures of 1024² are 200 MB
    )
    body = picture(1)
    url = f"{server.url}/v1/features"

    def ask(index: int) -> httpx.Response:
        own = "?size=320&cores=40" if index % 16 == 15 else ""
        return clients[index % 4].post(url + own, content=body)

    clients = [httpx.Client(timeout=300) for _ in range(4)]
    with ThreadPoolExecutor(64) as pool:
        asked = [pool.submit(ask, index) for index in range(96)]
        health = [0, 0]  # asked, and asked while the model was at work
        while not all(future.done() for future in asked):
            assert HTTP.get(f"{server.url}/healthz").status_code == 200
            health[0] += 1
            health[1] += server.metric("veca_queue") > 0
        answers = [future.result() for future in asked]
    assert health[1] > 5, health
    assert {answer.status_code for answer in answers} == {200}, {answer.text[:200] for answer in answers}
    used = [tuple(answer.json()[name] for name in ("size", "spent", "cores")) for answer in answers]
    own, ours = used[15::16], [item for index, item in enumerate(used) if index % 16 != 15]
    assert set(own) == {(320, 1.0, 40)}
    assert {(size, spent, 64) for size, spent in ladder(1024, 512, library.patch_size)} >= set(ours)
    assert min(spent for _, spent, _ in ours) == 0.5
    for answer, (size, spent, cores) in zip(answers[::12], used[::12], strict=True):
        said = [answer.headers[f"x-veca-{name}"] for name in ("size", "patches", "cores")]
        assert said == [str(size), f"{spent:g}", str(cores)]
        out = library(library.preprocess(body, size), cores=cores, patches=spent)
        np.testing.assert_allclose(answer.json()["cls"], out.cls[0].detach(), atol=1e-5)
    lowest = min((index for index in range(96) if index % 16 != 15), key=lambda index: used[index])
    assert answers[lowest].json()["lowered"] is True

    def recovered() -> bool:
        time.sleep(0.3)
        answer = HTTP.post(url, content=body).json()
        return (answer["size"], answer["spent"], answer["lowered"]) == (1024, 1.0, False)

    wait_until(recovered)
