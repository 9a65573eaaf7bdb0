"""timm's own tests of models, run on ours, in an environment with timm (docs/integrations.md has the result).

    git clone --depth 1 https://github.com/huggingface/pytorch-image-models ../timm
    .venv/bin/python tools/timm_tests.py ../timm/tests/test_models.py --env ../envs/timm

The environment is made if it is absent (about 5 GB: the registry's PyTorch with CUDA, which runs on a CPU, and
torchvision, which fits beside no other). Our own tests with a real timm, tests/integrations/test_timm*.py, run first.
Then timm's file, with three changes (CHANGES), for the named models. Exit status 1: a test failed for no known reason
(WHY).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = "torch torchvision timm pytest pytest-timeout filelock safetensors huggingface_hub pillow numpy rich tyro"
NAMES = ("veca_tiny", "veca_small", "veca_small_plus", "veca_s14")

# The first two enter our family in timm's lists, as its own vision transformers are; the third keeps a test from being
# skipped at our default size.
CHANGES = (
    ("FEAT_INTER_FILTERS = [\n", "FEAT_INTER_FILTERS = [\n    'timm',\n"),  # our module: it has forward_intermediates
    ("NON_STD_FILTERS = [\n", "NON_STD_FILTERS = [\n    'veca_*',\n"),  # forward_features gives tokens, not a map
    ("if max(input_size) > 320:  # FIXME const", "if max(input_size) > 448:"),
)
FX = "the forward pass branches on shape, device and grad mode, which fx cannot follow; torch.export does"
SCRIPT = "the forward pass is Python that TorchScript cannot compile (generators, caches); torch.jit.trace runs it"
WHY = {
    "test_model_forward_torchscript": SCRIPT,
    "test_model_forward_fx": FX,
    "test_model_backward_fx": FX,
    "test_model_forward_fx_torchscript": FX,
}
CONFTEST = """
import os
import veca.integrations.timm  # registers our models before timm's file lists them

def pytest_collection_modifyitems(items):
    names = os.environ["VECA_NAMES"].split()
    items[:] = [item for item in items if hasattr(item, "callspec") and item.callspec.params.get("model_name") in names]
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tests", type=Path, help="timm's tests/test_models.py")
    parser.add_argument("--env", type=Path, required=True, help="an environment with timm, made there if absent")
    parser.add_argument("--models", nargs="+", default=NAMES)
    arguments = parser.parse_args()
    source = arguments.tests.read_text(encoding="utf-8")
    for before, after in CHANGES:
        if source.count(before) != 1:
            sys.exit(f"{arguments.tests}: expected one {before.strip()!r}; timm's tests have changed, mend CHANGES")
        source = source.replace(before, after)
    python = environment(arguments.env)
    versions = "import platform, timm, torch, torchvision; print(f'timm {timm.__version__}, torch {torch.__version__}, "
    versions += "torchvision {torchvision.__version__}, Python {platform.python_version()}')"
    subprocess.run([python, "-c", versions], check=True)
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "VECA_NAMES": " ".join(arguments.models)}
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore"]
    ours = sorted(ROOT.glob("tests/integrations/test_timm*.py"))
    if subprocess.run([*pytest, *ours], env=settings, cwd=ROOT).returncode:
        return 1
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "conftest.py").write_text(CONFTEST, encoding="utf-8")
        Path(folder, "test_models.py").write_text(source, encoding="utf-8")
        report = Path(folder, "report.xml")
        command = [*pytest, "--tb=short", f"--junit-xml={report}", "test_models.py"]
        done = subprocess.run(command, env=settings, cwd=folder, stdout=subprocess.PIPE, text=True)
        if not report.is_file():
            sys.exit(done.stdout)
        return summary(report)


def environment(folder: Path) -> Path:
    """The Python of the environment."""
    python = folder.absolute() / "bin" / "python"
    if not python.exists():
        print(f"making {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES.split()], check=True)
    return python


def summary(report: Path) -> int:
    """Print what passed and, test by test, why something did not; the exit status."""
    passed, others = defaultdict[str, list[str]](list), defaultdict[tuple[str, str, str], list[str]](list)
    unexplained = 0
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = case.attrib["name"]
        test, model = re.fullmatch(r"(\w+)\[\d+-(\w+)\]", name).groups()  # type: ignore[union-attr]
        problem = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        if problem is None:
            passed[test].append(model)
            continue
        said = " ".join(problem.attrib.get("message", "").split())[:150]
        known, skipped = WHY.get(test), problem.tag == "skipped"
        unexplained += not skipped and known is None
        why = said if skipped else f"{said}\n         {known or 'NO REASON KNOWN'}"
        others["skipped" if skipped else "failed", test, why].append(model)
    for test, models in passed.items():
        print(f"passed   {test}: {', '.join(models)}")
    for (what, test, why), models in others.items():
        print(f"{what:8} {test}: {', '.join(models)}\n         {why}")
    count = sum(map(len, passed.values()))
    print(f"{count} passed, {sum(map(len, others.values()))} not, {unexplained} of them for no known reason")
    return int(unexplained > 0)


if __name__ == "__main__":
    sys.exit(main())
