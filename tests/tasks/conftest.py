"""Probes of tiny pictures are many small operations: threads only wait for each other."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """In every test here."""
