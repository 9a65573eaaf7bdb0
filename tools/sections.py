"""The one writer of generated sections: what stands between two marks of a page of the docs."""

from __future__ import annotations

from pathlib import Path

from veca.errors import InputError
from veca.files import write_text


def put_section(page: Path, name: str, text: str) -> None:
    """Replace what stands between `<!-- NAME:begin -->` and `<!-- NAME:end -->` of a page."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    try:
        content = page.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read the page {page}: {error.strerror}") from error
    if content.count(begin) != 1 or content.count(end) != 1 or content.index(end) < content.index(begin):
        raise InputError(f"{page} must hold the lines {begin} and {end}, once each")
    before, rest = content.split(begin)
    write_text(page, f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")
