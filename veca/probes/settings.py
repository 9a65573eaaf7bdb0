"""What the probes that are no task take on the command line; the docstrings are its --help."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from veca.devices import Dtype
from veca.tasks.base.options import Flag, Models, Numbers, ProbeOptions, default_cache


@dataclass
class Knn(ProbeOptions):
    """Classify each test image by its nearest training images: cosine, k = 1 and 20.

    Nothing is trained, so there is one answer whatever --seeds says.

    Example:
      veca probe knn --data pets/ --model teacher/ --model veca-s14 --cores 8,64 --out pets-knn/
    """

    size: Numbers = (256,)
    """sides of the centre crop, rounded to whole patches"""


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
    share: float = 1.0
    """how many of the patches the cores read, evenly spread"""
    size: Numbers = (196, 252, 336, 448)
    """sides of the centre crop, rounded to whole patches"""
    images: int = 128
    """how many of the photos, evenly spread"""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("fidelity")
    """folder for results.json, results.csv and fidelity.png"""
    dtype: Dtype = "float32"
    """precision of the models, not of the teacher; auto: bfloat16 where the device computes in it, else float32"""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1, mps"""
    command: tyro.conf.Suppress[str] = ""  # what was typed, for results.json


@dataclass
class Video:
    """Follow the objects of a first frame's mask by frozen features: J, F and J&F, as DAVIS measures them.

    Nothing is trained. Each patch takes the labels of its 5 nearest patches (cosine, temperature 0.1) among the first
    frame and the last 7, at most 12 patches away, as DINO's authors do it. The first and the last frame do not count.

    DIR is DAVIS (JPEGImages/480p/NAME, Annotations/480p/NAME and, if there is one, its list in ImageSets), or holds
    frames/NAME/ and masks/NAME/ with the same file names; masks may be missing but for the first frame.
    The same command again continues a run that was stopped: what sequences/ in --out holds is not computed again.

    Examples:
      veca probe video --data DAVIS/ --model teacher/ --model veca-s14 --cores 8,16,32,64 --out davis/
      veca probe video --data DAVIS/ --model veca-s14 --share 0.25 --carry --frames 25 --draw
    """

    data: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """the data set"""
    model: Models = ()
    """a model to judge, again for each: what veca.load takes, a transformers hub id or folder, or random:veca_small"""
    size: Numbers = (480,)
    """the shorter side of the frames, rounded to whole patches; the aspect ratio is kept"""
    cores: Numbers = ()
    """budgets, for models that have them; all cores without this"""
    frames: int = 0
    """only so many frames of each sequence, from the first; 0: all"""
    share: float = 1.0
    """how many of a VECA's patches its cores read, evenly spread"""
    carry: Flag = False
    """with --share: each frame's cores start from what they read in the last ones, and read another share"""
    draw: Flag = False
    """write the masks over the frames, and a clip (WebP) of each sequence, to drawn/"""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("probe")
    """folder for results.json, results.csv, sequences.csv, the plots and sequences/"""
    dtype: Dtype = "float32"
    """precision of the models; auto: bfloat16 where the CPU or GPU computes in it, else float32"""
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
