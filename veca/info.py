"""`veca info`: what a model is, what it costs, and where its weights came from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console

from veca import tabulate
from veca.bench.flops import closed_form_dino_flops, closed_form_flops
from veca.cli import parse
from veca.config import MODELS, VecaConfig
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
        weights = {"weights": "none: a size, to be created with fresh ones"}
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
    return {
        "size": size,
        "patches": (size // config.patch_size) ** 2,
        "veca": {str(cores): closed_form_flops(config, size, cores) for cores in (budgets[0], budgets[-1])},
        "dinov3": closed_form_dino_flops("dinov3", config, size),
    }


def origin(weights: dict[str, Any]) -> list[tuple[str, Any]]:
    """What a card tells, for people: where the weights lie, what they learned from, and the runs in their order."""
    plain = {key: value for key, value in weights.items() if isinstance(value, (str, int, float))}
    source = plain.pop("source", None)
    lines: list[tuple[str, Any]] = []
    if source is not None:
        lines.append(("weights", "trained, part of the package" if source in bundled_models() else source))
    lines += [(key.replace("_", " "), plain.pop(key)) for key in ("teacher", "teacher_weights", "data") if key in plain]
    earlier = str(plain.pop("before")).split("; then ") if "before" in plain else []
    if earlier and "recipe" in plain:
        # A run that went on names its start by the name that the result has now: as if it had begun with itself.
        runs = [*earlier, f"{plain.pop('views', 0):,} views, {plain.pop('recipe')}"]
        plain.pop("views_before", None)
        for number, run in enumerate(runs, 1):
            told = re.sub(r"(\w+) from [^,]+", rf"\1 from the result of run {number - 1}", run, count=1)
            lines.append((f"run {number} of {len(runs)}", run if number == 1 else told))
        if "steps" in plain:
            plain[f"steps of run {len(runs)}"] = plain.pop("steps")
    return lines + [(key.replace("_", " "), value) for key, value in plain.items()]


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
    attention = "every patch with every other" if config["attention"] == "dense" else "only through the cores"
    for name, value in (
        ("parameters", f"{about['parameters']:,} ({about['bytes_float32'] / 1e6:.0f} MB in float32)"),
        ("layers", f"{config['depth']} of width {config['width']}, {config['heads']} heads, {config['mlp']} MLP"),
        ("patch size", config["patch_size"]),
        ("patches exchange", attention),
        ("cores", f"any number from 1 to {config['bank']}"),
        *origin(about["weights"]),
    ):
        console.print(f"  {name:<18} {value}", markup=False, highlight=False, soft_wrap=True)
    rows = [["image", "patches", f"VECA, {few} cores", f"VECA, {many} cores", "DINOv3", "DINOv3 / VECA"]]
    for row in about["flops"]:
        least, most, other = row["veca"][str(few)], row["veca"][str(many)], row["dinov3"]
        counts = [f"{value / 1e9:,.1f}" for value in (least, most, other)]
        rows.append([f"{row['size']}²", f"{row['patches']:,}", *counts, f"{other / most:.2f}"])
    tabulate.show(console, "GFLOPs of one image, and of a DINOv3 of the same depth, width and patch size", rows)
    if settings.out:
        write_json(settings.out, about)
