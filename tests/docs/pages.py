"""The blocks of code in README.md, docs/ and docs/research/, in order, and what a test makes of each command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from .world import ROOT, SIDE

DOCS = sorted((ROOT / "docs").glob("*.md"))  # the pages of the main navigation; research/ is beside it
NOTES = sorted((ROOT / "docs/research").glob("*.md"))  # two pages may have the same name, so these have their folder's
PAGES = {path.stem: path for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *DOCS)}
PAGES |= {f"research/{path.stem}": path for path in NOTES}
SHELL, PYTHON = ("sh", "bash", ""), ("python",)
OUTPUT = ("text", "ini", "dockerfile", "json", "bibtex")

# What cannot run in a test, by how the command begins. Everything else is run.
NOT_RUN = {
    "make test": "this is the test; .ci/run runs it",
    "make lint": ".ci/run runs it, before the tests",
    "make results": "minutes to hours; tests/tools/test_reproduce.py runs small steps",
    "python3 -m venv": "an environment of its own takes half a minute; tests/test_package.py makes one",
    "pip install": "needs the network; that the named extras exist is checked",
    "docker": "no docker here",
    "srun": "no cluster here; the same command runs under torchrun",
    "export FIRST_NODE": "asks Slurm for the nodes",
    "veca features photos/ --out cluster/ --engine ray": "tests/extract/test_cluster.py has a real Ray",
    ".venv/bin/pytest": "a part of this test suite",
    ".venv/bin/pip install": "needs the network",
    "python tools/timm_tests.py": "needs timm and its tests, in an environment of their own",
}
# A block that begins so is left out whole, any other only that line.
NOT_RUN_PYTHON = {
    "import ray": "tests/extract/test_cluster.py has a real Ray",
    "from ray import serve": "the same",
    "import daft": "not among our dependencies; run by hand",
    "from pyspark.sql import": "the same, and needs Java",
    "import timm": "timm needs torchvision, which cannot be installed beside the CPU build of PyTorch",
    "whole = DepthAnythingForDepthEstimation": "fetches from the hub; the next lines get a small one",
    "dist.init_process_group()": "torchrun tells it the ranks; the page gets a group of one",
    "push_to_hub(veca.load": "uploads to the hub; tests/integrations/test_hub.py has a hub of its own",
}

# Longer things become shorter, and what is not here becomes something that is.
WORDS = (
    (r"facebook/dinov3-\S+", "dinov3"),
    (r"\.\./shared/data/photos/photos-000\.tar", "photos/photos-000.tar"),
    (r"imagenet/train-\{000000\.\.001023\}\.tar", "photos/photos-{000..001}.tar"),
    (r"imagenet/val\.tar", "photos/photos-006.tar"),
    (r"imagenet-probe/heads/veca-b-256px-64cores", f"pets-probe/heads/veca-s14-{SIDE}px-64cores"),
    (r"imagenetv2/", "pets/test"),
    (r"veca export veca-s14", "veca export models/mine"),  # two layers are traced sooner than twelve
    (r"-\d+px", f"-{SIDE}px"),
    (r"/tmp/tokens", "tokens"),
)
DISTILL = (
    f"--epochs 0 --warmup-epochs 0 --steps 2 --warmup-steps 1 --batch 2 --late-from 1 --resolutions {SIDE} "
    f"--val-resolutions {SIDE} --val-every 2 --val-images 2 --val-budgets 8 "
    "--standardise-images 2 --workers 0 --log-every 1"
)
SIXTEEN = "--resolutions 32 --val-resolutions 32 --student veca_tiny"  # the paper's sizes have patches of 16
DENSE = f"--size {SIDE} --seeds 1 --steps 2"
FINETUNE = f"--size {SIDE} --epochs 1 --batch 4 --workers 1"
# The first that begins the command is appended to it: of two equal flags the last holds.
SHORTER = (
    ("veca features --stream", ""),
    ("veca features", "--workers 0"),
    ("veca explore --metrics", f"--limit 2 --size {2 * SIDE}"),
    (r"veca explore .*--figure features", f"--sizes {SIDE} {2 * SIDE} --method pca"),
    (r"veca explore .*--figure layers", f"--size {4 * SIDE} --budgets 8 64 --method pca"),
    (r"veca explore .*--figure", f"--size {4 * SIDE}"),
    ("veca explore", f"--size {4 * SIDE} --budgets 8 64 --no-open"),
    ("veca distill --plot", ""),
    ("veca distill (stage|laptop)", f"{DISTILL} {SIXTEEN}"),
    ("veca distill", DISTILL),
    ("veca probe classify", f"--size {SIDE} --seeds 1 --epochs 2"),
    ("veca probe knn", f"--size {SIDE}"),
    ("veca probe segment", DENSE),
    ("veca probe depth", DENSE),
    ("veca probe detect", f"--size {SIDE} --steps 2 --queries 4 --layers 1"),
    ("veca probe masks", f"{DENSE} --queries 4 --layers 1"),
    ("veca probe video", f"--size {SIDE} --cores 8 --frames 3"),
    ("python tools/video_picture.py", f"--size {SIDE} --model ./veca-s14 --out film.webp"),
    ("veca probe teacher", f"--size {SIDE} --images 2 --cores 8,64"),
    ("veca finetune detect", f"{FINETUNE} --queries 4 --layers 1"),
    ("veca finetune", FINETUNE),
    ("veca bench ranks", "--model veca_tiny --sizes 32"),
    ("veca bench scan", "--model ./veca-s14 --sizes 56 --box 28 --share-sizes 56 --rounds 1"),
    ("python tools/scan_picture.py", ""),
    ("veca bench distill", "--size 32 --batch 2 --steps 1 --rounds 1 --workers 0"),
    ("python tools/serve_load.py", "--model veca_tiny --clients 1 --seconds 3 --size 64 --min-size 32"),
    (r"veca bench.*--help", ""),
    ("veca bench", "--model veca_tiny --sizes 32 --rounds 1 --seconds 1 --no-memory"),
    ("python tools/inside_pictures.py", "--model ./veca-s14 --only positions --images pictures"),
    ("python tools/huge_image.py", "--side 512 --part 512"),
    ("python tools/blank_slide.py", "--side 1024 --model veca_tiny"),
    ("python tools/windows_measured.py", "--model ./veca-s14 --mosaics 1 --cell 56"),
    ("veca view", "--model ./veca-s14 --port 0 --no-open"),
    ("veca serve", f"--model ./veca-s14 --port 0 --size {4 * SIDE} --min-size {SIDE}"),
)


@dataclass
class Block:
    page: str
    line: int
    language: str
    text: str


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page."""
    text = PAGES[page].read_text(encoding="utf-8")
    for match in re.finditer(r"^```([^\n`]*)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        yield Block(page, text.count("\n", 0, match.start()) + 1, match[1].strip(), match[2])


def commands(block: Block) -> list[list[str]]:
    """The commands of a shell block: lines joined where they end in a backslash, without comments."""
    joined = block.text.replace("\\\n", " ")
    parts = [part for line in joined.splitlines() for part in re.split(r"\s&&\s", line)]
    return [words for part in parts if (words := shlex.split(part, comments=True))]


def reason_not_to_run(command: str) -> str | None:
    return next((reason for start, reason in NOT_RUN.items() if re.match(rf"{re.escape(start)}(\W|$)", command)), None)


def substitute(words: list[str]) -> list[str]:
    """The command as a test runs it."""
    changed = shlex.join(words)
    for pattern, by in WORDS:
        changed = re.sub(pattern, by, changed)
    plain = re.sub(r"^torchrun .* -m veca\.cli", "veca", " ".join(words))
    extra = next((flags for start, flags in SHORTER if re.match(start, plain)), "")
    return shlex.split(changed) + shlex.split(extra)
