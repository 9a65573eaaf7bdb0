"""Services that the tests share: one small model of fresh weights, and processes that serve it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import veca
from veca import Veca, VecaConfig

from .process import Server


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """The services need the other cores; so small a model gains nothing from them here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def library(model_folder: Path) -> Veca:
    """The model that the services serve, asked directly."""
    return veca.load(model_folder)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(7)
    folder = tmp_path_factory.mktemp("model") / "little"
    model = Veca(VecaConfig(depth=2, width=64, heads=2, patch_size=16))
    with torch.no_grad():  # fresh weights are so small that all images look alike; these tell them apart
        for parameter in model.parameters():
            parameter.mul_(2)
    model.save(folder)
    return folder


@pytest.fixture(scope="session")
def start(model_folder: Path) -> Iterator[Callable[..., Server]]:
    """Start services; whatever a test left running is stopped at the end."""
    servers: list[Server] = []

    def starter(*arguments: str, **options: object) -> Server:
        servers.append(Server(model_folder, *arguments, **options))  # type: ignore[arg-type]
        return servers[-1]

    yield starter
    for server in servers:
        server.end()


@pytest.fixture(scope="session")
def server(start: Callable[..., Server]) -> Server:
    """A service with ample bounds, shared by the tests that do not disturb it."""
    return start("--size", "96", "--max-size", "256", "--threads", "1")
