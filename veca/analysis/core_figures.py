"""Figures about the cores on their way through the layers: Fig. 7 (A.9), their paths, and what budgets lose."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from veca.analysis.contributions import contributions
from veca.analysis.drawing import GAP, MAP, QUIET, Picture, Sheet
from veca.analysis.figures import limits
from veca.analysis.photos import Photo, features, photo_tensor, pixels
from veca.analysis.projection import Method, colours, project
from veca.analysis.similarity import cosine_map
from veca.backbones import Backbone
from veca.errors import InputError, require
from veca.images import SIZE
from veca.model import Veca

BUDGETS = (8, 16, 32, 64)


def usable_budgets(model: Veca, budgets: Sequence[int]) -> list[int]:
    """The budgets asked for that this bank has, in order; its own size where none is."""
    return sorted({budget for budget in budgets if 1 <= budget <= model.config.bank}) or [model.config.bank]


@torch.inference_mode()
def profiles(backbone: Backbone, photo: Photo, budgets: Sequence[int], size: int) -> tuple[np.ndarray, tuple[int, int]]:
    """Contribution profiles over the active cores: budgets × layers × N × M, zero for cores that are not active."""
    model = backbone.veca
    images, grid = photo_tensor(photo, model, size, backbone.device)
    found = np.zeros((len(budgets), model.depth, grid[0] * grid[1], max(budgets)), dtype=np.float32)
    for row, budget in enumerate(budgets):
        layers = model.forward_layers(images, budget)
        for index, layer in enumerate(contributions(model, images, layers)):
            found[row, index, :, :budget] = layer.patches[0].float().cpu().numpy()
    return found, grid


def layers_figure(
    photos: Sequence[Photo],
    backbones: Sequence[Backbone],
    budgets: Sequence[int] = BUDGETS,
    method: Method = "umap",
    size: int = SIZE,
) -> Picture:
    """Layers × budgets, patches coloured by a joint projection of their contribution profiles (Fig. 7, A.9)."""
    photo, backbone = one(photos, "photo"), one(backbones, "model")
    if backbone.veca.depth < 2:
        raise InputError(f"{backbone.name} has one layer only, and this figure leaves the first one out")
    budgets = usable_budgets(backbone.veca, budgets)
    found, grid = profiles(backbone, photo, budgets, size)
    depth = found.shape[1]
    # Square roots, so that Euclidean distance is Hellinger's, the distance between distributions. The even share of
    # each budget is taken off: no colour is then spent on telling 8 cores from 64.
    groups = [
        np.sqrt(found[row, layer]) - np.where(np.arange(found.shape[-1]) < budget, budget**-0.5, 0).astype(np.float32)
        for row, budget in enumerate(budgets)
        for layer in range(1, depth)
    ]
    painted = np.stack(colours(project(groups, method))).reshape(len(budgets), depth - 1, *grid, 3)
    sheet = Sheet(
        "Which cores each patch listens to",
        f"{photo.name} · {backbone.name}. Each patch is coloured by its contribution profile, the share of its update "
        f"that comes from each active core: one {method.upper()} to three dimensions for the whole grid, each budget's "
        "even share taken off, so like colours mean like profiles. Rows: active cores. Columns: layers; the first, in "
        "which the cores have read nothing yet, is left out.",
        [f"layer {layer + 1}" for layer in range(1, depth)],
        [(f"{budget} cores", "", photo.aspect) for budget in budgets],
        panel=1.15,
        bar=False,
    )
    for row in range(len(budgets)):
        for column in range(depth - 1):
            sheet.picture(row, column, painted[row, column])
    arrays: dict[str, np.ndarray] = {
        "profiles": found[:, 1:].reshape(len(budgets), depth - 1, *grid, -1).astype(np.float16),
        "colours": painted,
        "budgets": np.array(budgets),
        "layers": np.arange(2, depth + 1),
    }
    return Picture(sheet, arrays)


@torch.inference_mode()
def positions_figure(
    photos: Sequence[Photo], backbones: Sequence[Backbone], size: int = SIZE, cores: int | None = None
) -> Picture:
    """Where the cores sit and how they move through the layers, over the photo."""
    colormaps = require("matplotlib", "explore").colormaps
    rows = [(photo, backbone) for photo in photos for backbone in backbones]
    sheet = Sheet(
        "Where the cores sit",
        "The path of each core from the first layer (dark) to the last (light, with its number: the first of the bank "
        "are active at every budget). Right: how far the median core goes before each layer (band: 10 to 90 %).",
        ["first to last layer", "", "step, % of the photo's side"],
        [(photo.name, backbone.name, photo.aspect * 2 + GAP / 2.6) for photo, backbone in rows],
        panel=2.6,
        bar=False,
    )
    arrays: dict[str, np.ndarray] = {}
    for row, (photo, backbone) in enumerate(rows):
        model = backbone.veca
        images, _ = photo_tensor(photo, model, size, backbone.device)
        coords = torch.stack(model.forward_layers(images, cores).coords)[:, 0].cpu().numpy()  # L×C×2
        paths = (coords + 1) / 2
        arrays[f"coords_{backbones.index(backbone)}_{photos.index(photo)}"] = paths
        axes = sheet.axes(row, 0, span=2)
        grey = pixels(photo).astype(np.float32).mean(-1)
        axes.imshow(grey, extent=(0, 1, 1, 0), aspect="auto", cmap="gray", vmin=-120, vmax=330)
        axes.set(xlim=(0, 1), ylim=(1, 0))
        depth = len(paths)
        for core in range(paths.shape[1]):
            for layer in range(depth - 1):
                colour = colormaps[MAP](0.15 + 0.85 * layer / max(1, depth - 2))
                axes.plot(*paths[layer : layer + 2, core].T, color=colour, lw=1.6, solid_capstyle="round")
            x, y = paths[-1, core]
            size_of_dot = 5.2 if core < 8 else 3.6
            axes.plot(x, y, "o", ms=size_of_dot, mfc="#fde725", mec="#101418", mew=0.8)
            if core < 16:
                axes.annotate(str(core), (x, y), (4, 3), textcoords="offset points", size=6, color="white")
        moved = np.linalg.norm(np.diff(coords, axis=0), axis=-1)  # L−1 × C, in half photos
        lines = sheet.line_axes(row, 2)
        if depth > 1:
            steps = np.arange(2, depth + 1)
            low, middle, high = np.percentile(moved * 50, (10, 50, 90), axis=1)
            lines.fill_between(steps, low, high, color="#31688e", alpha=0.15, lw=0)
            lines.plot(steps, middle, color="#31688e", lw=1.6)
            lines.set_xticks(steps if depth <= 13 else steps[::4])
        lines.set_ylim(bottom=0)
        lines.set_xlabel("before layer", fontsize=8, color=QUIET)
        if not moved.any():  # a model that turns nothing by position gives its cores no reason to move
            lines.set_ylim(0, 1)
            lines.text(0.5, 0.5, "no core moves", ha="center", size=8, color=QUIET, transform=lines.transAxes)
    return Picture(sheet, arrays)


def budgets_figure(
    photos: Sequence[Photo], backbones: Sequence[Backbone], budgets: Sequence[int] = BUDGETS, size: int = SIZE
) -> Picture:
    """What each budget loses: cosine to the full budget, per patch and overall."""
    rows = [(photo, backbone) for photo in photos for backbone in backbones]
    banks = {backbone.veca.config.bank for backbone in backbones}
    if len(banks) > 1:
        raise InputError(f"these models have banks of different sizes ({sorted(banks)}): compare them one by one")
    full = banks.pop()
    smaller = [budget for budget in usable_budgets(backbones[0].veca, budgets) if budget < full]
    if not smaller:
        raise InputError(f"give a budget smaller than the bank of {full} cores (--budgets)")
    found = []
    arrays: dict[str, np.ndarray] = {"budgets": np.array([*smaller, full])}
    for photo, backbone in rows:
        whole = features(backbone, photo, size, full)
        parts = [features(backbone, photo, size, budget) for budget in smaller]
        patch = torch.stack([torch.cosine_similarity(part.patches, whole.patches, dim=-1) for part in parts]).numpy()
        cls = torch.stack([cosine_map(part.cls, whole.cls[None])[0] for part in parts]).numpy()
        found.append((patch.reshape(-1, *whole.grid), cls))
        name = f"{backbones.index(backbone)}_{photos.index(photo)}"
        arrays[f"patches_{name}"], arrays[f"global_{name}"] = found[-1]
    low, high = limits([patch for patch, _ in found])[0], 1.0
    sheet = Sheet(
        "What each budget loses",
        f"Cosine of every patch's feature at a smaller budget to its feature with all {full} cores: bright patches "
        "keep theirs. Right: the mean over patches (band: 10 to 90 %) and the global feature.",
        ["photo", *(f"{budget} cores" for budget in smaller), "overall"],
        [(photo.name, backbone.name, photo.aspect) for photo, backbone in rows],
    )
    for row, ((photo, _), (patch, cls)) in enumerate(zip(rows, found, strict=True)):
        sheet.picture(row, 0, pixels(photo))
        for column, values in enumerate(patch):
            sheet.picture(row, 1 + column, values, cmap=MAP, vmin=low, vmax=high)
        lines = sheet.line_axes(row, 1 + len(patch))
        steps = [*smaller, full]
        flat = np.concatenate((patch.reshape(len(patch), -1), np.ones((1, patch[0].size))))
        lines.fill_between(steps, *np.percentile(flat, (10, 90), axis=1), color="#31688e", alpha=0.15, lw=0)
        lines.plot(steps, flat.mean(1), "o-", ms=3, lw=1.5, color="#31688e", label="patches")
        lines.plot(steps, [*cls, 1], "o--", ms=3, lw=1.2, color=QUIET, label="global")
        lines.set_xticks(steps)
        lines.set_xlabel("active cores", fontsize=8, color=QUIET)
        lines.legend(fontsize=7, frameon=False, loc="lower right")
    sheet.bar(low, high, ("changed", "kept"), f"cosine to the feature at {full} cores")
    return Picture(sheet, arrays)


def one(items: Sequence[Photo] | Sequence[Backbone], kind: str):  # type: ignore[no-untyped-def]
    if len(items) != 1:
        raise InputError(f"this figure shows one {kind} at a time, not {len(items)}")
    return items[0]
