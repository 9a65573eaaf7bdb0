"""The README fits a screen or two and keeps its promises: every page and picture it links to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_it_is_short() -> None:
    assert (ROOT / "README.md").stat().st_size <= 8192


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_links_lead_somewhere(name: str) -> None:
    """Those of docs/ are checked on the site (tests/docs/test_site.py)."""
    for target in re.findall(r"\]\(([^)#\s]+)", (ROOT / name).read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://")):
            assert (ROOT / target).exists(), f"{name} links to {target}"


def test_the_picture_is_light() -> None:
    for target in re.findall(r"!\[[^]]*\]\(([^)#\s]+)", (ROOT / "README.md").read_text(encoding="utf-8")):
        assert (ROOT / target).stat().st_size < 300_000, target
