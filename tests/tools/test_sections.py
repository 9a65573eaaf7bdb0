"""The one writer of generated sections."""

from __future__ import annotations

from pathlib import Path

import pytest
from sections import put_section

from veca.errors import InputError


def test_a_section_of_a_page_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- x:begin -->\nold\n<!-- x:end -->\nafter\n")
    put_section(page, "x", "new")
    assert page.read_text() == "before\n<!-- x:begin -->\nnew\n<!-- x:end -->\nafter\n"
    with pytest.raises(InputError, match="must hold"):
        put_section(page, "y", "new")
    with pytest.raises(InputError, match="cannot read"):
        put_section(tmp_path / "none.md", "x", "new")
