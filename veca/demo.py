"""`veca demo`: features of a few bundled photographs at two budgets, as one picture and a short table."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from PIL import Image
from rich.console import Console

from veca import tabulate
from veca.analysis.drawing import Picture, Sheet
from veca.analysis.projection import colours, project, unit
from veca.cli import parse
from veca.errors import require
from veca.files import write_json
from veca.images import SIZE, open_image, preprocess
from veca.model import Veca, create_model
from veca.weights import bundled_models, load

PHOTOS = {"astronaut": "astronaut.png", "cat": "chelsea.png", "coffee": "coffee.png", "rocket": "rocket.jpg"}
BUDGETS = (8, 64)
MODEL = "veca-s14"


@dataclass
class Demo:
    """Features of scikit-image's bundled photographs at budgets 8 and 64: one figure, one table.

    Example: veca demo --out demo
    """

    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("demo")
    """folder for features.png, features.npz and demo.json"""
    size: int = SIZE
    """the shorter side of each photograph, in pixels"""


def main(arguments: list[str]) -> None:
    settings = parse(Demo, arguments, "veca demo")
    console = Console()
    model, weights = demo_model()
    console.print(f"Weights: {weights}", highlight=False)
    folder = Path(str(require("skimage.data", "demo").__file__)).parent
    photos = {name: open_image(folder / file) for name, file in PHOTOS.items()}
    maps: dict[tuple[str, int], np.ndarray] = {}
    cores_at: dict[tuple[str, int], np.ndarray] = {}
    grids: dict[str, tuple[int, int]] = {}
    rows: list[dict[str, Any]] = []
    with console.status("looking at the photographs"), torch.inference_mode():
        for name, photo in photos.items():
            images = preprocess(photo, size=settings.size, patch_size=model.patch_size)
            model(images, cores=BUDGETS[-1])  # warm
            times = {}
            for cores in BUDGETS:
                start = time.perf_counter()
                out = model(images, cores=cores)
                times[cores] = time.perf_counter() - start
                maps[name, cores] = unit(out.patches[0])
                cores_at[name, cores] = (out.coords[0].numpy() + 1) / 2  # C×2, from (0, 0) at the top left to (1, 1)
                grids[name] = out.grid
            cosine = float((maps[name, BUDGETS[0]] * maps[name, BUDGETS[-1]]).sum(-1).mean())
            row: dict[str, Any] = {
                "photo": name,
                "size": list(images.shape[-2:]),
                "patches": len(maps[name, BUDGETS[0]]),
            }
            rows.append({**row, "seconds": {str(cores): times[cores] for cores in BUDGETS}, "cosine": cosine})
    paths = picture(photos, maps, cores_at, grids, weights).write(settings.out, "features")
    write_json(settings.out / "demo.json", {"weights": weights, "cores": BUDGETS, "photos": rows})
    cells = [["photo", "pixels", "patches", *(f"{cores} cores" for cores in BUDGETS), "cosine of the two"]]
    for row in rows:
        height, width = row["size"]
        seconds = [f"{row['seconds'][str(cores)] * 1e3:.0f} ms" for cores in BUDGETS]
        cells.append([row["photo"], f"{width}×{height}", str(row["patches"]), *seconds, f"{row['cosine']:.3f}"])
    tabulate.show(console, "", cells, left=["photo"])
    console.print(f"The picture: {paths[0]}", highlight=False)


def demo_model() -> tuple[Veca, str]:
    """Trained weights where the package carries some; otherwise random ones, and it says so."""
    if MODEL in bundled_models():
        return load(MODEL), f"{MODEL}, trained (veca info {MODEL} says from what)"
    torch.manual_seed(0)
    return create_model("veca_small").eval(), "random (veca_small): this build carries no trained weights"


def picture(
    photos: dict[str, Image.Image],
    maps: dict[tuple[str, int], np.ndarray],
    cores_at: dict[tuple[str, int], np.ndarray],
    grids: dict[str, tuple[int, int]],
    weights: str,
) -> Picture:
    """Photo, features and cores at two budgets: colours fitted jointly, so that they can be compared."""
    painted = dict(zip(maps, colours(project(list(maps.values()))), strict=True))
    sheet = Sheet(
        "What the model sees",
        "Each patch's feature as a colour: similar colours, similar features, over all pictures here. Dots: where the "
        f"cores sit after the last layer, the first one filled. Weights: {weights}.",
        ["photo", *(f"{cores} cores" for cores in BUDGETS)],
        [(name, "", grids[name][0] / grids[name][1]) for name in photos],
        bar=False,
    )
    for row, (name, photo) in enumerate(photos.items()):
        sheet.picture(row, 0, np.asarray(photo))
        for column, cores in enumerate(BUDGETS, start=1):
            axes = sheet.picture(row, column, painted[name, cores].reshape(*grids[name], 3))
            x, y = cores_at[name, cores].T
            axes.scatter(x, y, s=16, facecolors="none", edgecolors="black", linewidths=1.6, alpha=0.4)
            axes.scatter(x, y, s=9, facecolors=["white"] + ["none"] * (cores - 1), edgecolors="white", linewidths=0.7)
    arrays = {f"{name}_{cores}": painted[name, cores].reshape(*grids[name], 3) for name, cores in maps}
    return Picture(sheet, arrays | {f"{name}_{cores}_cores": places for (name, cores), places in cores_at.items()})
