"""One round of each kind of attack: a case is a seed, and either it is answered as promised or it is a failure.

What counts as a failure: an exception that is no InputError, a message of more than one line, a process that dies or
takes longer than PATIENCE, an answer that is none, a service that no longer serves others.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from serve.process import HTTP, Server, picture

import veca
from veca.cli import main
from veca.config import VecaConfig
from veca.large.picture import open_strips
from veca.serve.problems import Problem
from veca.serve.workers import Workers

from .commands import wrong_command
from .images import hostile_image
from .large import hostile_large
from .requests import hostile_request
from .weights import configuration, hostile_weights, whole_safetensors

PATIENCE = 30.0  # seconds for one case, on a busy machine

Case = Callable[[int], str]  # of a seed: "" where the input was taken, or the words it was refused with
Round = Callable[[Path], "contextlib.AbstractContextManager[Case]"]


class Failure(Exception):
    """Something was not as promised."""


def one_line(error: veca.InputError) -> str:
    if len(str(error).splitlines()) != 1:
        raise Failure(f"a message of {len(str(error).splitlines())} lines: {str(error)[:200]!r}")
    return str(error)


@contextlib.contextmanager
def images(_: Path) -> Iterator[Case]:
    """In the processes of the service, which end what takes too long or too much."""
    workers = Workers(1, 16, 50_000_000, 4 << 20)

    def case(seed: int) -> str:
        try:
            workers.picture(hostile_image(seed), 64, "image", PATIENCE)
            return ""
        except Problem as problem:
            if problem.status == 504 or "ended the process" in problem.message or "\n" in problem.message:
                raise Failure(problem.message) from None
            return problem.message

    try:
        yield case
    finally:
        workers.stop()


@contextlib.contextmanager
def weights(folder: Path) -> Iterator[Case]:
    whole = whole_safetensors(folder / "whole")

    def case(seed: int) -> str:
        suffix, data = hostile_weights(seed, whole)
        path = folder / f"hostile{suffix}"
        path.write_bytes(data)
        try:
            model = veca.load(path)
        except veca.InputError as error:
            return one_line(error)
        if not all(bool(parameter.isfinite().all()) for parameter in model.parameters()):
            raise Failure("weights that are not finite were loaded")
        return ""

    yield case


@contextlib.contextmanager
def configurations(folder: Path) -> Iterator[Case]:
    whole_safetensors(folder / "model")
    path = folder / "model/config.json"

    def case(seed: int) -> str:
        values = configuration(seed)
        try:
            VecaConfig.from_dict(values)  # type: ignore[arg-type]
            path.write_text(json.dumps({"model_type": "veca", **values}))  # type: ignore[dict-item]
            return ""
        except veca.InputError as error:
            return one_line(error)

    yield case


@contextlib.contextmanager
def large(folder: Path) -> Iterator[Case]:
    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # as the command does

    def case(seed: int) -> str:
        suffix, data = hostile_large(seed)
        path = folder / f"hostile{suffix}"
        path.write_bytes(data)
        try:
            with open_strips(path, 16) as strips:
                for top in range(0, strips.height, 16):
                    strips.read(top, top + 16)
            return ""
        except veca.InputError as error:
            return one_line(error)

    yield case


@contextlib.contextmanager
def commands(_: Path) -> Iterator[Case]:
    def case(seed: int) -> str:
        words, out, err = wrong_command(seed), io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(words)
        if status != 2 or out.getvalue() or len(err.getvalue().splitlines()) != 1:
            raise Failure(f"{words!r:.300} ended with {status}: {out.getvalue()[:200]!r} {err.getvalue()[:300]!r}")
        return err.getvalue().strip()

    yield case


@contextlib.contextmanager
def requests(folder: Path) -> Iterator[Case]:
    """At a real service; after each, another client asks for something ordinary."""
    whole_safetensors(folder / "model")
    server = Server(folder / "model", "--size", "64", "--max-size", "256", "--client-timeout", "2s", "--timeout", "20s")

    def case(seed: int) -> str:
        answer = b""
        connection = socket.create_connection(("127.0.0.1", server.port), PATIENCE)
        with connection, contextlib.suppress(ConnectionError):  # it may hang up on what it has refused
            connection.sendall(hostile_request(seed))
            connection.shutdown(socket.SHUT_WR)
            while chunk := connection.recv(65536):
                answer += chunk
        status = answer.split(b"HTTP/1.1 ")[-1][:3].decode("latin-1")
        if answer and (not status.isdecimal() or (status >= "500" and status not in ("503",))):
            raise Failure(f"the answer begins {answer[:200]!r}")
        other = HTTP.post(f"{server.url}/v1/features", content=picture(seed % 5))
        if other.status_code != 200 or HTTP.get(f"{server.url}/healthz").status_code != 200:
            raise Failure(f"another client got {other.status_code} {other.text[:200]}")
        if server.process.poll() is not None or any("Traceback" in line for line in server.log):
            log = "".join(server.log)
            server.log.clear()
            raise Failure(f"the service failed: {log[-300:]}")
        return "" if status == "200" else f"{status or 'hung up'}"

    try:
        yield case
        if server.stop() != 0:
            raise Failure("the service did not end in peace")
    finally:
        server.process.kill()


ROUNDS: dict[str, Round] = {
    "images": images,
    "weights": weights,
    "configurations": configurations,
    "large": large,
    "commands": commands,
    "requests": requests,
}


def attempt(case: Case, seed: int) -> tuple[str, str]:
    """("taken", "refused" or "failed", and how)."""
    began = time.monotonic()
    try:
        words = case(seed)
    except Exception as error:
        return "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if time.monotonic() - began > PATIENCE:
        return "failed", f"it took {time.monotonic() - began:.0f} s"
    return ("refused", words) if words else ("taken", "")
