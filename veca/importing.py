"""`veca import`: a model folder from what others published, an authors' checkpoint or a teacher of the DINO family."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from veca.backbones import is_veca
from veca.cli import parse
from veca.model import Veca
from veca.weights import load


@dataclass
class Import:
    """Turn what others published into a model folder that veca.load and transformers read.

    A checkpoint of the paper's authors becomes the same model. A DINOv2 or DINOv3 is converted: its weights in a VECA
    of its shape, with new cores. Nothing is trained here, so its features are poor until `veca distill convert` has
    run; it is the starting point of that run, for comparison.

    Examples:
      veca import veca_base_q64.pt models/veca-base
      veca import facebook/dinov2-small models/start
      veca import teacher/ models/twin --attention dense
    """

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """the authors' .pt file; or a transformers DINOv2 or DINOv3, a folder or a hub id"""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """the folder to write"""
    attention: Literal["core", "dense"] = "core"
    """of a converted teacher; dense: every token reads every token"""
    rope_zero_fraction: float | None = None
    """of a converted teacher: share of rotary channels that do not turn, as in `veca distill`"""


def convert_teacher(source: str, **overrides: object) -> Veca:
    """A teacher in the shape of a student, untrained: the model with which `veca distill convert` starts at seed 0."""
    from veca.distill.convert import copy_teacher, student_config
    from veca.teachers import load_teacher

    torch.manual_seed(0)
    teacher = load_teacher(source)
    model = Veca(student_config(teacher, **overrides))
    copy_teacher(model, teacher)
    model.card = {"origin": f"{Path(source).name or source}, converted and not trained"}
    return model.eval()


def main(arguments: list[str]) -> None:
    settings = parse(Import, arguments, "veca import")
    if is_veca(settings.source):
        model = load(settings.source)
    else:
        chosen = {"attention": settings.attention, "rope_zero_fraction": settings.rope_zero_fraction}
        model = convert_teacher(settings.source, **{name: value for name, value in chosen.items() if value is not None})
    model.save(settings.out)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{settings.out}: {parameters:,} parameters, {model.config.depth} layers of {model.config.width}")
