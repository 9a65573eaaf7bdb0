"""The site builds without a warning, every link in it leads somewhere, and nothing in it comes from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from .pages import DOCS, PAGES
from .world import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Page(HTMLParser):
    """Links, what the page loads, and the places that can be linked to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        if "id" in values:
            self.places.add(values["id"])
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and values.get("rel") in ("stylesheet", "icon") and "href" in values:
            self.loads.append(values["href"])
        if tag in ("script", "img", "iframe", "source") and "src" in values:
            self.loads.append(values["src"])


def pages(site: Path) -> Iterator[tuple[Path, Page]]:
    for path in sorted(site.rglob("*.html")):
        if path.name != "404.html":  # served for any address, so its links are absolute
            yield path, Page(path.read_text(encoding="utf-8"))


def test_every_link_leads_somewhere(site: Path) -> None:
    found = dict(pages(site))
    assert len(found) >= 17
    for path, page in found.items():
        for link in (*page.links, *page.loads):
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "data", "mailto") or link == "javascript:void(0)":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{path.name} links to {link}"
            if parts.fragment and target.suffix == ".html" and not parts.fragment.startswith("__"):
                places = found[target].places
                assert unquote(parts.fragment) in places, f"{path.name} links to {link}"


def test_the_pages_of_the_navigation_can_be_read_in_an_hour() -> None:
    words = {path.name: len(path.read_text(encoding="utf-8").split()) for path in DOCS}
    assert sum(words.values()) <= 14_000, words


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_every_row_of_a_table_has_the_cells_of_its_heading(page: Path) -> None:
    cells = 0  # of the table that the line is in
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        found = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        assert not found or not cells or found == cells, f"{page.name}:{number}: {line}"
        cells = found


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for path, page in pages(site):
        assert not [link for link in page.loads if urlsplit(link).scheme in ("http", "https")], path.name
    for path in site.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?https?:", path.read_text(encoding="utf-8")), path.name


def test_every_page_of_docs_is_in_the_site_and_every_public_name_in_the_reference(site: Path) -> None:
    import veca

    for source in (ROOT / "docs").rglob("*.md"):
        assert (site / source.relative_to(ROOT / "docs")).with_suffix(".html").is_file(), source.name
    places = Page((site / "api.html").read_text(encoding="utf-8")).places
    for name in veca.__all__:
        assert name == "__version__" or any(place.endswith(f".{name}") for place in places), name
