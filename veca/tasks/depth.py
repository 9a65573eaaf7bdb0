"""Depth: a linear layer on the same features as segmentation, scale-invariant log loss (docs/probes.md)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from veca.backbones import Backbone
from veca.files import whole_file
from veca.tasks.base.dense import Pixels, upsample, whole_image
from veca.tasks.base.heads import Head
from veca.tasks.base.options import DenseFineTune, DenseProbe
from veca.tasks.base.pairs import Array, DepthReader, check_pairs, find_pairs
from veca.tasks.base.presets import DEPTH, DepthPreset, Layout, depth_preset
from veca.tasks.base.views import save_picture

BINS = 256
VARIANCE = 0.85  # how much of the mean log error is forgiven: 0 is plain log RMSE, 1 is blind to scale
FLOOR = 0.1  # added to each bin's weight, so that no patch is left without one


@dataclass
class DepthOptions:
    """What the depth files mean, and which head."""

    preset: Literal["nyu", "kitti"] | None = None
    """scale, range, evaluation crop and files of a published data set"""
    head: Literal["bins", "regression"] = "bins"
    """weights over 256 depths, or the depth itself"""
    scale: float | None = None
    """stored value × scale = metres (0.001)"""
    nearest: float | None = None
    """depth below this many metres does not count (0.001)"""
    farthest: float | None = None
    """depth above this many metres does not count (10)"""


@dataclass
class DepthProbe(DepthOptions, DenseProbe):
    """Train a linear head on every patch feature (global feature appended): RMSE, AbsRel and δ1 in metres.

    DIR holds train/images, train/depth and test/ (or val/) in the same way, depth as 16-bit PNG with the names of the
    images, 0 where it is unknown; or the layout of the preset.

    Examples:
      veca probe depth --data nyu-depth/ --preset nyu --model teacher/ --model random:veca_small --size 448
      veca probe depth --data mine/ --scale 0.001 --farthest 50 --model veca-s14 --head regression
    """


@dataclass(kw_only=True)
class DepthFineTune(DepthOptions, DenseFineTune):
    """Fine-tune for depth: a linear head on every patch (global feature appended), and the backbone below it.

    DIR holds train/images, train/depth and test/ (or val/) in the same way, or the layout of the preset, as
    `veca probe depth` reads them. All of train/ is used, the last weights are kept.

    Example:
      veca finetune depth --data nyu-depth/ --preset nyu --model veca-s14 --size 308 --out runs/nyu
    """


class Depth:
    """`bins`: weights over evenly spaced depths, whose mean is the answer. `regression`: the answer itself,
    as a share of the range."""

    main, better = "RMSE", "lower"
    rate = 1e-3

    def __init__(self, preset: DepthPreset, kind: str = "bins") -> None:
        self.preset = preset
        self.kind = kind
        self.outputs = BINS if kind == "bins" else 1
        self.zoom = preset.zoom
        self.trim = preset.trim
        self.read_depth = DepthReader(preset)

    def read(self, path: Path) -> Array:
        return self.read_depth.trimmed(path)

    def decode(self, maps: Tensor) -> Tensor:
        """K×h×w → metres, 1×h×w."""
        return metres(maps, self.kind, self.preset.nearest, self.preset.farthest)

    def loss(self, maps: Sequence[Tensor], labels: Sequence[Tensor]) -> Tensor:
        return depth_loss([self.decode(part) for part in maps], labels)

    def score(self, predictions: Iterator[tuple[Tensor, Tensor]]) -> dict[str, Any]:
        from veca.tasks.base import metrics  # only scoring needs torchmetrics: transformers models use this file too

        return metrics.depth(predictions)

    def about(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "nearest": self.preset.nearest,
            "farthest": self.preset.farthest,
            "trim": self.trim,
            "zoom": self.zoom,
        }


class DepthTask(Pixels):
    name, summary = "depth", "a linear head on every patch; images and 16-bit depth"
    probe_options, finetune_options = DepthProbe, DepthFineTune

    @classmethod
    def open(cls, options: Any) -> DepthTask:
        data = find_pairs(options.data, "depth", depth_preset(options.preset).layout if options.preset else None)
        kind = Depth(depth_labels(options), options.head)
        check_pairs([*data.train, *data.test], kind.read_depth, "depth")
        return cls(kind, data)

    @classmethod
    def answer(cls, head: Head, backbone: Backbone, path: Path, target: Path) -> dict[str, Any]:
        """`<name>.depth.png` (16-bit, millimetres) and `<name>.depth.colour.png`, photo beside map with its scale."""
        image, guess = whole_image(head, backbone, path, lambda maps: decoded(maps, head))
        values = guess[0].numpy()
        stored = np.clip(np.rint(values * 1000), 0, 65535).astype(np.uint16)
        save_picture(Image.fromarray(stored), target.with_name(target.name + ".depth.png"))
        draw_depth(image, values, target.with_name(target.name + ".depth.colour.png"))
        return {
            "depth": target.name + ".depth.png",
            "picture": target.name + ".depth.colour.png",
            "metres": {"nearest": round(float(values.min()), 3), "farthest": round(float(values.max()), 3)},
        }


def decoded(maps: Tensor, head: Head) -> Tensor:
    """Metres, as the head says how."""
    return metres(maps, head.about["kind"], head.about["nearest"], head.about["farthest"])


def depth_labels(settings: Any) -> DepthPreset:
    """The preset, with what the command line says instead."""
    preset = DEPTH[settings.preset] if settings.preset else DepthPreset(Layout("", ""), 1e-3, 1e-3, 10.0)
    given = {name: getattr(settings, name) for name in ("scale", "nearest", "farthest")}
    return replace(preset, **{name: value for name, value in given.items() if value is not None})


def metres(maps: Tensor, kind: str, nearest: float, farthest: float) -> Tensor:
    """maps: K×h×w → metres in [nearest, farthest], 1×h×w."""
    if kind == "regression":
        return nearest + (farthest - nearest) * maps.sigmoid()
    centres = torch.linspace(nearest, farthest, maps.shape[0], device=maps.device)
    weights = maps.relu() + FLOOR
    return (weights * centres[:, None, None]).sum(0, keepdim=True) / weights.sum(0, keepdim=True)


def depth_loss(guesses: Sequence[Tensor], labels: Sequence[Tensor]) -> Tensor:
    """guesses: 1×h×w each, labels: H×W each, metres → mean over the images that know any depth."""
    losses = []
    for guess, label in zip(guesses, labels, strict=True):
        known = label > 0
        if known.any():
            sized = upsample(guess, (label.shape[0], label.shape[1]))[0]
            losses.append(scale_invariant(sized[known], label[known]))
    return torch.stack(losses).mean() if losses else guesses[0].sum() * 0


def scale_invariant(guess: Tensor, truth: Tensor) -> Tensor:
    """Scale-invariant log loss of known pixels (Eigen et al.)."""
    error = guess.log() - truth.log()
    return ((error**2).mean() - VARIANCE * error.mean() ** 2).clamp(min=1e-8).sqrt()


def draw_depth(image: Image.Image, values: np.ndarray[Any, Any], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = 4.0
    figure = Figure(figsize=(2.3 * height * image.width / image.height, height + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    photo, shown = figure.subplots(1, 2)
    photo.imshow(image)
    drawn = shown.imshow(values, cmap="turbo_r")
    figure.colorbar(drawn, ax=shown, label="metres", shrink=0.8)
    for axes in (photo, shown):
        axes.set_axis_off()
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=110)


TASK = DepthTask
