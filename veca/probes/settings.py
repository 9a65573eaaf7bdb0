"""What each probe takes on the command line; the docstrings are its --help."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from veca.caches import cache_folder


def _numbers(texts: list[str]) -> tuple[int, ...]:
    return tuple(int(part) for part in texts[0].split(",") if part)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(part, int) for part in value)


Numbers = Annotated[
    tuple[int, ...],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="N,N,…",
        instance_from_str=_numbers,
        is_instance=_is_numbers,
        str_from_instance=lambda value: [",".join(map(str, value))],
    ),
]
Models = Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="MODEL")]
Paths = Annotated[tyro.conf.UseAppendAction[tuple[Path, ...]], tyro.conf.arg(metavar="PATH")]
Flag = tyro.conf.FlagCreatePairsOff[bool]


def default_cache() -> Path:
    return cache_folder("probes")


@dataclass
class Common:
    data: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """the data set"""
    model: Models = ()
    """a model to judge, again for each: what veca.load takes, a transformers hub id or folder, or random:veca_small"""
    cores: Numbers = ()
    """budgets, for models that have them; all cores without this"""
    seeds: int = 3
    """heads trained from different seeds; the table shows mean ± deviation"""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("probe")
    """folder for results.json, results.csv, the plots and the heads"""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1, mps"""
    cache: Annotated[Path, tyro.conf.arg(metavar="DIR")] = field(default_factory=default_cache)
    """folder of features that were computed before"""
    cache_gb: float = 20.0
    """what that folder may hold; the features used longest ago make room"""
    against: Literal["paper"] | None = None
    """add the paper's own numbers for this data set to the table"""
    command: tyro.conf.Suppress[str] = ""  # what was typed, for results.json


@dataclass
class Classify(Common):
    """Train a linear head on the global feature: top-1 and top-5, or mean average precision for several labels.

    DIR holds train/<class>/ and test/<class>/ (or val/), or train.csv and test.csv with the columns path and labels
    (several labels separated by ;). Heads are trained by SGD at nine learning rates at once; the rate is chosen on a
    fifth of the training images, the head is then trained on all of them and scored once on the test images.

    Examples:
      veca probe classify --data pets/ --model teacher/ --model veca-s14 --cores 8,64 --size 256,384 --out pets-probe/
      veca probe classify --data imagenet/ --model veca-s14 --also imagenetv2/ --also real.json --against paper
    """

    size: Numbers = (256,)
    """sides of the centre crop, rounded to whole patches; the image is first resized to 1.125 times that"""
    epochs: int = 100
    """passes over the cached features"""
    also: Paths = ()
    """score the heads on other labels of the classes too: class folders, a CSV, or ReaL's JSON of the test images"""


@dataclass
class Knn(Common):
    """Classify each test image by its nearest training images: cosine, k = 1 and 20.

    Nothing is trained, so there is one answer whatever --seeds says.

    Example:
      veca probe knn --data pets/ --model teacher/ --model veca-s14 --cores 8,64 --out pets-knn/
    """

    size: Numbers = (256,)
    """sides of the centre crop, rounded to whole patches"""


@dataclass
class Dense(Common):
    size: Numbers = (512,)
    """sides of the square crop, rounded to whole patches; the image's short side is resized to it"""
    steps: int = 500
    """optimiser steps, 8 crops each"""
    augment: Flag = False
    """train on random crops and flips, through the backbone at every step (slow without a GPU); without this, on the
    cached features of the windows that cover each training image"""


@dataclass
class Segment(Dense):
    """Train a linear head on every patch feature (global feature appended): mIoU, pixel accuracy, IoU per class.

    DIR holds train/images, train/masks and val/ (or test/) in the same way, masks as index or palette PNG with the
    names of the images; or the layout of the preset. classes.txt in DIR names the classes, one a line.

    Examples:
      veca probe segment --data voc-seg/ --preset voc2012 --model teacher/ --model random:veca_small --size 448
      veca probe segment --data ADEChallengeData2016/ --preset ade20k --model veca-s14 --cores 8,16,32,64 --augment
      veca probe segment --data mine/ --ignore 0 --offset -1 --model veca-s14
    """

    preset: Literal["voc2012", "context60", "ade20k", "coco_stuff", "coco_object", "cityscapes"] | None = None
    """what a published data set's files and labels mean"""
    classes: int | None = None
    """number of classes; without it and without a preset, what classes.txt or the training masks show"""
    ignore: int | None = None
    """the stored label that does not count (255)"""
    offset: int | None = None
    """added to stored labels (0); those that fall below 0 do not count"""


@dataclass
class DepthProbe(Dense):
    """Train a linear head on every patch feature (global feature appended): RMSE, AbsRel and δ1 in metres.

    DIR holds train/images, train/depth and test/ (or val/) in the same way, depth as 16-bit PNG with the names of the
    images, 0 where it is unknown; or the layout of the preset.

    Examples:
      veca probe depth --data nyu-depth/ --preset nyu --model teacher/ --model random:veca_small --size 448
      veca probe depth --data mine/ --scale 0.001 --farthest 50 --model veca-s14 --head regression
    """

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
class Fidelity:
    """How close models are to the teacher whose features they learned: cosines on photos they never saw.

    Of the global feature and of the patches; raw, and standardised (both sides seen through the teacher's mean and
    deviation per channel over these photos at this size: what remains when the part that all photos share is taken
    away). `constant` is what the best constant answer would reach for the standardised patches.

    Examples:
      veca probe teacher --data photos-006.tar --teacher teacher/ --model veca-s14 --out fidelity/
      veca import teacher/ models/start && veca probe teacher --data photos-006.tar --teacher teacher/ \\
          --model models/start --model veca-s14 --cores 8,64 --size 196,448 --images 64
    """

    data: Annotated[Path, tyro.conf.arg(metavar="PHOTOS")]
    """photos: a folder, a tar shard or a .txt list"""
    teacher: Annotated[str, tyro.conf.arg(metavar="TEACHER")]
    """a transformers vision model: a hub id or a folder"""
    model: Models = ()
    """a model to compare with it, again for each: what veca.load takes, or random:veca_small"""
    cores: Numbers = (8, 16, 24, 32, 40, 48, 56, 64)
    """budgets"""
    size: Numbers = (196, 252, 336, 448)
    """sides of the centre crop, rounded to whole patches"""
    images: int = 128
    """how many of the photos, evenly spread"""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("fidelity")
    """folder for results.json, results.csv and fidelity.png"""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1, mps"""
    command: tyro.conf.Suppress[str] = ""  # what was typed, for results.json


@dataclass
class Predict:
    """Use a trained head: class names and scores, a coloured mask over the photo, or a depth map as a picture.

    One line of JSON an image is printed; the pictures and results.json are written to --out.

    Example:
      veca probe predict seg/heads/veca-s14-448px-64cores photo.jpg --out seen/
    """

    head: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="HEAD")]
    """a folder with head.json and head.safetensors"""
    images: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="IMAGE…")]
    """photos"""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("predictions")
    """folder for the pictures"""
    model: str | None = None
    """where the backbone is, if not where it was when the head was trained"""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1, mps"""


@dataclass
class Score:
    """Score a classification head on other images, or other labels, of its classes.

    Example:
      veca probe score imagenet-probe/heads/veca-b-256px-64cores --data imagenetv2/
      veca probe score imagenet-probe/heads/veca-b-256px-64cores --data imagenet/val --labels real.json
    """

    head: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="HEAD")]
    """a folder with head.json and head.safetensors"""
    data: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """class folders (by name or by number), or a CSV of path and labels"""
    labels: Annotated[Path | None, tyro.conf.arg(metavar="JSON")] = None
    """ReaL's list of label lists, for the images in DIR"""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1, mps"""
    cache: Annotated[Path, tyro.conf.arg(metavar="DIR")] = field(default_factory=default_cache)
    """folder of features that were computed before"""
    cache_gb: float = 20.0
    """what that folder may hold"""
