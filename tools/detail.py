"""Which measure of detail spends half of the patches best: cosine to the full pass, beside reducing the image.

    python tools/detail.py --photos ../data/large-0000.tar --out results/detail
    python tools/detail.py --photos ../data/large-0000.tar --model results/train/run/best --measures loss embedding

A photograph's shorter side is reduced to each size and the middle cut out, never enlarged. `cosine` is the mean over
patches and photographs of the cosine to the pass with all patches; `worst` the mean of the worst tenth of the patches.
`reduced` is the rival: the whole image made smaller to as many tokens, its features enlarged (bilinear). `known` is
what no measure can know beforehand: how far the features of the full pass are from those of the image at half the size.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import torch
import tyro
from steps import Rows, write_csv
from torch import Tensor, nn

from veca.errors import InputError
from veca.extract.sources import find_entries
from veca.images import normalise, open_image
from veca.mixed import Cells, cut, detail, halved, pyramid, refined
from veca.model import Veca
from veca.progress import progress
from veca.weights import load

Gains = list[Tensor]  # of cells of 2 and 4 patches: B×h×w each


@dataclass
class Settings:
    """Compare measures of detail on photographs with pixels of their own."""

    photos: Annotated[Path, tyro.conf.arg(metavar="PHOTOS")] = Path("../data/large-0000.tar")
    """a folder or a tar shard"""
    model: str = "veca-s14"
    """the model that is judged"""
    sizes: tuple[int, ...] = (448, 896)
    """sides of the squares"""
    shares: tuple[float, ...] = (0.5,)
    """of the patches that are spent"""
    measures: tuple[str, ...] = ()
    """which; all without this"""
    larger: tuple[float, ...] = (8.0, 32.0)
    """how many times a loss in a cell of 4 patches counts one of 2"""
    images: int = 8
    """how many photographs"""
    threads: int = 1
    """of the CPU"""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("results/detail")
    """folder for detail.csv"""


def lost(maps: Tensor, cell: int) -> Gains:
    """What halving loses of a map's values, mean square over each cell of 2 and of 4."""
    levels = pyramid(maps.float(), cell)
    return [
        nn.functional.avg_pool2d((halved(fine.square(), cell) - coarse.square()).sum(1, keepdim=True), cell)[:, 0]
        for fine, coarse in pairwise(levels)
    ]


def loss(model: Veca, images: Tensor) -> Gains:
    return [each.clamp_min(0).sqrt() for each in lost(images, model.patch_size)]


def logarithm(model: Veca, images: Tensor) -> Gains:
    """Of logarithms: a dark place counts as much as a bright one."""
    deviation = images.new_tensor((0.229, 0.224, 0.225))[:, None, None]
    mean = images.new_tensor((0.485, 0.456, 0.406))[:, None, None]
    return loss(model, ((images * deviation + mean).clamp_min(0) + 0.05).log())


def contrast(model: Veca, images: Tensor) -> Gains:
    """Relative to the deviation of the pixels around."""
    p, found = model.patch_size, []
    own = nn.functional.avg_pool2d(images, p).square().sum(1, keepdim=True)
    variance = nn.functional.avg_pool2d(images.square(), p).sum(1, keepdim=True) - own
    for scale, each in enumerate(lost(images, p), 1):
        around = nn.functional.avg_pool2d(variance, 2**scale)[:, 0]
        found.append((each.clamp_min(0) / (around[:, : each.shape[1], : each.shape[2]] + 0.05)).sqrt())
    return found


def edges(model: Veca, images: Tensor) -> Gains:
    """Of the Laplacian."""
    kernel = images.new_tensor([[0, -1, 0], [-1, 4, -1], [0, -1, 0]]).expand(3, 1, 3, 3)
    padded = nn.functional.pad(images, (1, 1, 1, 1), mode="replicate")
    return loss(model, nn.functional.conv2d(padded, kernel, groups=3))


def embedded(model: Veca, images: Tensor) -> list[Tensor]:
    """The embedding of every cell of every size: B×D×h×w each."""
    p, found = model.patch_size, []
    for level in pyramid(images, p):
        grid = (level.shape[-2] // p, level.shape[-1] // p)
        weight = model.patch_embed.proj.weight.flatten(1).float()
        found.append((cut(level, p) @ weight.T).transpose(1, 2).unflatten(-1, grid))
    return found


def embedding(model: Veca, images: Tensor, normed: bool = False, mean: bool = False) -> Gains:
    """How far the four finer embeddings are from that of the cell that would stand for them."""
    found = []
    levels = embedded(model, images)
    if normed:
        levels = [nn.functional.normalize(level, dim=1) for level in levels]
    for fine, coarse in pairwise(levels):
        h, w = coarse.shape[-2:]
        if mean:
            found.append((halved(fine, 1) - coarse).square().sum(1).sqrt())
        else:
            fine = fine[..., : 2 * h, : 2 * w]
            apart = (fine - coarse.repeat_interleave(2, 2).repeat_interleave(2, 3)).square().sum(1, keepdim=True)
            found.append(nn.functional.avg_pool2d(apart, 2)[:, 0].sqrt())
    return found


def spectrum(model: Veca, images: Tensor) -> Gains:
    """How the embedding of a cell differs from that of its finer parts in length, as channels see it."""
    found = []
    levels = embedded(model, images)
    for fine, coarse in pairwise(levels):
        found.append((halved(fine.square(), 1).clamp_min(0).sqrt() - coarse.abs()).square().sum(1).sqrt())
    return found


def tokens(model: Veca, images: Tensor) -> Gains:
    """After the first block, along the bank's own cores: how far the four are from the one that stands for them."""
    p, found, levels = model.patch_size, [], []
    whole = model.forward_layers(images.to(model.norm.weight.dtype), keep=[0])
    levels.append(nn.functional.layer_norm(whole.patches[0].float(), (model.embed_dim,)).transpose(1, 2))
    for level in pyramid(images, p)[1:]:
        small = model.forward_layers(level.to(model.norm.weight.dtype), keep=[0])
        levels.append(nn.functional.layer_norm(small.patches[0].float(), (model.embed_dim,)).transpose(1, 2))
    side = images.shape[-1] // p
    maps = [level.unflatten(-1, (-1, side >> scale)) for scale, level in enumerate(levels)]
    for fine, coarse in pairwise(maps):
        found.append(apart(fine, coarse))
    return found


def apart(fine: Tensor, coarse: Tensor) -> Tensor:
    h, w = coarse.shape[-2:]
    larger = nn.functional.interpolate(coarse, scale_factor=2, mode="bilinear")
    return nn.functional.avg_pool2d((fine[..., : 2 * h, : 2 * w] - larger).square().sum(1, keepdim=True), 2)[
        :, 0
    ].sqrt()


def known(model: Veca, images: Tensor) -> Gains:
    """What cannot be had: the features themselves at every scale."""
    maps = []
    for level in pyramid(images, model.patch_size):
        out = model(level.to(model.norm.weight.dtype))
        maps.append(nn.functional.normalize(out.patches.float(), dim=-1).transpose(1, 2).unflatten(-1, out.grid))
    return [apart(fine, coarse) for fine, coarse in pairwise(maps)]


MEASURES: dict[str, Callable[[Veca, Tensor], Gains]] = {
    "now": lambda model, images: detail(images, model.patch_size),
    "loss": loss,
    "logarithm": logarithm,
    "contrast": contrast,
    "edges": edges,
    "embedding": embedding,
    "embedding, mean": lambda model, images: embedding(model, images, mean=True),
    "embedding, normed": lambda model, images: embedding(model, images, normed=True),
    "embedding, normed mean": lambda model, images: embedding(model, images, normed=True, mean=True),
    "spectrum": spectrum,
    "tokens": tokens,
    "known": known,
}


def square(photo: Path | str, size: int) -> Tensor | None:  # 1×3×size×size
    """The middle of a photograph whose shorter side is reduced to `size`; None where it has fewer pixels."""
    image = open_image(photo)
    if min(image.size) < size:
        return None
    scale = size / min(image.size)
    image = image.resize((max(size, round(image.width * scale)), max(size, round(image.height * scale))))
    left, top = (image.width - size) // 2, (image.height - size) // 2
    pixels = torch.frombuffer(bytearray(image.crop((left, top, left + size, top + size)).tobytes()), dtype=torch.uint8)
    return normalise(pixels.view(1, size, size, 3))


def reduced(model: Veca, images: Tensor, share: float) -> Tensor:
    """The dense features of the image at about this share of its tokens, enlarged to its own grid: N×D."""
    grid = images.shape[-1] // model.patch_size
    side = max(1, math.floor(grid * math.sqrt(share))) * model.patch_size
    small = nn.functional.interpolate(images, (side, side), mode="bicubic", antialias=True)
    out = model(small.to(model.norm.weight.dtype))
    maps = out.patches.float().transpose(1, 2).unflatten(-1, out.grid)
    return nn.functional.interpolate(maps, (grid, grid), mode="bilinear").flatten(2).transpose(1, 2)[0]


def agreement(found: Tensor, expected: Tensor) -> Tensor:
    each = torch.cosine_similarity(found.float(), expected.float(), dim=-1)
    return torch.stack((each.mean(), each.sort().values[: max(1, len(each) // 10)].mean()))


@torch.inference_mode()
def compare(settings: Settings, model: Veca) -> Rows:
    rows: Rows = []
    names = settings.measures or tuple(MEASURES)
    for unknown in set(names) - set(MEASURES):
        raise InputError(f"no measure is called {unknown!r}; there are {', '.join(MEASURES)}")
    for size in settings.sizes:
        photos: list[Tensor] = []
        for entry in find_entries([settings.photos]):
            if len(photos) < settings.images and (one := square(entry.read(), size)) is not None:
                photos.append(one)
        if not photos:
            raise InputError(f"{settings.photos} has no photograph of {size} pixels")
        found: dict[tuple[float, str, str], list[Tensor]] = {}
        for images in progress(photos, f"{size} pixels", len(photos)):
            expected = model(images.to(model.norm.weight.dtype)).patches[0]
            grid = (size // model.patch_size,) * 2
            for share in settings.shares:
                found.setdefault((share, "reduced", ""), []).append(agreement(reduced(model, images, share), expected))
            for name in names:
                small, large = MEASURES[name](model, images)
                for share in settings.shares:
                    for larger in (1.0,) if name == "now" else settings.larger:
                        chosen = Cells(refined([small, large * larger], grid, share), grid)
                        layers = model.forward_layers(images.to(model.norm.weight.dtype), cells=chosen, last_only=True)
                        dense = chosen.spread(model.output(layers.patches[-1]))[0]
                        key = (share, name, "" if name == "now" else f"{larger:g}")
                        found.setdefault(key, []).append(agreement(dense, expected))
        for (share, name, larger), values in found.items():
            mean, worst = torch.stack(values).mean(0).tolist()
            rows.append({"size": size, "share": share, "measure": name, "larger": larger,
                         "cosine": f"{mean:.4f}", "worst": f"{worst:.4f}", "images": len(values)})  # fmt: skip
            print("  ".join(map(str, rows[-1].values())), flush=True)
    return rows


def main() -> int:
    settings = tyro.cli(Settings, prog="python tools/detail.py", description=inspect.getdoc(Settings))
    torch.set_num_threads(settings.threads)
    try:
        model = load(settings.model).to(torch.bfloat16).eval()
        write_csv(settings.out / "detail.csv", compare(settings, model))
    except InputError as error:
        print(f"detail: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
