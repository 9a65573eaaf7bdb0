"""`make release`: build the sdist and the wheel, check them, and try the wheel in an empty environment of each Python.

    python tools/release.py                       # every interpreter found whose PyTorch comes without CUDA
    python tools/release.py --pythons 3.11 3.12   # these only
    python tools/release.py --with-cuda           # the others too: gigabytes of CUDA libraries for each

A line per Python says what happened. Those that were not tried are named with the reason; a failure ends with status 1.
Nothing is uploaded: `twine upload dist/*` is left to a person.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).parents[1]
LARGEST = 60_000_000  # bytes of a distribution; PyPI refuses files over 100 MB
SMOKE = """
import numpy, torch, veca
from PIL import Image
model = veca.create_model("veca_tiny").eval()
model.save("model")
photo = numpy.arange(96 * 80 * 3, dtype=numpy.uint8).reshape(96, 80, 3)
Image.fromarray(photo).save("photo.png")
out = veca.load("model")(veca.preprocess("photo.png", size=64), cores=8)
assert out.grid == (5, 4) and out.patches.shape == (1, 20, 192), out.grid
for name in veca.bundled_models():
    model = veca.load(name)
    images = veca.preprocess("photo.png", size=56, patch_size=model.patch_size)
    assert torch.isfinite(model(images, cores=8).patches).all()
    print("bundled", name)
print("torch", torch.__version__, "numpy", numpy.__version__)
"""


@dataclass
class Settings:
    """Build, check and try the distributions."""

    pythons: tuple[str, ...] = ("3.10", "3.11", "3.12", "3.13")
    """versions to try the wheel with"""
    with_cuda: bool = False
    """try a Python too where pip would take a PyTorch with CUDA (gigabytes)"""
    out: Path = ROOT / "dist"
    """folder for the wheel and the sdist"""


def main() -> int:
    settings = tyro.cli(Settings)
    wheel = build(settings.out)
    failed = False
    for version in settings.pythons:
        state = attempt(version, wheel, settings.with_cuda)
        print(f"Python {version}: {state}", flush=True)
        failed |= state.startswith("failed")
    return 1 if failed else 0


def build(out: Path) -> Path:
    """The wheel, built from the sdist; both checked."""
    for old in out.glob("veca-*"):
        old.unlink()
    run(sys.executable, "-m", "build", "--outdir", out, ROOT)
    (wheel,), (sdist,) = out.glob("veca-*.whl"), out.glob("veca-*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    for path in (wheel, sdist):
        if path.stat().st_size > LARGEST:
            raise SystemExit(f"{path.name} has {path.stat().st_size:,} bytes, over {LARGEST:,}")
    with tarfile.open(sdist) as archive, zipfile.ZipFile(wheel) as packed:
        print(f"{sdist.name}: {sdist.stat().st_size / 1e6:.1f} MB, {len(archive.getnames())} entries")
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, {len(packed.namelist())} entries; twine: passed")
    return wheel


def attempt(version: str, wheel: Path, with_cuda: bool) -> str:
    """Install the wheel with nothing but its dependencies, load and use it: what happened, in one line."""
    python = find_python(version)
    if python is None:
        return "not tried: no such interpreter here"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            run(python, "-m", "venv", folder / "venv")
            own = folder / "venv/bin/python"
            install = [own, "-m", "pip", "install", "--quiet", "--only-binary", ":all:"]
            pins = folder / "torch.txt"  # only torch: other pins of constraints.txt may not exist for this Python
            lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
            pins.write_text("\n".join(line for line in lines if line.startswith("torch==")), encoding="utf-8")
            wanted = ["--constraint", pins, wheel]
            plan = run(*install, "--dry-run", "--no-deps", "--report", "-", "--constraint", pins, "torch")
            needs = json.loads(plan)["install"][0]["metadata"].get("requires_dist", [])
            if not with_cuda and any(need.startswith(("nvidia-", "cuda-")) for need in needs):
                return "not tried: pip finds only a PyTorch with CUDA here, gigabytes of it; --with-cuda tries it"
            run(*install, *wanted)
            said = run(own, "-c", SMOKE, cwd=folder).split("\n")
            run(folder / "venv/bin/veca", "features", "photo.png", "--out", "f", "--model", "model", cwd=folder)
        except subprocess.CalledProcessError as error:
            return "failed: " + (error.stderr.strip().splitlines() or ["no message"])[-1]
    return f"works ({', '.join(line for line in said if line)})"


def find_python(version: str) -> Path | None:
    """The interpreter itself: a shim of pyenv answers for versions that are not switched on."""
    homes = [Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"]
    candidates = [path for home in homes for path in sorted(home.glob(f"{version}.*/bin/python{version}"))]
    if found := shutil.which(f"python{version}"):
        candidates.append(Path(found))
    for path in candidates:
        answer = subprocess.run([path, "-c", "import venv"], capture_output=True)
        if answer.returncode == 0:
            return path
    return None


def run(*command: object, cwd: Path | None = None) -> str:
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        sys.stderr.write(done.stdout[-2000:] + done.stderr[-2000:])
    done.check_returncode()
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
