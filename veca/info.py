"""`veca info`: what a model is, what it costs, and where its weights came from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console
from rich.table import Table

from veca.bench.flops import dino_flops, veca_flops
from veca.cli import parse
from veca.config import MODELS, VecaConfig
from veca.errors import InputError
from veca.files import write_json
from veca.model import create_model
from veca.weights import bundled_models, load

SIZES = (256, 512, 1024, 2048)


@dataclass
class Info:
    """Print sizes, parameters, budgets and FLOPs of a model, next to a DINOv3 of the same size.

    Without MODEL, the names of all sizes and of the trained weights that come with the package.

    Examples:
      veca info
      veca info veca-s14                trained weights that come with the package, and where they come from
      veca info veca_small              one of the paper's sizes
      veca info models/mine             a model folder, and where its weights came from
      veca info veca_base --json base.json
    """

    model: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[MODEL]")] = None
    """a size (veca_tiny … veca_large), or anything veca.load takes"""
    out: Annotated[Path | None, tyro.conf.arg(name="json", metavar="FILE")] = None
    """also write the numbers to this file"""


def describe(name: str) -> dict[str, Any]:
    """Everything `veca info` prints, as one dictionary."""
    if name in MODELS:
        with torch.device("meta"):  # counted, never run
            model = create_model(name)
        weights = {"origin": "none: a size, to be created with fresh weights"}
    else:
        model = load(name)
        weights = model.card
    config = model.config
    budgets = sorted({*range(8, config.bank + 1, 8), config.bank})
    sizes = [size // config.patch_size * config.patch_size for size in SIZES]
    return {
        "model": name,
        "config": config.to_dict(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bytes_float32": sum(parameter.numel() * 4 for parameter in model.parameters()),
        "budgets": budgets,
        "weights": weights,
        "flops": [flops_row(config, size, budgets) for size in sizes],
    }


def flops_row(config: VecaConfig, size: int, budgets: list[int]) -> dict[str, Any]:
    try:
        dinov3: int | None = dino_flops("dinov3", config, size)
    except InputError:  # transformers is optional; the rest of the table is not
        dinov3 = None
    return {
        "size": size,
        "patches": (size // config.patch_size) ** 2,
        "veca": {str(cores): veca_flops(config, size, cores) for cores in (budgets[0], budgets[-1])},
        "dinov3": dinov3,
    }


def main(arguments: list[str]) -> None:
    settings = parse(Info, arguments, "veca info")
    if settings.model is None:
        print(f"trained, for veca.load:          {', '.join(bundled_models()) or 'none in this build'}")
        print(f"sizes, for veca.create_model:    {', '.join(MODELS)}")
        return
    about = describe(settings.model)
    config, console = about["config"], Console()
    console.print(about["model"], style="bold", markup=False, highlight=False)
    few, many = about["budgets"][0], about["budgets"][-1]
    for name, value in (
        ("parameters", f"{about['parameters']:,} ({about['bytes_float32'] / 1e6:.0f} MB in float32)"),
        ("layers", f"{config['depth']} of width {config['width']}, {config['heads']} heads, {config['mlp']} MLP"),
        ("patch size", config["patch_size"]),
        (
            "cores",
            f"any number from 1 to {config['bank']}; budgets of training: {', '.join(map(str, about['budgets']))}",
        ),
        ("attention", config["attention"]),
        *(
            ("weights: " + key, value)
            for key, value in about["weights"].items()
            if isinstance(value, (str, int, float))
        ),
    ):
        console.print(f"  {name:<20} {value}", markup=False, highlight=False, soft_wrap=True)
    table = Table(title="GFLOPs of one image (PyTorch's flop counter)", title_justify="left")
    for heading in ("image", "patches", f"VECA, {few} cores", f"VECA, {many} cores", "DINOv3", "DINOv3 / VECA"):
        table.add_column(heading, justify="right")
    for row in about["flops"]:
        least, most, other = row["veca"][str(few)], row["veca"][str(many)], row["dinov3"]
        table.add_row(
            f"{row['size']}²",
            f"{row['patches']:,}",
            *(f"{value / 1e9:,.1f}" for value in (least, most)),
            f"{other / 1e9:,.1f}" if other else "–",
            f"{other / most:.2f}" if other else "–",
        )
    console.print(table)
    if about["flops"][0]["dinov3"] is None:
        console.print("DINOv3 is counted when transformers is installed: pip install 'veca[bench]'")
    if settings.out:
        write_json(settings.out, about)
