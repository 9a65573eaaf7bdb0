"""Where computed things are kept between runs: one root for every cache."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """`$VECA_CACHE/NAME`, or veca/NAME in the user's cache folder (`$XDG_CACHE_HOME`, `~/.cache`)."""
    own = os.environ.get("VECA_CACHE")
    root = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "veca"
    return root.expanduser() / name
