"""The forward pass in bfloat16 beside float32, interleaved, the best of several rounds; and how near its features stay.

    .venv/bin/python tools/compare_dtypes.py --models veca-s14 veca_small --sizes 224 448 1024 2048 --cores 8 64

Prints one row a case: milliseconds of both, how many times as fast, and the mean and least cosine of a patch in
bfloat16 to the same in float32, on four photographs of scikit-image. Sizes without weights (veca_small) have random
ones. Milliseconds are those of one thread on its CPU, which others on the machine hardly change.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path

import skimage.data
import torch

import veca

PHOTOS = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg")


def timed(model: veca.Veca, images: torch.Tensor, cores: int) -> tuple[float, torch.Tensor]:
    began = time.process_time()
    patches = model(images, cores=cores).patches
    return time.process_time() - began, patches


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["veca-s14", "veca_small"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[224, 448, 1024, 2048])
    parser.add_argument("--cores", nargs="+", type=int, default=[8, 64])
    parser.add_argument("--rounds", type=int, default=5)
    settings = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(skimage.data.__file__).parent
    print("| model | image | cores | float32, ms | bfloat16, ms | times as fast | cosine, mean | least |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in settings.models:
        torch.manual_seed(0)
        model = (veca.load(name) if "-" in name else veca.create_model(name)).eval()
        pair = (model, copy.deepcopy(model).to(torch.bfloat16))
        for size in settings.sizes:
            side = size // model.patch_size * model.patch_size
            photos = [model.preprocess(folder / photo, side)[..., :side, :side] for photo in PHOTOS]
            for cores in settings.cores:
                best, cosines = [float("inf")] * 2, []
                for round_ in range(settings.rounds + 1):
                    image = photos[round_ % len(photos)]
                    found = [timed(one, image.to(one.bank.tokens.dtype), cores) for one in pair]
                    if round_:  # the first is for warming up
                        best = [min(old, new) for old, (new, _) in zip(best, found, strict=True)]
                    if round_ < len(photos):
                        both = (patches.float() for _, patches in found)
                        cosines.append(torch.nn.functional.cosine_similarity(*both, dim=-1).flatten())
                near, (whole, half) = torch.cat(cosines), (1e3 * seconds for seconds in best)
                print(
                    f"| {name} | {size}² | {cores} | {whole:.1f} | {half:.1f} | {whole / half:.2f} "
                    f"| {near.mean():.5f} | {near.min():.5f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
