"""What is made to harm: it gets its refusal, and everybody else is served."""

from __future__ import annotations

import io
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attack import images
from PIL import Image
from torch import Tensor

from veca import Veca
from veca.model import Layers
from veca.serve.service import Service
from veca.serve.settings import ServeSettings

from .process import HTTP, InThread, Server, head, picture, raw, wait_until

pytestmark = pytest.mark.end_to_end


@pytest.fixture(scope="module")
def hasty(start: Callable[..., Server]) -> Server:
    """Two processes decode, and nobody waits longer than two seconds."""
    return start("--size", "64", "--max-size", "2048", "--threads", "1", "--timeout", "2s", "--client-timeout", "3s")


def children(server: Server) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            if f"PPid:\t{server.process.pid}\n" in status.read_text():
                found.append(int(status.parent.name))
        except OSError:
            continue
    return found


def resident(process: int) -> float:
    try:
        return int(Path(f"/proc/{process}/status").read_text().split("VmRSS:")[1].split()[0]) / 1000
    except (OSError, IndexError):  # it has just ended
        return 0.0


def asks(server: Server, body: bytes, path: str = "/v1/features") -> tuple[int, str]:
    answer = HTTP.post(f"{server.url}{path}", content=body)
    return answer.status_code, "" if answer.status_code == 200 else answer.json()["error"]["reason"]


@pytest.mark.parametrize(
    "bomb", [images.jpeg_of_scans, images.jpeg2000_of_precincts, images.tiff_of_shared_tiles, images.gif_of_comments]
)
def test_bombs_inside_every_bound_are_refused_undecoded(server: Server, bomb: Callable[[], bytes]) -> None:
    body = bomb()
    assert len(body) < 20_000_000
    for path in ("/v1/features", "/v1/explore"):
        assert asks(server, body, path) in [(422, "damaged_image"), (200, "")]
    assert asks(server, picture(0)) == (200, "")


def test_what_takes_too_long_is_ended_and_others_are_served(start: Callable[..., Server]) -> None:
    """As many slow files as there are decoders, and more; a thread would go on with each of them."""
    hasty = start("--size", "64", "--max-size", "2048", "--threads", "1", "--timeout", "400ms")
    slow = images.jpeg_of_scans(scans=50)  # few enough to be tried, and a second or more on any machine
    before = children(hasty)
    with ThreadPoolExecutor(5) as pool:
        answers = [pool.submit(asks, hasty, slow) for _ in range(5)]
        assert {answer.result() for answer in answers} == {(504, "timeout")}
    assert HTTP.get(f"{hasty.url}/healthz").status_code == 200
    wait_until(lambda: asks(hasty, picture(1)) == (200, ""))
    assert children(hasty) != before  # those that decoded were killed, and others took their place
    assert hasty.metric("veca_queue") == 0


def test_a_process_that_dies_is_replaced(hasty: Server) -> None:
    wait_until(lambda: asks(hasty, picture(1)) == (200, ""))
    for child in children(hasty):
        os.kill(child, signal.SIGKILL)
    for seed in range(4):
        assert asks(hasty, picture(seed)) == (200, "")
    assert hasty.log == []


def test_health_is_false_while_the_model_takes_longer_than_anybody_waits(library: Veca) -> None:
    service = Service(library, ServeSettings(timeout=0.01, size=64, threads=1))
    service.engine.start()
    try:
        assert service.alive
        large = np.zeros((16 * 96, 16 * 96, 3), np.uint8)
        answer = service.engine.submit(lambda: service.extractor.compute(large[None], 64), 96 * 96)
        seen = set()
        while not answer.done():
            seen.add(service.alive)
        assert False in seen
        wait_until(lambda: service.alive)
    finally:
        service.stop()


def test_the_end_comes_in_time_whatever_is_being_done(start: Callable[..., Server]) -> None:
    server = start("--size", "64", "--threads", "1", "--timeout", "3s", "--client-timeout", "2s")
    slow = images.jpeg_of_scans(scans=60)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            pool.submit(asks, server, slow)
            pool.submit(asks, server, picture(0), "/v1/explore?size=448")
        wait_until(lambda: server.metric("veca_queue") >= 3)
        family = children(server)
        server.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert server.process.wait(timeout=60) == 0
        assert time.monotonic() - began < 3 + 2 + 1 + 6 + 5
    wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in family))


def test_ordinary_photos_are_decoded_by_the_same_processes(server: Server) -> None:
    before = children(server)
    for seed in range(5):
        assert asks(server, picture(seed)) == (200, "")
    assert children(server) == before


def test_decoding_ends_with_a_service_that_is_killed(start: Callable[..., Server]) -> None:
    server = start("--size", "64", "--threads", "1")
    family = children(server)
    assert family
    server.process.kill()
    server.process.wait(timeout=10)
    wait_until(lambda: not any(alive(child) for child in family))


def alive(process: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


def test_a_page_that_nobody_waits_for_ends_soon_and_keeps_its_place_until_then(library: Veca) -> None:
    began: list[int] = []
    let_go = threading.Event()

    class Held(Veca):
        def forward_layers(self, images: Tensor, cores: int | None = None, **options: Any) -> Layers:
            if threading.current_thread().name.startswith("veca-explore"):
                began.append(cores or 0)
                let_go.wait(60)
            return super().forward_layers(images, cores, **options)

    held = Held(library.config)
    held.load_state_dict(library.state_dict())
    service = InThread(held.eval(), ServeSettings(size=64, threads=1, timeout=3.0, max_size=512))

    def page(seed: int) -> tuple[int, str]:
        return asks(service, picture(seed), "/v1/explore?size=64")

    try:
        assert page(0) == (504, "timeout")
        assert service.service.pages == 1  # it is at its first budget
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(page, range(8))) == {(504, "timeout"), (503, "queue_full")}
        let_go.set()
        wait_until(lambda: service.service.pages == 0)
        assert began == [8]
        service.service.settings.__dict__["timeout"] = 60.0
        assert page(0) == (200, "")
        assert began == [8, 8, 16, 32, 64]
    finally:
        let_go.set()
        service.stop()


def test_photos_of_49_megapixels_leave_the_service_as_small_as_it_was(start: Callable[..., Server]) -> None:
    server = start("--size", "64", "--threads", "1", "--timeout", "3m")
    pixels = np.zeros((7000, 7000, 4), np.uint8)
    pixels[::7, ::5] = 200
    photos = []
    for kind, mode in (("PNG", "RGBA"), ("JPEG", "RGB")):
        file = io.BytesIO()
        Image.fromarray(pixels).convert(mode).save(file, kind, compress_level=1, progressive=True, subsampling=0)
        photos.append(file.getvalue())
    assert asks(server, picture(0)) == (200, "")
    before = server.memory()
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(asks, server, photo) for photo in photos * 2]
        peak = 0.0
        while not all(answer.done() for answer in waiting):
            peak = max(peak, sum(resident(child) for child in children(server)))
            time.sleep(0.02)
    assert {answer.result() for answer in waiting} == {(200, "")}
    assert server.memory() - before < 150
    assert peak < 1100  # one at a time
    assert sum(resident(child) for child in children(server)) < 250  # and it is given back


def test_a_client_that_closes_its_side_gets_its_answer(server: Server) -> None:
    body = picture(3)
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
        connection.sendall(head("/v1/features", len(body)) + body)
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    last = answer.split(b"HTTP/1.1 ")[-1]
    assert last.startswith(b"200 OK")
    assert last.endswith(b"}")


def test_a_body_that_goes_wrong_is_refused_once(start: Callable[..., Server]) -> None:
    """The request is in hand when its chunks turn out to be none: one answer, and nothing in the log."""
    server = start("--size", "64", "--threads", "1")
    for _ in range(5):
        answer = raw(server.port, head("/v1/features", None) + b"5\r\nhello\r\nnonsense\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400")
        assert answer.count(b"HTTP/1.1") == 1
    assert asks(server, picture(0)) == (200, "")
    assert server.log == []


def test_a_slash_too_many_is_not_found(server: Server) -> None:
    """A redirect would name whatever Host the client sent."""
    request = head("/v1/features/", 0, "Connection: close").replace(b"Host: localhost", b"Host: evil.example")
    answer = raw(server.port, request)
    assert answer.startswith(b"HTTP/1.1 404")
    assert b"evil.example" not in answer
