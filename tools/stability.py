"""Whether features mean the same at every resolution: a photograph at 224 to 1792 pixels against itself at 448.

    python tools/stability.py --data ../data --cells results/cells --out results/stability

Patches are brought to the lattice that they have at 448 (32×18). `cosine` is their mean cosine; `centred` the same once
the model's mean feature at 448 is taken away from both, so that what all places share does not count. The photographs:
20 of underwater/ (3840×2160), whose features tools/cells.py may have made already (--cells), and 20 of davis_frames/
(854×480), these only up to their own pixels. Sizes are widths; photographs are 16:9.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import cells
import torch
import tyro
from safetensors.torch import load_file
from steps import write_csv
from torch import Tensor, nn
from underwater import Photo, read_photos, split

from veca.progress import progress

LATTICE, OWN = (18, 32), 448


@dataclass
class Settings:
    """Compare a model's features, and its teacher's, over resolutions."""

    data: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("../data")
    """holds underwater/ and davis_frames/"""
    model: str = "veca-s14"
    """the model that is judged"""
    teacher: str = "../shared/teacher/dav2-small-encoder"
    """its teacher"""
    cores: tuple[int, ...] = (8, 64)
    """budgets"""
    sizes: tuple[int, ...] = (224, 448, 672, 896, 1344, 1792)
    """widths"""
    cells: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("results/cells")
    """folder of tools/cells.py, for the features it has"""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("results/stability")
    """folder for stability.csv"""


def main() -> None:
    settings = tyro.cli(Settings, prog="python tools/stability.py", description=inspect.getdoc(Settings))
    own = cells.Settings(data=settings.data / "underwater", model=settings.model, teacher=settings.teacher,
                         cores=settings.cores, shares=(1.0,), out=settings.cells)  # fmt: skip
    ways = cells.Ways(own, "bfloat16")
    tests = split(read_photos(own.data), own.a_stretch)[1][-cells.PART :]
    frames = [Photo(path, (854, 480), []) for path in sorted((settings.data / "davis_frames").glob("*.jpg"))]

    def underwater(row: cells.Row, width: int) -> Tensor:
        cells.extract(own, ways, [row], tests, width)
        stored = load_file(cells.feature_file(own, ways, row, width, tests))["grid"]
        return torch.stack([cells.to_cells(grid.float(), LATTICE) for grid in stored])

    def davis(row: cells.Row, width: int) -> Tensor:
        shown = progress(frames, f"{row.name}, {width} wide", len(frames))
        return torch.stack([cells.to_cells(ways.grid(row, frame.pixels(width)), LATTICE) for frame in shown])

    rows = []
    for row in cells.rows_of(own, OWN):
        rows += compare("davis", row, [size for size in settings.sizes if size <= 854], davis)
        rows += compare("underwater", row, settings.sizes, underwater)
        write_csv(settings.out / "stability.csv", rows)


def compare(
    name: str, row: cells.Row, sizes: Any, features: Callable[[cells.Row, int], Tensor]
) -> list[dict[str, Any]]:
    base = features(row, OWN)
    mean, found = base.mean((0, 1)), []
    for width in sizes:
        other = base if width == OWN else features(row, width)
        figures = {"cosine": cosine(other, base), "centred": cosine(other - mean, base - mean)}
        found.append({"photos": name, "images": len(base), "model": row.model, "cores": row.cores or "", "width": width}
                     | {measure: f"{value:.4f}" for measure, value in figures.items()})  # fmt: skip
        print("  ".join(f"{key} {value}" for key, value in found[-1].items()), flush=True)
    return found


def cosine(one: Tensor, other: Tensor) -> float:
    return float(nn.functional.cosine_similarity(one, other, dim=-1).mean())


if __name__ == "__main__":
    main()
