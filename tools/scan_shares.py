"""How near features stay to the full pass when the cores read a share of the patches.

    python tools/scan_shares.py                                            # four photographs of scikit-image
    python tools/scan_shares.py --model X --photos ../data/davis_frames ../data/underwater/JPEGImages --shares 0.25 \
        --sizes 448 896 --dtype bfloat16 --out results/shares

A size is the shorter side; photographs that have fewer pixels than that are left out.
"""

from __future__ import annotations

from pathlib import Path

import skimage.data
import torch
import tyro
from steps import write_csv

from veca.analysis.metrics import find_examples
from veca.backbones import load_backbone
from veca.devices import Dtype, pick_device, pick_dtype
from veca.images import image_size
from veca.progress import progress

PHOTOS = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg")


def main(
    model: str = "veca-s14",
    photos: tuple[Path, ...] = (),
    images: int = 16,
    cores: tuple[int, ...] = (8, 64),
    shares: tuple[float, ...] = (0.5, 0.25, 0.125),
    sizes: tuple[int, ...] = (448,),
    dtype: Dtype = "float32",
    out: Path | None = None,
) -> None:
    """Mean cosine of the patches to those of the full pass; `images` evenly spread ones of each folder."""
    net = load_backbone(model, dtype=pick_dtype(dtype, pick_device("cpu"))).veca
    groups = {str(folder): [path for path, _ in find_examples(folder, images)] for folder in photos}
    if not photos:
        groups = {"scikit-image": [Path(skimage.data.__file__).parent / name for name in PHOTOS]}
    rows = []
    for group, size in ((group, size) for size in sizes for group in groups):
        paths = [path for path in groups[group] if not photos or min(image_size(path)) >= size]
        found: dict[tuple[int, float], list[float]] = {(budget, share): [] for budget in cores for share in shares}
        for path in progress(paths, f"{group}, {size}", len(paths)):
            pixels = net.preprocess(path, size).to(next(net.parameters()).dtype)
            for budget in cores:
                with torch.inference_mode():
                    full = net(pixels, cores=budget).patches[0].float()
                for share in shares:
                    part = net.scan(pixels, cores=budget, share=share).look().features.flatten(0, 1).float()
                    found[budget, share].append(float(torch.nn.functional.cosine_similarity(part, full, dim=-1).mean()))
        for (budget, share), values in found.items():
            if values:
                row = {"photos": group, "images": len(values), "size": size, "cores": budget, "share": share}
                rows.append({**row, "cosine": f"{sum(values) / len(values):.4f}"})
                print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    if out is not None:
        write_csv(out / "shares.csv", rows)


if __name__ == "__main__":
    tyro.cli(main)
