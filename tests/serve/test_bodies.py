"""Forms and the bytes held, without a process: any bytes at all give images or a reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veca.serve.bodies import images_of
from veca.serve.memory import Memory, Share
from veca.serve.metrics import Metrics
from veca.serve.problems import Problem

NAMES = ("image", "other")
HEADERS = st.text(st.characters(max_codepoint=255), max_size=80)
FORM = "multipart/form-data; boundary=x"


def field(name: str, content: bytes) -> bytes:
    return b'--x\r\nContent-Disposition: form-data; name="%s"; filename="a"\r\n\r\n%s\r\n' % (name.encode(), content)


@given(st.dictionaries(st.sampled_from(NAMES), st.binary(min_size=1), min_size=1))
def test_a_form_gives_back_what_went_in(parts: dict[str, bytes]) -> None:
    if any(b"\r\n--x" in part for part in parts.values()):
        return
    body = b"".join(field(name, part) for name, part in parts.items()) + b"--x--\r\n"
    if "image" in parts:
        assert images_of(body, FORM, NAMES) == parts
    else:
        with pytest.raises(Problem, match="no image"):
            images_of(body, FORM, NAMES)


def test_a_boundary_that_is_too_long_is_a_damaged_form() -> None:
    with pytest.raises(Problem, match="the form is damaged") as caught:
        images_of(b"", f"multipart/form-data; boundary={300 * 'x'}", NAMES)
    assert caught.value.status == 400


@given(st.binary(max_size=300) | st.binary(max_size=300).map(lambda data: field("image", data)), HEADERS)
def test_any_bytes_give_images_or_a_reason(body: bytes, kind: str) -> None:
    for content_type in (FORM, kind, f"multipart/form-data; {kind}", f"multipart/form-data; boundary={kind}"):
        try:
            status = 200 if images_of(body, content_type, NAMES)["image"] else 0
        except Problem as problem:
            status = problem.status
        assert status in (200, 400, 422)


def test_too_many_fields_are_refused() -> None:
    with pytest.raises(Problem, match="at most 8 fields"):
        images_of(field("image", b"a") * 9 + b"--x--\r\n", FORM, NAMES)


def test_memory_is_shared_and_given_back() -> None:
    memory = Memory(100, Metrics())
    with memory.share() as first, memory.share() as second:
        first.hold(60)
        second.hold(40)
        with pytest.raises(Problem, match="too many bytes"):
            second.hold(41)
        assert memory.held == 100
        first.hold(10)
        second.hold(90)
    assert memory.held == 0
    Share(memory).hold(100)
