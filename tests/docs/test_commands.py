"""Every command and every block of Python in README.md, CONTRIBUTING.md and docs/ is run, page by page, in order.

`world.py` builds what they name, `pages.py` says what is made shorter and, with a reason each, what cannot run here.
Commands of `veca` run in this process, where PyTorch is imported once; all others are real processes.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

import veca
from veca.cli import COMMANDS, main

from . import world
from .flags import unknown_flags
from .pages import NOT_RUN_PYTHON, OUTPUT, PAGES, PYTHON, SHELL, Block, blocks, commands, reason_not_to_run, substitute
from .world import ROOT

PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
EXTRAS = re.findall(
    r"^(\w+) = \[", PROJECT.split("[project.optional-dependencies]")[1].split("\n[")[0], flags=re.MULTILINE
)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return world.build(tmp_path_factory.mktemp("world"))


@pytest.fixture
def here(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the world, which a page may change; without a network, and with the world's own `veca-s14`."""
    shutil.copytree(original.parent, tmp_path / "world", symlinks=True)
    monkeypatch.chdir(tmp_path / "world/main")
    monkeypatch.setattr("veca.weights.BUNDLED", tmp_path / "world/bundled")
    settings = {"VECA_CACHE": tmp_path / "cache", "HF_HUB_OFFLINE": 1, "OMP_NUM_THREADS": 1, "MPLBACKEND": "agg"}
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "world/main"


pytestmark = pytest.mark.usefixtures("one_thread")


class Reader:
    """Someone who types a page from top to bottom."""

    made: ClassVar[set[str]] = set()  # what `make` has done on another page already

    def __init__(self) -> None:
        self.service: subprocess.Popen[str] | None = None
        self.port = ""

    def shell(self, words: list[str], where: str) -> None:
        command = " ".join(words)
        if words[:2] == ["pip", "install"]:
            for names in re.findall(r"\[([\w,]+)\]", command):
                assert set(names.split(",")) <= {*EXTRAS}, f"{where}: no extra {names}"
        if reason_not_to_run(command) is not None:
            return
        words = substitute(words)
        if words[0] == "veca" and words[1] in ("serve", "view"):
            self.serve(words)
        elif words[0] == "veca":
            self.veca(words[1:], where)
        else:
            self.process(words, where)

    def veca(self, arguments: list[str], where: str) -> None:
        try:
            status = main(arguments)
        except SystemExit as left:  # --help, or a flag that does not exist
            status = int(left.code or 0) if isinstance(left.code, int) or left.code is None else 1
        assert status == 0, f"{where}: veca {shlex.join(arguments)} ended with status {status}"

    def process(self, words: list[str], where: str) -> None:
        line = shlex.join(words).replace("127.0.0.1:8000", f"127.0.0.1:{self.port}")
        if words[0] == "make":
            if line in self.made:
                return
            self.made.add(line)
            line += " --old-file .venv/.installed --old-file .venv/.demo"  # nothing is installed while testing
        if words[0] == "curl":
            line += " --fail --silent --show-error"
        if words[0] == "torchrun":
            line = re.sub(r"--nproc-per-node \d+", "--nproc-per-node 1 --master-port 0", line)
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{where}: {line}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"

    def serve(self, words: list[str]) -> None:
        self.stop()
        command = [sys.executable, "-m", "veca.cli", *words[1:]]
        self.service = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.service.stdout is not None
        said = self.service.stdout.readline()
        assert " at http" in said, said
        self.port = said.rsplit(":", 1)[1].strip()

    def stop(self) -> None:
        if self.service is not None:
            self.service.send_signal(signal.SIGTERM)
            _, said = self.service.communicate(timeout=60)
            assert self.service.returncode == 0, said[-2000:]
            self.service = None


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.end_to_end
def test_everything_on_a_page_runs(page: str, here: Path) -> None:
    reader, names = Reader(), prelude(page, here)
    try:
        for block in blocks(page):
            where = f"{PAGES[page].name}:{block.line}"
            assert block.language in (*SHELL, *PYTHON, *OUTPUT), f"{where}: what language is {block.language!r}?"
            if block.language in SHELL:
                prepare(page, block, here)
                for words in commands(block):
                    reader.shell(words, where)
            elif block.language in PYTHON:
                python(block, names, where)
        if page == "cluster":
            (mapper,) = re.findall(r"mapInPandas\((.*), rows\)", PAGES[page].read_text(encoding="utf-8"))
            as_spark_calls_it(eval(mapper, names), here)
    finally:
        reader.stop()


def python(block: Block, names: dict[str, Any], where: str) -> None:
    """Run a block in the names that the page has made so far; lines that cannot run are left out."""
    if block.text.startswith(tuple(NOT_RUN_PYTHON)):
        return
    lines = ["" if any(line.startswith(start) for start in NOT_RUN_PYTHON) else line for line in block.text.split("\n")]
    exec(compile("\n" * block.line + "\n".join(lines), where, "exec"), names)


def as_spark_calls_it(features: Any, here: Path) -> None:
    """The mapper of the page, which nothing on it calls: tables of pandas in, and out."""
    pandas = pytest.importorskip("pandas")
    content = (here / "photo.jpg").read_bytes()
    tables = [pandas.DataFrame({"path": ["a.jpg", "b.jpg"], "content": [content, b"no image"]})] * 2
    found = list(features(iter(tables)))
    assert [{"path", "cls", "grid", "error"} - {*table.columns} for table in found] == [set()] * 2
    model = veca.load("veca-s14")
    with torch.inference_mode():
        wanted = model(model.preprocess(content), cores=32).cls[0]
    good, bad = found[1].to_dict("records")
    assert torch.cosine_similarity(torch.tensor(good["cls"]), wanted, dim=0) > 0.999  # it may compute in bfloat16
    assert not good["error"]
    assert bad["path"] == "b.jpg"
    assert bad["error"]


def prelude(page: str, here: Path) -> dict[str, Any]:
    """What a page takes as given: names that its text introduces but its code does not make."""
    names: dict[str, Any] = {"__name__": page}
    if page == "cluster":
        names["veca"] = veca
    if page == "parallel":  # whose last line ends it
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if page in ("CONTRIBUTING", "integrations"):
        names["whole"] = world.depth_anything()
    if page == "inside":
        names |= {"uploaded_bytes": (here / "photo.jpg").read_bytes(), "model": veca.load("veca-s14")}
        torch.nn.Module.requires_grad_(names["model"], False)
    if page == "integrations":
        head = here / f"pets-probe/heads/veca-s14-{world.SIDE}px-64cores"
        assert main([*substitute(["veca", "probe", "classify", "--data", "pets", "--model", "veca-s14"])[1:],
                     "--cores", "64", "--out", "pets-probe"]) == 0  # fmt: skip
        head.rename(head.with_name("veca-s14-252px-64cores"))
        photos = [veca.preprocess(path, size=28, patch_size=14)[0] for path in sorted(here.glob("pets/test/*/*"))]
        names |= {"pets": [{"pixel_values": photo, "labels": index % 2} for index, photo in enumerate(photos)]}
        names |= {"veca": veca, "torch": torch}
        shutil.copytree(here / "models/mine", here / "runs/x/best")
    return names


def prepare(page: str, block: Block, here: Path) -> None:
    """Files that a block's commands read and nothing on the page has made."""
    if "veca_base_q64.pt" in block.text:
        official = ROOT.parent / "shared/reference/tiny_official.pt"
        if not official.is_file():
            pytest.skip(f"needs {official}, which is not in the repository")
        shutil.copyfile(official, here / "veca_base_q64.pt")
    if page == "README" and "runs/mine/best" in block.text and not (here / "runs/mine/best").exists():
        shutil.copytree(here / "models/mine", here / "runs/mine/best")


def test_commands_within_sentences_exist() -> None:
    """`veca NAME --flag` in running text: the command has that name, and its help knows the flag."""
    for page, path in PAGES.items():
        text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for found in re.findall(r"`veca ([^`]+)`", text):
            words = found.replace("\n", " ").split()
            if words[0] not in ("--help", "COMMAND"):
                assert words[0] in COMMANDS, f"{page}: veca {found}"
                assert not unknown_flags(words), f"{page}: veca {found}"


def test_what_is_not_run_is_still_in_the_docs() -> None:
    """A reason that no command needs any more is dead."""
    from .pages import NOT_RUN

    typed = [" ".join(words) for page in PAGES for block in blocks(page) if block.language in SHELL
             for words in commands(block)]  # fmt: skip
    code = "\n".join(block.text for page in PAGES for block in blocks(page) if block.language in PYTHON)
    for start in NOT_RUN:
        assert any(line.startswith(start) for line in typed), start
    for start in NOT_RUN_PYTHON:
        assert start in code, start
