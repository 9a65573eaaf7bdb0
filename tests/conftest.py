"""What the tests share: where ../shared lies, few threads, fixed seeds, and an empty environment with the wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"

torch.set_num_threads(2)

# As root and without a network; the background services would otherwise look for Google's hosts.
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Models and pictures as small as most tests' lose time to a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference vectors, teacher and data; where it is absent the test skips, but never in CI."""
    if not (SHARED / "DESIGN.md").is_file():
        if os.environ.get("CI"):
            pytest.fail(f"CI has no {SHARED}")
        pytest.skip(f"needs {SHARED}, which is not in the repository")
    return SHARED


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def _run(*command: object, cwd: Path | None = None) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=900, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def run() -> Callable[..., str]:
    """What a command prints; it must succeed."""
    return _run


def _built_once(tmp_path_factory: pytest.TempPathFactory, pattern: str, *command: object) -> Path:
    """The file that `command` makes in the folder it ends with; one build, whatever number of workers asks for it.

    Builds of one source tree share its build folder, so two at the same time break each other.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # each worker has a folder of its own in it
    with FileLock(shared / "build.lock"):
        if not any((shared / "built").glob(pattern)):
            _run(*command, shared / "built", ROOT)
    (built,) = (shared / "built").glob(pattern)
    return built


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    command = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir")
    return _built_once(tmp_path_factory, "veca-*.whl", *command)


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    command = (sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir")
    return _built_once(tmp_path_factory, "veca-*.tar.gz", *command)


@pytest.fixture(scope="session")
def empty_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel and its runtime dependencies only; built once, it takes a while."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    _run(folder / "bin/python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel)
    return folder


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A real headless browser. It ends with its module: Playwright allows one of itself, and no other event loop."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        if os.environ.get("CI"):
            pytest.fail("CI has no chromium: .ci/run installs it")
        pytest.skip("needs a chromium, such as Debian's package of that name")
    playwright = pytest.importorskip("playwright.sync_api").sync_playwright().start()
    browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
    yield browser
    browser.close()
    playwright.stop()
