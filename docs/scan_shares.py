"""How near features stay to the full pass when the cores read a share of the patches: four photographs of scikit-image.

python docs/scan_shares.py
"""

from __future__ import annotations

from pathlib import Path

import skimage.data
import torch

import veca

PHOTOS = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg")
SHARES = (0.5, 0.25, 0.125)


def main() -> None:
    model, folder = veca.load("veca-s14"), Path(skimage.data.__file__).parent
    for cores in (8, 64):
        found: dict[float, list[float]] = {share: [] for share in SHARES}
        for name in PHOTOS:
            images = model.preprocess(folder / name, 448)
            with torch.inference_mode():
                full = model(images, cores=cores).patches[0]
            for share, values in found.items():
                part = model.scan(images, cores=cores, share=share).look().features.flatten(0, 1)
                values.append(float(torch.nn.functional.cosine_similarity(part, full, dim=-1).mean()))
        means = (f"share {share:g}: {sum(values) / len(values):.4f}" for share, values in found.items())
        print(f"{cores} cores  {'  '.join(means)}")


if __name__ == "__main__":
    main()
