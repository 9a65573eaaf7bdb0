"""Write tests/bundled_features.safetensors: what veca-s14 gives for two of scikit-image's photographs.

    python tests/bundled_features.py        # only after new weights were bundled; then look at the difference it prints

Kept are the global feature and every 16th patch, in float32, at two budgets: enough to notice any change, in 110 kB.
`tests/test_bundled.py` compares. Run as a script so that nobody updates the values by running the tests.
"""

from __future__ import annotations

from pathlib import Path

import skimage.data
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import veca

STORED = Path(__file__).with_suffix(".safetensors")
PHOTOS = ("astronaut.png", "chelsea.png")
BUDGETS = (8, 64)
SIZE, EVERY = 224, 16


@torch.inference_mode()
def compute(model: veca.Veca) -> dict[str, Tensor]:
    """The features by photo, budget and kind."""
    found = {}
    for name in PHOTOS:
        images = veca.preprocess(Path(skimage.data.__file__).parent / name, size=SIZE, patch_size=model.patch_size)
        for cores in BUDGETS:
            out = model(images, cores=cores)
            found[f"{name}/{cores}/cls"] = out.cls[0].clone()
            found[f"{name}/{cores}/patches"] = out.patches[0, ::EVERY].clone()
    return found


if __name__ == "__main__":
    new = compute(veca.load("veca-s14"))
    if STORED.is_file():
        for name, value in load_file(STORED).items():
            print(f"{name}: largest difference from the stored values {float((value - new[name]).abs().max()):.2e}")
    save_file(new, STORED)
    print(f"{STORED}: {STORED.stat().st_size / 1e3:.0f} kB")
