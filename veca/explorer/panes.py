"""What a pane of the page knows of one photo and one model, per layer and budget, packed for the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from veca.analysis.contributions import contributions
from veca.analysis.photos import Photo, features, photo_tensor
from veca.analysis.projection import Array, Pca, align, colours
from veca.backbones import Backbone
from veca.explorer.pack import LAST, OTHERS, Blob, Precision, basis, low_cosine, quantised, shares
from veca.mixed import choose_cells
from veca.model import Veca
from veca.scan import scanned


class Seen(NamedTuple):
    """One layer at one budget."""

    patches: Tensor  # N×D, unit vectors; after `reduced`, N×k coordinates
    finer: Tensor | None  # the same on a finer lattice: the last layer of a model that is looked at with a stride
    cores: Tensor  # C×D; a teacher's class token stands for the only core
    coords: Tensor | None  # C×2
    reads: Tensor | None  # C×N
    read_by: Tensor | None  # C×N


class View(NamedTuple):
    """One photo through one model: `steps[layer][budget]`."""

    grid: tuple[int, int]
    fine: tuple[int, int] | None  # the lattice of `Seen.finer`
    budgets: list[int]  # empty where the model has no cores
    steps: list[list[Seen]]
    cells: Tensor | None = None  # T×3, as `Cells.places`: what stands for the patches when SHARE of them are spent


SHARE = 0.5


@torch.inference_mode()
def look(
    backbone: Backbone, photo: Photo, size: int, budgets: Sequence[int], stride: int | None,
    between: Callable[[], None],
) -> View:  # fmt: skip
    """One photo through one model; `between` is called before each budget."""
    model = backbone.model
    if not isinstance(model, Veca):  # a teacher shows what it puts out: it has no cores to follow
        out = features(backbone, photo, size)
        return View(out.grid, None, [], [[Seen(unit(out.patches), None, unit(out.cls[None]), None, None, None)]])
    images, grid = photo_tensor(photo, model, size, backbone.device)
    steps: list[list[Seen]] = [[] for _ in range(model.depth)]
    fine: tuple[int, int] | None = None
    for budget in budgets:
        between()
        layers = model.forward_layers(images, budget)
        maps = contributions(model, images, layers)
        for index, (tokens, coords, layer) in enumerate(zip(layers.tokens, layers.coords, maps, strict=True)):
            final = model.norm(tokens[0])
            shown = unit((model.project(final) if index == model.depth - 1 else final).float().cpu())
            core_side = coords[0].cpu(), layer.reads[0].cpu(), layer.read_by[0].cpu()
            steps[index].append(Seen(shown[budget:], None, shown[:budget], *core_side))
        if stride is not None:
            scan = scanned(model, images, budget, stride=stride)
            steps[-1][-1], fine = steps[-1][-1]._replace(finer=unit(scan.patches[0].cpu())), scan.grid
    return View(grid, fine, list(budgets), steps, choose_cells(images, model.patch_size, SHARE).places[0].cpu())


def unit(rows: Tensor) -> Tensor:
    return nn.functional.normalize(rows.float(), dim=-1, eps=1e-6)


def reduced(views: Sequence[View]) -> list[View]:
    """Features of one model's views in one basis per layer: its photos can then be compared with each other."""
    steps: list[list[list[Seen]]] = [[] for _ in views]
    for index, layers in enumerate(zip(*(view.steps for view in views), strict=True)):  # the same layer of each view
        few = [seen.patches[:: max(1, len(seen.patches) // 512)] for layer in layers for seen in layer]
        rows = torch.cat([*few, *(seen.cores for layer in layers for seen in layer)])
        axes = basis(rows, precision(index, views[0]).directions)
        for place, layer in enumerate(layers):
            steps[place].append(
                [
                    s._replace(
                        patches=s.patches @ axes,
                        finer=None if s.finer is None else s.finer @ axes,
                        cores=s.cores @ axes,
                    )
                    for s in layer
                ]
            )
    return [view._replace(steps=own) for view, own in zip(views, steps, strict=True)]


def precision(layer: int, view: View) -> Precision:
    return LAST if layer == len(view.steps) - 1 else OTHERS


def pack_views(views: Sequence[View], blob: Blob) -> list[dict[str, Any]]:
    """The views of one model: bytes go to the blob, where they lie goes to the page's table."""
    feature_colours = layer_colours(views, lambda seen: seen.patches.numpy(), finer=True)
    has_cores = bool(views[0].budgets)
    profile_colours = layer_colours(views, profile, apart=True) if has_cores else None
    tables = []
    for place, view in enumerate(views):
        table: dict[str, Any] = {
            "grid": view.grid,
            **({"fine": view.fine} if view.fine else {}),
            **({"cells": [blob.add(view.cells.short().numpy()), len(view.cells)]} if view.cells is not None else {}),
            "budgets": view.budgets,
            "layers": [],
        }
        for index, layer in enumerate(view.steps):
            rows, steps = [], precision(index, view).steps
            for column, seen in enumerate(layer):
                features = seen.patches if seen.finer is None else seen.finer
                row: dict[str, Any] = {
                    "patches": blob.add(quantised(features, steps).T),  # k×N: one direction after the other
                    "cores": blob.add(quantised(seen.cores, steps)),
                    "directions": seen.patches.shape[1],
                    "low": round(low_cosine([v.steps[index][column].patches for v in views]), 4),
                    "colours": blob.add(feature_colours[place][index][column]),
                }
                if has_cores:
                    assert seen.coords is not None
                    assert seen.reads is not None
                    assert seen.read_by is not None
                    assert profile_colours is not None
                    row["coords"] = blob.add((seen.coords * 32767).round().to(torch.int16).numpy())
                    row["profiles"] = blob.add(profile_colours[place][index][column])
                    for name, maps in (("reads", seen.reads), ("readBy", seen.read_by)):
                        levels, top = shares(maps)
                        row[name], row[f"{name}Top"] = blob.add(levels), float(f"{top:.5g}")
                rows.append(row)
            table["layers"].append(rows)
        tables.append(table)
    return tables


def profile(seen: Seen) -> Array:
    """Square roots of the shares a patch takes from each core (N×C): distances are then Hellinger's."""
    assert seen.read_by is not None
    roots: Array = seen.read_by.T.sqrt().numpy()
    return roots


def layer_colours(
    views: Sequence[View], rows_of: Callable[[Seen], Array], apart: bool = False, finer: bool = False
) -> list[list[list[np.ndarray]]]:
    """Colours (N×3 uint8) as [view][layer][budget], from one PCA for all views and budgets (`apart`: for each budget).

    From the last layer back, each is turned to look like the one after it, so that colours do not jump. With `finer`,
    features on a finer lattice are painted in their place, by the same projection.
    """
    depth, stops = len(views[0].steps), len(views[0].steps[0])
    found = [[[np.empty(0)] * stops for _ in range(depth)] for _ in views]
    for together in [[stop] for stop in range(stops)] if apart else [list(range(stops))]:
        after: Array | None = None
        for index in reversed(range(depth)):
            places = [(view, stop) for view in range(len(views)) for stop in together]
            seen = [views[view].steps[index][stop] for view, stop in places]
            groups = [rows_of(one) for one in seen]
            fine = [
                one.finer.numpy() if finer and one.finer is not None else group
                for one, group in zip(seen, groups, strict=True)
            ]
            for stop in together:  # a budget's own mean is taken off: no colour is spent on telling budgets apart
                own = [place for place, (_, other) in enumerate(places) if other == stop]
                mean = np.concatenate([groups[place] for place in own]).mean(0)
                for place in own:
                    groups[place], fine[place] = groups[place] - mean, fine[place] - mean
            fitted = Pca(np.concatenate([group[:: max(1, len(group) // 512)] for group in groups]))
            points = [fitted(group) for group in fine]
            every: Array = np.concatenate([fitted(group) for group in groups])
            if after is not None:
                turn = align(every, after)
                points, every = [group @ turn for group in points], every @ turn
            after = every / max(float(every.std()), 1e-9)
            for (view, stop), painted in zip(places, colours(points), strict=True):
                found[view][index][stop] = (painted * 255).round().astype(np.uint8)
    return found
