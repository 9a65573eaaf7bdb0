"""`veca explore --metrics DATA`: numbers about the cores of each model, averaged over photos, as JSON.

docs/research/cores.md says what each number means. DATA is a folder of photos, or one with `images/` and `masks/`
(perhaps inside `val/`), whose masks name the labelled regions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from veca.analysis import core_metrics as measure
from veca.analysis.contributions import contributions
from veca.analysis.core_figures import usable_budgets
from veca.analysis.photos import Photo, features, open_photo, photo_tensor
from veca.backbones import Backbone
from veca.errors import InputError
from veca.folders import walk
from veca.images import SIZE, stored_values
from veca.model import Veca

KINDS = ("reads", "read_by")
COMMON = (12, 12)  # the grid on which maps of different photos are compared


class Example(NamedTuple):
    photo: Photo
    mask: Image.Image | None  # class numbers, 255 = no label


class Maps(NamedTuple):
    """The maps of all layers of one photo."""

    grid: tuple[int, int]
    reads: list[Tensor]  # per layer C×N
    read_by: list[Tensor]


def find_examples(data: Path, limit: int) -> list[tuple[Path, Path | None]]:
    """Photos of a folder, evenly spread over its list, each with its mask where there is one."""
    if not data.is_dir():
        raise InputError(f"{data} is not a folder of photos")
    top = next((folder for folder in (data, data / "val", data / "test") if (folder / "images").is_dir()), None)
    folder = data if top is None else top / "images"
    photos = sorted(folder / name for name in walk(folder).images)
    if not photos:
        raise InputError(f"no photos in {folder}")
    photos = [photos[index * len(photos) // min(limit, len(photos))] for index in range(min(limit, len(photos)))]
    masks = [None if top is None else top / "masks" / f"{path.stem}.png" for path in photos]
    return [(path, mask if mask and mask.is_file() else None) for path, mask in zip(photos, masks, strict=True)]


def open_example(path: Path, mask: Path | None) -> Example:
    photo = open_photo(path)
    if mask is None:
        return Example(photo, None)
    values = stored_values(mask)
    if values.dtype != np.uint8 or values.ndim != 2:
        raise InputError(f"{mask} is not a mask: it must hold class numbers (a palette or grey PNG)")
    return Example(photo, Image.fromarray(values))


def measure_models(
    backbones: Sequence[Backbone], data: Path, size: int = SIZE, cores: int | None = None, limit: int = 32
) -> list[dict[str, Any]]:
    """One table of numbers per model; a teacher, which has no cores, gets its locality only."""
    found = find_examples(data, limit)
    results = []
    for backbone in backbones:
        results.append({"model": backbone.name, "data": str(data), "photos": len(found), "size": size})
        if isinstance(backbone.model, Veca):
            results[-1] |= {
                "attention": backbone.model.config.attention,
                "cores": cores or backbone.model.default_cores,
            }
            results[-1] |= measure_cores(backbone, found, size, cores)
            results[-1]["movement"] = movement(backbone, found, size, cores)
        results[-1]["locality"] = locality(backbone, found, size, cores)
    return results


@torch.inference_mode()
def measure_cores(
    backbone: Backbone, found: Sequence[tuple[Path, Path | None]], size: int, cores: int | None
) -> dict[str, Any]:
    model = backbone.veca
    rows: list[dict[str, Any]] = []
    before: Maps | None = None
    for path in found:
        example = open_example(*path)
        images, grid = photo_tensor(example.photo, model, size, backbone.device)
        maps = core_maps(backbone, example.photo, size, cores)
        row: dict[str, Any] = {
            "redundancy": redundancy(model, images, cores),
            "isotropy": {kind: [measure.shape_of_maps(m, grid)[0] for m in getattr(maps, kind)] for kind in KINDS},
            "spread": {kind: [measure.shape_of_maps(m, grid)[1] for m in getattr(maps, kind)] for kind in KINDS},
            "stability": stability(backbone, example.photo, maps, before, size, cores),
        }
        if example.mask is not None:
            row["regions"] = regions(example.mask, maps, before)
        rows.append(row)
        before = maps
    average = mean_of([{key: value for key, value in row.items() if value} for row in rows])
    assert isinstance(average, dict)
    return average


@torch.inference_mode()
def movement(
    backbone: Backbone, found: Sequence[tuple[Path, Path | None]], size: int, cores: int | None
) -> dict[str, Any]:
    """How far cores go through the layers, and how far apart one core ends on different photos."""
    paths = []
    for path, _ in found:
        images, _ = photo_tensor(open_photo(path), backbone.model, size, backbone.device)
        paths.append(torch.stack(backbone.veca.forward_layers(images, cores).coords)[:, 0].cpu())  # L×C×2
    return {
        "path_length": plain(float(np.mean([measure.path_length(places) for places in paths]))),
        "parting": plain(measure.parting(torch.stack([places[-1] for places in paths]))),
    }


def core_maps(backbone: Backbone, photo: Photo, size: int, cores: int | None) -> Maps:
    images, grid = photo_tensor(photo, backbone.model, size, backbone.device)
    layers = backbone.veca.forward_layers(images, cores)
    found = list(contributions(backbone.veca, images, layers))
    return Maps(grid, [layer.reads[0].cpu() for layer in found], [layer.read_by[0].cpu() for layer in found])


def redundancy(model: Veca, images: Tensor, cores: int | None) -> dict[str, Any]:
    """Of the output features by budget, and of the normalised features by layer at the budget asked for."""
    table: dict[str, Any] = {"by_budget": {}}
    for budget in usable_budgets(model, (8, 16, 32, 64)):
        out = model(images, cores=budget).cores[0]
        table["by_budget"][str(budget)] = rank_and_cosine(out)
    layers = model.forward_layers(images, cores)
    active = layers.coords[0].shape[1]
    by_layer = [rank_and_cosine(model.norm(tokens[0, :active])) for tokens in layers.tokens]
    return table | {"by_layer": {key: [row[key] for row in by_layer] for key in by_layer[0]}}


def rank_and_cosine(core_features: Tensor) -> dict[str, float]:
    core_features = core_features.cpu()
    return {
        "effective_rank": measure.effective_rank(core_features),
        "mean_cosine": measure.mean_cosine(core_features),
    }


def stability(
    backbone: Backbone, photo: Photo, maps: Maps, before: Maps | None, size: int, cores: int | None
) -> dict[str, Any]:
    """Correlation of each core's map with its map of a changed photo, brought back to the same patches."""
    rows, columns = maps.grid
    mirrored = core_maps(backbone, Photo("mirrored", ImageOps.mirror(photo.image)), size, cores)
    larger = core_maps(backbone, photo, size * 3 // 2, cores)
    box = (rows // 8, columns // 8, rows - rows // 8, columns - columns // 8)
    unit_x, unit_y = photo.image.width / columns, photo.image.height / rows
    crop = (round(box[1] * unit_x), round(box[0] * unit_y), round(box[3] * unit_x), round(box[2] * unit_y))
    cropped = core_maps(backbone, Photo("cropped", photo.image.crop(crop)), size, cores)
    inner = (box[2] - box[0], box[3] - box[1])
    table: dict[str, Any] = {name: {} for name in ("flip", "crop", "scale")}
    for kind in KINDS:
        own: list[Tensor] = getattr(maps, kind)
        pairs = {
            "flip": [(m, measure.flipped(o, maps.grid)) for m, o in zip(own, getattr(mirrored, kind), strict=True)],
            "crop": [
                (measure.window(m, maps.grid, box), measure.resized(o, cropped.grid, inner))
                for m, o in zip(own, getattr(cropped, kind), strict=True)
            ],
            "scale": [
                (m, measure.resized(o, larger.grid, maps.grid)) for m, o in zip(own, getattr(larger, kind), strict=True)
            ],
        }
        for name, values in pairs.items():
            table[name][kind] = [measure.agreement(m, o) for m, o in values]
        if before is not None:  # the same core in another photo: what a core fixed to its place would reach
            table.setdefault("other_photo", {})[kind] = [
                measure.agreement(measure.resized(m, maps.grid, COMMON), measure.resized(o, before.grid, COMMON))
                for m, o in zip(own, getattr(before, kind), strict=True)
            ]
    return table


def regions(mask: Image.Image, maps: Maps, before: Maps | None) -> dict[str, Any]:
    """How well cores match labelled regions; beside it the same for the maps of another photo, which know nothing."""
    labels = patch_labels(mask, maps.grid)
    present = [label for label in labels.unique().tolist() if label > 0]  # 0 is background
    inside = torch.stack([labels == label for label in present]) if present else None
    table: dict[str, Any] = {"one_region_purity": measure.purity(torch.ones(1, len(labels)), labels)}
    for kind in KINDS:
        own = getattr(maps, kind)
        table[kind] = scores(own, labels, inside)
        if before is not None:
            others = [measure.resized(m, before.grid, maps.grid) for m in getattr(before, kind)]
            table[kind] |= {f"{name}_of_another_photo": value for name, value in scores(others, labels, inside).items()}
    return table


def scores(maps: Sequence[Tensor], labels: Tensor, inside: Tensor | None) -> dict[str, list[float]]:
    table = {"purity": [measure.purity(m, labels) for m in maps]}
    if inside is not None:
        table["best_iou"] = [float(measure.best_iou(m, inside).mean()) for m in maps]
    return table


def patch_labels(mask: Image.Image, grid: tuple[int, int]) -> Tensor:
    """The commonest label inside each patch (N), −1 where most of it has none."""
    fine = 8  # samples along each side of a patch
    values = np.asarray(mask.resize((grid[1] * fine, grid[0] * fine), Image.Resampling.NEAREST)).astype(np.int64)
    values = np.where(values == 255, -1, values)
    blocks = values.reshape(grid[0], fine, grid[1], fine).transpose(0, 2, 1, 3).reshape(grid[0] * grid[1], -1)
    return torch.from_numpy(blocks).mode(dim=-1).values


def locality(
    backbone: Backbone, found: Sequence[tuple[Path, Path | None]], size: int, cores: int | None
) -> dict[str, Any]:
    """How fast the similarity of two patches falls with their distance, over all photos."""
    total = torch.zeros(2, measure.BINS, dtype=torch.double)
    for path, _ in found:
        seen = features(backbone, open_photo(path), size, cores)
        total += torch.stack(measure.similarity_by_distance(seen.patches, seen.grid))
    cosine = total[0] / total[1]
    centres = [(index + 0.5) / measure.BINS for index in range(measure.BINS)]
    return {
        "half_distance": plain(measure.half_distance(cosine)),
        "distance": [round(centre, 4) for centre in centres],
        "cosine": [plain(value) for value in cosine.tolist()],
    }


def mean_of(rows: Sequence[Any]) -> Any:
    """The mean of equally shaped tables; a key that some rows lack is averaged over those that have it."""
    if isinstance(rows[0], dict):
        keys = dict.fromkeys(key for row in rows for key in row)
        return {key: mean_of([row[key] for row in rows if key in row]) for key in keys}
    if isinstance(rows[0], list):
        return [mean_of(values) for values in zip(*rows, strict=True)]
    return plain(float(np.nanmean(rows)) if not all(map(math.isnan, rows)) else math.nan)


def plain(value: float) -> float | None:
    """JSON has no NaN: null says that there is no such number."""
    return round(value, 4) if math.isfinite(value) else None


def summary(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The lines a person wants first; `last` is the last layer, `best` the best layer."""
    lines = []
    if "redundancy" in result:
        for budget, row in result["redundancy"]["by_budget"].items():
            both = f"effective rank {row['effective_rank']:.1f}, mean cosine {row['mean_cosine']:.2f}"
            lines.append((f"redundancy, {budget} cores", both))
        for name, kinds in result["stability"].items():
            lines.append((f"stability, {name}", "  ".join(f"{kind} {np.mean(kinds[kind]):.2f}" for kind in KINDS)))
        moved = "path {path_length:.3f}, apart on different photos {parting:.3f}, of the image's side"
        lines.append(("movement of the cores", moved.format(**result["movement"])))
        lines.append(("isotropy", "  ".join(f"{kind} {np.mean(result['isotropy'][kind]):.2f}" for kind in KINDS)))
    if "regions" in result:
        for kind in KINDS:
            table = result["regions"][kind]
            best = "  ".join(f"{name} {max(values):.2f}" for name, values in table.items())
            lines.append((f"regions, {kind}, best layer", best.replace("_of_another_photo", " (other photo)")))
    half = result["locality"]["half_distance"]
    lines.append(("locality, half distance", "does not fall" if half is None else f"{half:.3f} of the shorter side"))
    return lines
