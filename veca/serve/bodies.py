"""Reading what a client sends: never more bytes than allowed, never longer than allowed, never to a file.

An image comes as the plain body of the request, or as a field of multipart/form-data.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from veca.serve.memory import Share
from veca.serve.problems import ClientGone, Problem

MAX_PARTS = 8


async def read_body(request: Request, share: Share, limit: int, seconds: float) -> bytearray:
    """The whole body; 413 as soon as it is too long, 408 when it takes too long."""
    deadline = time.monotonic() + seconds
    body = bytearray()
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise too_long(limit)
    stream = request.stream().__aiter__()
    while True:
        try:
            chunk = await asyncio.wait_for(stream.__anext__(), max(0.0, deadline - time.monotonic()))
        except StopAsyncIteration:
            return body
        except ClientDisconnect:
            raise ClientGone from None
        except asyncio.TimeoutError:
            message = f"the upload took longer than {seconds:g} s"
            raise Problem(408, "slow_upload", message) from None
        if len(body) + len(chunk) > limit:
            raise too_long(limit)
        share.hold(len(body) + len(chunk))
        body += chunk


def too_long(limit: int) -> Problem:
    return Problem(413, "too_many_bytes", f"an upload may have at most {limit} bytes")


def images_of(body: bytes | bytearray, content_type: str, names: tuple[str, ...]) -> dict[str, bytes]:
    """The uploaded files by field name; a plain body is the first of `names`."""
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        parts: Mapping[str, bytes] = {names[0]: bytes(body)}
    else:
        boundary = options.get(b"boundary", b"")
        if not boundary:
            raise Problem(400, "bad_form", "the Content-Type of the form names no boundary")
        parts = parse_form(body, boundary)
        for name in parts:
            if name not in names:
                hint = " (size, cores and the like belong in the address, after a question mark)"
                raise Problem(422, "unknown_field", f"no form field is called {name[:40]!r}; there are {names}{hint}")
    images = {name: part for name, part in parts.items() if part}
    if names[0] not in images:
        raise Problem(422, "missing_image", f"no image: send a file as the body, or as the form field {names[0]!r}")
    return images


def parse_form(body: bytes | bytearray, boundary: bytes) -> dict[str, bytes]:
    """The parts of a form by name, whole in memory; the parser of web frameworks would spill to temporary files."""
    parts: list[tuple[bytearray, bytearray]] = []  # disposition, content
    field, value = bytearray(), bytearray()
    ended = False

    def begin() -> None:
        if len(parts) == MAX_PARTS:
            raise Problem(422, "unknown_field", f"a form may have at most {MAX_PARTS} fields")
        parts.append((bytearray(), bytearray()))

    def header_end() -> None:
        if field.lower() == b"content-disposition":
            parts[-1][0][:] = value
        field.clear()
        value.clear()

    def end() -> None:
        nonlocal ended
        ended = True

    try:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": begin,
                "on_part_data": lambda data, start, stop: parts[-1][1].extend(memoryview(data)[start:stop]),
                "on_header_field": lambda data, start, stop: field.extend(data[start:stop]),
                "on_header_value": lambda data, start, stop: value.extend(data[start:stop]),
                "on_header_end": header_end,
                "on_end": end,
            },
        )
        parser.write(bytes(body))
        parser.finalize()
    except FormParserError:
        raise Problem(400, "bad_form", "the form is damaged") from None
    if not ended:
        raise Problem(400, "bad_form", "the form ends too early")
    found: dict[str, bytes] = {}
    for disposition, content in parts:
        name = parse_options_header(bytes(disposition))[1].get(b"name")
        if name is None:
            raise Problem(400, "bad_form", "a field of the form has no name")
        found[name.decode("utf-8", "replace")] = bytes(content)
    return found
