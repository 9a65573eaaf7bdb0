"""docs/architecture.md lists every file of the package with its job, as `python tools/architecture.py` writes it."""

from __future__ import annotations

from pathlib import Path

import architecture
import pytest


def test_the_map_is_the_package_as_it_is() -> None:
    page = architecture.PAGE.read_text(encoding="utf-8")
    assert architecture.package_map() in page, "run: python tools/architecture.py"


@pytest.mark.parametrize(
    ("docstring", "line"),
    [
        ("Files are written whole (docs/x.md).\n\nMore.", "Files are written whole"),
        ("The network's shape: `Config`, and more.", "Network's shape"),
        ("Veca: the forward pass. Top to bottom.", "Veca: the forward pass"),
        ("`veca x`: one thing. And another.", "veca x"),
        ("Words enough for a line, and so many more words that it would be far too long.", "Words enough for a line"),
    ],
)
def test_a_line_is_the_first_clause_of_a_docstring(docstring: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(f'"""{docstring}"""\n', encoding="utf-8")
    assert architecture.summary(tmp_path / "module.py") == line
    (tmp_path / "module.py").write_text(f'class Thing:\n    """{docstring}"""\n', encoding="utf-8")
    assert architecture.summary(tmp_path / "module.py") == line


def test_a_file_without_a_docstring_is_named(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("x = 1\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="say in a docstring"):
        architecture.summary(tmp_path / "module.py")
