"""Numbers about cores and their maps, each a function of tensors; `metrics` averages them over photos.

A map is one core's weights over the patches (C×N): what it reads, or who reads it (`Contributions.reads`, `.read_by`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

BINS = 20  # of distance, up to one shorter side of the photo


def effective_rank(features: Tensor) -> float:
    """How many directions the rows (C×D) really use: exp of the entropy of their singular values (Roy and Vetterli)."""
    singular = torch.linalg.svdvals(nn.functional.normalize(features.double(), dim=-1))
    share = singular / singular.sum()
    return float(torch.exp(-torch.special.xlogy(share, share).sum()))


def mean_cosine(features: Tensor) -> float:
    """Mean cosine between different rows (C×D); 1 for a single row."""
    count = len(features)
    if count < 2:
        return 1.0
    unit = nn.functional.normalize(features.double(), dim=-1)
    return float((unit.sum(0).square().sum() - unit.square().sum()) / (count * (count - 1)))


def agreement(maps: Tensor, others: Tensor) -> float:
    """Mean over the cores of the correlation between two maps of the same core (C×N each)."""
    first, second = (x.double() - x.double().mean(-1, keepdim=True) for x in (maps, others))
    return float(nn.functional.cosine_similarity(first, second, dim=-1, eps=1e-12).mean())


def resized(maps: Tensor, grid: tuple[int, int], to: tuple[int, int]) -> Tensor:
    """Maps (C×N) of one grid on another, averaging where it is coarser."""
    image = maps.reshape(1, -1, *grid).float()  # 1×C×h×w
    if to[0] <= grid[0] and to[1] <= grid[1]:
        return nn.functional.adaptive_avg_pool2d(image, to)[0].flatten(1)
    return nn.functional.interpolate(image, size=to, mode="bilinear", align_corners=False)[0].flatten(1)


def flipped(maps: Tensor, grid: tuple[int, int]) -> Tensor:
    """Maps (C×N) mirrored left to right."""
    return maps.reshape(-1, *grid).flip(-1).flatten(1)


def window(maps: Tensor, grid: tuple[int, int], box: tuple[int, int, int, int]) -> Tensor:
    """The part of maps (C×N) inside rows and columns `box` = (top, left, bottom, right)."""
    top, left, bottom, right = box
    return maps.reshape(-1, *grid)[:, top:bottom, left:right].flatten(1)


def best_iou(maps: Tensor, regions: Tensor) -> Tensor:
    """For each region (R×N, boolean) the overlap with the core that matches it best, IoU in 0…1: R.

    A core's map becomes a set by taking its strongest patches, as many as the region has: no threshold to choose.
    """
    order = maps.argsort(dim=-1, descending=True).argsort(dim=-1)  # the rank of each patch in each map, C×N
    chosen = order[None] < regions.sum(-1)[:, None, None]  # R×C×N
    both = (chosen & regions[:, None]).sum(-1)
    either = (chosen | regions[:, None]).sum(-1)
    return (both / either.clamp_min(1)).amax(-1)


def purity(maps: Tensor, labels: Tensor) -> float:
    """Each patch goes to the core whose map is strongest there: the share that has its group's commonest label.

    `labels` (N) is −1 where a patch has none; those are left out.
    """
    known = labels >= 0
    owner, label = maps[:, known].argmax(0), labels[known]
    if not len(label):
        return float("nan")
    counts = torch.zeros(len(maps), int(label.max()) + 1, dtype=torch.long)
    counts.index_put_((owner, label), torch.ones_like(label), accumulate=True)
    return float(counts.amax(-1).sum() / len(label))


def shape_of_maps(maps: Tensor, grid: tuple[int, int]) -> tuple[float, float]:
    """Isotropy and spread of maps (C×N), averaged over the cores.

    Both come from the covariance of a map's excess over its own mean, on the plane of the photo. Isotropy is the ratio
    of the short to the long axis: 1 is round, 0 a line. Spread is the standard deviation in shorter sides.
    """
    centres = patch_plane(grid).double()
    weight = (maps.double() - maps.double().mean(-1, keepdim=True)).clamp_min(0)
    weight = weight / weight.sum(-1, keepdim=True).clamp_min(1e-30)
    middle = weight @ centres  # C×2
    away = centres[None] - middle[:, None]  # C×N×2
    covariance = torch.einsum("cn,cni,cnj->cij", weight, away, away)
    axes = torch.linalg.eigvalsh(covariance).clamp_min(0)  # C×2, ascending
    ratio = (axes[:, 0] / axes[:, 1].clamp_min(1e-30)).sqrt()
    return float(ratio.mean()), float(axes.sum(-1).sqrt().mean())


def similarity_by_distance(patches: Tensor, grid: tuple[int, int], pairs: int = 20_000) -> tuple[Tensor, Tensor]:
    """Sum of cosines and number of pairs per bin of distance (BINS each), over random pairs of patches (N×D)."""
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randint(len(patches), (2, pairs), generator=generator)
    apart = first != second
    first, second = first[apart], second[apart]
    centres = patch_plane(grid)
    distance = (centres[first] - centres[second]).norm(dim=-1)
    cosine = nn.functional.cosine_similarity(patches[first].float(), patches[second].float(), dim=-1).double()
    inside = distance < 1
    place = (distance[inside] * BINS).long()
    total = torch.zeros(BINS, dtype=torch.double).index_add_(0, place, cosine[inside])
    return total, torch.bincount(place, minlength=BINS).double()


def half_distance(cosine: Tensor) -> float:
    """The distance (in shorter sides) at which similarity has fallen half way from near to far; BINS values, in order.

    Near is the first bin that has pairs, far the mean of the last quarter. Not a number where nothing falls.
    """
    known = cosine.isfinite().nonzero()[:, 0]
    values = cosine[known]
    if len(values) < 4 or not values[0] > values[-len(values) // 4 :].mean():
        return float("nan")
    level = (values[0] + values[-len(values) // 4 :].mean()) / 2
    below = int((values < level).nonzero()[0, 0])
    step = (values[below - 1] - level) / (values[below - 1] - values[below])
    centres = (known.double() + 0.5) / BINS
    return float(centres[below - 1] + step * (centres[below] - centres[below - 1]))


def path_length(places: Tensor) -> float:
    """How far a core goes from its first layer to its last (places: L×C×2 in −1…1): mean over cores, in image sides."""
    return float(places.double().diff(dim=0).norm(dim=-1).sum(0).mean()) / 2


def parting(places: Tensor) -> float:
    """How far a core ends from where it ends on average over photos (places: P×C×2 in −1…1): the same mean."""
    return float((places.double() - places.double().mean(0)).norm(dim=-1).mean()) / 2


def patch_plane(grid: tuple[int, int]) -> Tensor:
    """Centres of the patches (N×2) in units of the shorter side."""
    height, width = grid
    y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    return torch.stack((x, y), dim=-1).flatten(0, 1) / min(grid)
