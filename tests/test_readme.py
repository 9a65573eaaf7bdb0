"""The README keeps its promises: every file of the package is listed, every page and picture it links to is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_file_of_the_package_is_listed() -> None:
    for path in (ROOT / "veca").rglob("*.py"):
        name = path.relative_to(ROOT / "veca").as_posix()
        if name in ("__init__.py", "_version.py"):
            continue
        assert f"`{name.removesuffix('__init__.py')}`" in README, name


def test_every_file_listed_is_there() -> None:
    for name in re.findall(r"^\| \**`([\w./-]+)`", README, flags=re.MULTILINE):
        assert (ROOT / "veca" / name).exists(), name


def test_links_of_the_pages_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
            if not target.startswith(("http://", "https://")):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
