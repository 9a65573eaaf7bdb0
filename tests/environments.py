"""Empty environments for tests, without a network: the packages of this one, linked, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterable
from email import message_from_bytes
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement


def new_environment(folder: Path, requirements: Iterable[str]) -> Path:
    """An environment that has these packages and what they ask for; returns its Python."""
    venv.create(folder, with_pip=False)
    ours, theirs = (
        Path(sysconfig.get_path("purelib", vars={"base": str(base), "platbase": str(base)}))
        for base in (sys.prefix, folder)
    )
    for name in needed(requirements):
        for top in {file.parts[0] for file in distribution(name).files or () if file.parts[0] not in ("..", "/")}:
            if (ours / top).exists() and not (theirs / top).exists():
                (theirs / top).symlink_to(ours / top)
    return folder / "bin/python"


def needed(requirements: Iterable[str]) -> set[str]:
    """The names of all packages that these requirements lead to, as they are installed here."""
    found: dict[str, set[str]] = {}
    waiting = [(Requirement(text), "") for text in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = requirement.name.lower().replace("_", "-")
        for wanted in {"", *requirement.extras} - found.setdefault(name, set()):
            found[name].add(wanted)
            waiting += [(Requirement(text), wanted) for text in distribution(name).requires or ()]
    return set(found)


def install_wheel(wheel: Path, folder: Path) -> Path:
    """An environment with the wheel and the runtime dependencies that it states, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        stated = message_from_bytes(archive.read(metadata)).get_all("Requires-Dist") or []
    python = new_environment(folder, stated)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # no veca but the wheel
    for words in (["install", "--quiet", "--no-deps", "--no-index", str(wheel)], ["check"]):
        pip = [sys.executable, "-m", "pip", "--python", str(python), *words]
        subprocess.run(pip, check=True, timeout=300, env=environment)
    return python
