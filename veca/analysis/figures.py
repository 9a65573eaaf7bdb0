"""The paper's figures of features and similarity (Figs. 3, 4 and 6); `core_figures` has those about the layers.

Each function computes arrays, draws them and returns both. Coordinates in the arrays are (x, y) in 0…1 from the top
left; grids are h×w in row-major order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from veca.analysis.drawing import MAP, Picture, Sheet, mark, overlay
from veca.analysis.photos import Features, Photo, features, photo_tensor, pixels
from veca.analysis.projection import Method, align, colours, project, unit
from veca.analysis.similarity import cosine_map, patch_at, patch_centre, typical_patches
from veca.backbones import Backbone
from veca.errors import InputError
from veca.images import SIZE


def features_figure(
    photos: Sequence[Photo],
    backbones: Sequence[Backbone],
    sizes: Sequence[int] = (256, 512, 1024),
    method: Method = "pca",
    cores: int | None = None,
) -> Picture:
    """Dense features as colours at several sizes, over the photo, and global-to-patch cosine (Fig. 3)."""
    asked = [(b, p, s) for b in range(len(backbones)) for p in range(len(photos)) for s in range(len(sizes))]
    found = {key: features(backbones[key[0]], photos[key[1]], sizes[key[2]], cores) for key in asked}
    painted = dict(
        zip(asked, joint_colours([found[key] for key in asked], [b for b, _, _ in asked], method), strict=True)
    )
    arrays: dict[str, np.ndarray] = {"sizes": np.array(sizes)}
    columns = ["photo", *(f"{size} px" for size in sizes), "over the photo", "global to patch"]
    rows = [(photo.name, backbone.name, photo.aspect) for photo in photos for backbone in backbones]
    sheet = Sheet(
        "Dense features",
        f"The feature of every patch as a colour ({method.upper()} to three dimensions, one fit for all sizes"
        f"{', photos' if len(photos) > 1 else ''}{' and models' if len(backbones) > 1 else ''}): patches of similar "
        "colour have similar features. Right: cosine of the global feature to every patch.",
        columns,
        rows,
    )
    cosines = {key: cosine_map(found[key].cls, found[key].patches).numpy() for key in asked if key[2] == len(sizes) - 1}
    low, high = limits(list(cosines.values()))
    for p, photo in enumerate(photos):
        for b in range(len(backbones)):
            row = p * len(backbones) + b
            sheet.picture(row, 0, pixels(photo))
            for s, size in enumerate(sizes):
                grid = found[b, p, s].grid
                picture = painted[b, p, s].reshape(*grid, 3)
                sheet.picture(row, 1 + s, picture)
                arrays[f"colours_{b}_{p}_{size}"] = picture
            sheet.picture(row, len(sizes) + 1, overlay(pixels(photo), picture))
            cosine = cosines[b, p, len(sizes) - 1].reshape(grid)
            sheet.picture(row, len(sizes) + 2, cosine, cmap=MAP, vmin=low, vmax=high)
            arrays[f"global_{b}_{p}"] = cosine
    sheet.bar(low, high, ("unlike", "like the whole"), "cosine of the global feature to each patch")
    return Picture(sheet, arrays)


def joint_colours(maps: Sequence[Features], models: Sequence[int], method: Method) -> list[np.ndarray]:
    """Colours (N×3) for every map: one fit per feature width, later widths turned to agree with the first.

    Each model's own mean is taken off first, so that no colour is spent on telling the models apart.
    """
    groups = [unit(found.patches) for found in maps]
    for model in set(models):
        own = [index for index, owner in enumerate(models) if owner == model]
        mean = np.mean([groups[index].mean(0) for index in own], axis=0)
        for index in own:
            groups[index] = groups[index] - mean
    widths = list(dict.fromkeys(group.shape[1] for group in groups))
    placed: dict[int, np.ndarray] = {}
    for width in widths:
        members = [index for index, group in enumerate(groups) if group.shape[1] == width]
        points = project([groups[index] for index in members], method)
        if width != widths[0]:
            like = np.concatenate([resample(placed[0], maps[0].grid, maps[index].grid) for index in members])
            turn = align(np.concatenate(points), like)
            points = [group @ turn for group in points]
        placed.update(zip(members, points, strict=True))
    return colours([placed[index] for index in range(len(maps))])


def resample(rows: np.ndarray, grid: tuple[int, int], to: tuple[int, int]) -> np.ndarray:
    """Rows of one grid at the nearest places of another."""
    down = (np.arange(to[0]) * grid[0]) // to[0]
    across = (np.arange(to[1]) * grid[1]) // to[1]
    values: np.ndarray = rows.reshape(*grid, -1)[down][:, across].reshape(to[0] * to[1], -1)
    return values


def similarity_figure(
    photos: Sequence[Photo],
    backbones: Sequence[Backbone],
    points: Sequence[tuple[float, float]] = (),  # pixels of the first photo
    size: int = SIZE,
    cores: int | None = None,
) -> Picture:
    """Cosine of chosen patches of the first photo to all patches of every photo (Fig. 4)."""
    first = photos[0]
    maps = [[features(backbone, photo, size, cores) for photo in photos] for backbone in backbones]
    if not points:
        own = maps[0][0]
        points = [patch_centre(index, first.image.size, own.grid) for index in typical_patches(own.patches, 4)]
    # cosines[b][p]: points × N
    cosines = [
        [
            cosine_map(of_photos[0].patches[[patch_at(*at, first.image.size, of_photos[0].grid) for at in points]],
                       found.patches).numpy()
            for found in of_photos
        ]
        for of_photos in maps
    ]  # fmt: skip
    low, high = limits([values for row in cosines for values in row])[0], 1.0
    at = np.array(points, dtype=np.float32) / np.array(first.image.size, dtype=np.float32)
    letters = [chr(ord("A") + index) if index < 26 else str(index) for index in range(len(points))]
    sheet = Sheet(
        "A patch to all patches",
        "Cosine similarity of the patch in each ring to every patch"
        + (
            f"; the rings are in {first.name}, the rows below ask where the other photo is alike."
            if len(photos) > 1
            else "."
        ),
        ["photo", *(f"patch {letter} ({x:.0f}, {y:.0f})" for letter, (x, y) in zip(letters, points, strict=True))],
        [(photo.name, backbone.name, photo.aspect) for photo in photos for backbone in backbones],
    )
    arrays: dict[str, np.ndarray] = {"points": at}
    for p, photo in enumerate(photos):
        for b in range(len(backbones)):
            row, grid = p * len(backbones) + b, maps[b][p].grid
            axes = sheet.picture(row, 0, pixels(photo))
            for index, letter in enumerate(letters):
                values = cosines[b][p][index].reshape(grid)
                panel = sheet.picture(row, 1 + index, values, cmap=MAP, vmin=low, vmax=high)
                if p == 0:
                    mark(axes, at[index, 0], at[index, 1], letter)
                    mark(panel, at[index, 0], at[index, 1])
            arrays[f"cosine_{b}_{p}"] = cosines[b][p].reshape(-1, *grid)
    sheet.bar(low, high, ("unlike", "alike"), "cosine similarity")
    return Picture(sheet, arrays)


@torch.inference_mode()
def cores_figure(
    photos: Sequence[Photo],
    backbones: Sequence[Backbone],
    chosen: Sequence[int] = (),
    size: int = SIZE,
    cores: int | None = None,
) -> Picture:
    """Cosine of chosen cores to all patches (Fig. 6)."""
    arrays: dict[str, np.ndarray] = {}
    maps, dots, grids = [], [], []
    budget = min(cores or backbone.veca.default_cores for backbone in backbones)
    chosen = list(chosen) or list(range(min(6, budget)))
    if wrong := [index for index in chosen if not 0 <= index < budget]:
        raise InputError(f"there is no core {wrong[0]}: at this budget they are 0 to {budget - 1}")
    for p, photo in enumerate(photos):
        for b, backbone in enumerate(backbones):
            images, grid = photo_tensor(photo, backbone.veca, size, backbone.device)
            out = backbone.veca(images, cores=cores)
            maps.append(cosine_map(out.cores[0].cpu(), out.patches[0].cpu())[chosen].numpy().reshape(-1, *grid))
            dots.append((out.coords[0, chosen].cpu().numpy() + 1) / 2)
            grids.append(grid)
            arrays[f"cosine_{b}_{p}"], arrays[f"coords_{b}_{p}"] = maps[-1], dots[-1]
    arrays["cores"] = np.array(chosen)
    rows = [(photo.name, backbone.name, photo.aspect) for photo in photos for backbone in backbones]
    low, high = limits(maps)
    sheet = Sheet(
        "Cores to all patches",
        "Cosine similarity of each core's output feature to every patch; the ring is where the core sits in the last "
        "layer. Core 0 gives the global feature.",
        ["photo", *(f"core {index}" for index in chosen)],
        rows,
    )
    for row, (values, places) in enumerate(zip(maps, dots, strict=True)):
        sheet.picture(row, 0, pixels(photos[row // len(backbones)]))
        for index, (x, y) in enumerate(places):
            mark(sheet.picture(row, 1 + index, values[index], cmap=MAP, vmin=low, vmax=high), x, y)
    sheet.bar(low, high, ("unlike", "alike"), "cosine similarity")
    return Picture(sheet, arrays)


def limits(maps: Sequence[np.ndarray]) -> tuple[float, float]:
    """The range of colours: all but the outermost 1 % of what is shown."""
    low, high = np.percentile(np.concatenate([values.ravel() for values in maps]), (1, 99))
    return float(low), float(max(high, low + 1e-6))
