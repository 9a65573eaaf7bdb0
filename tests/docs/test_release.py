"""What a release needs: one version everywhere, a citation that parses, distributions that twine accepts."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from pathlib import Path

import yaml

import veca

from .world import ROOT


def test_the_version_is_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    latest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert latest is not None
    assert latest[1] == str(citation["version"]) == veca.__version__


def test_the_citation_names_the_paper_and_the_software() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors", "license"} <= citation.keys()
    paper = citation["preferred-citation"]
    assert "2605.12491" in paper["url"]
    assert all({"given-names", "family-names"} <= author.keys() for author in paper["authors"])


def test_the_distributions_are_well_formed(wheel: Path, sdist: Path) -> None:
    checked = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", wheel, sdist], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
    top = sdist.name.removesuffix(".tar.gz")
    assert {f"{top}/{name}" for name in ("pyproject.toml", "README.md", "LICENSE", "veca/model.py")} <= set(names)
    assert not any("/.venv/" in name or "/shared/" in name for name in names)
