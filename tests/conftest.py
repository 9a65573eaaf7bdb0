"""What the tests share: where ../shared lies, few threads, fixed seeds, and an empty environment with the wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from environments import install_wheel
from filelock import FileLock

import veca

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"

torch.set_num_threads(2)

COUNTS = pytest.StashKey[dict[str, Any]]()

# A test that asks for one of these is end to end: a browser, a built distribution, an environment of its own.
END_TO_END = {"chromium", "wheel", "sdist", "empty_environment"}
LEFT_OUT = "end-to-end tests left out"


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if END_TO_END & {*getattr(item, "fixturenames", ())}:
            item.add_marker(pytest.mark.end_to_end)


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Count what `make test` leaves out; a worker of pytest-xdist tells the process that prints."""
    for item in items:
        told = getattr(item.config, "workeroutput", item.config.stash.setdefault(COUNTS, {}))
        told[LEFT_OUT] = told.get(LEFT_OUT, 0) + ("end_to_end" in item.keywords)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every worker collects, and leaves out, the same tests."""
    node.config.stash.setdefault(COUNTS, {}).update(getattr(node, "workeroutput", {}))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """One line, where they were left out as `make test` does it: -k and file names have other reasons."""
    count = config.stash.get(COUNTS, {}).get(LEFT_OUT)
    if count and "not end_to_end" in config.option.markexpr:
        terminalreporter.write_line(f"left out: {count} end-to-end tests; `make test-all` runs them")


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
    command = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir")
    return _built_once(tmp_path_factory, "veca-*.whl", *command)


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    command = (sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir")
    return _built_once(tmp_path_factory, "veca-*.tar.gz", *command)


@pytest.fixture(scope="session")
def empty_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel and its runtime dependencies only."""
    folder = tmp_path_factory.mktemp("environment")
    install_wheel(wheel, folder)
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


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model folder to start from."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("start") / "model"
    veca.create_model("veca_tiny", depth=2, width=64, heads=2, patch_size=8, bank=8).save(folder)
    return folder
