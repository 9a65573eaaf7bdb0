"""`veca export`: one ONNX file per budget, for onnxruntime without PyTorch; float32 or 8 bits.

The file's network is the model's own, with the rotation in the operator that onnxruntime runs fastest. Before the file
takes its place it is run on real photographs, at several sizes and in a batch, and compared with PyTorch.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import tyro
from torch import Tensor, nn

from veca._version import __version__
from veca.block import Attention, Block, probabilities
from veca.cli import parse
from veca.errors import InputError, check_share, require
from veca.files import refuse_file, whole_file, write_text
from veca.images import MEAN, STD, open_image, preprocess
from veca.model import Veca
from veca.rope import Rotation
from veca.weights import load

OPSET = 23  # the first with RotaryEmbedding; onnxruntime 1.23 and newer read it
OUTPUTS = ("cls", "patches", "cores", "coords")
TOLERANCE = 1e-3  # largest difference of any feature in float32, on the scale of features (about 1)
LEAST_COSINE = 0.99  # of the dense feature in 8 bits
PHOTOS = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg")  # scikit-image's
TRITON_BATCH = 16
GRIDS = (8, 14, 32)  # the shorter side, in patches


@dataclass
class Export:
    """Write an ONNX file of a model at one budget; batch, height and width stay free.

    Its input is `images` (B×3×H×W, ImageNet-normalised, whole patches), its outputs are `cls` (B×D), `patches` (B×N×D,
    row by row), `cores` (B×C×D) and `coords` (B×C×2). The file is compared with PyTorch on photographs at several sizes
    before it takes its place. onnxruntime 1.23 or newer runs it without PyTorch: docs/deploy.md has the ten lines.

    Examples:
      veca export veca-s14 --cores 64 --out veca-s14-64.onnx
      veca export veca-s14 --out half.onnx --patches 0.5 --size 448
      veca export models/mine --cores 16 --out mine-16-int8.onnx --int8
      veca export veca-s14 --cores 64 --triton repository/      (the folders and config.pbtxt that Triton asks for)
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """a bundled name, a model folder, a .safetensors, an authors' .pt or a hub id"""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """the .onnx file to write"""
    triton: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """instead: a model repository of NVIDIA Triton, to which the model is added as NAME-CORES"""
    cores: int = 64
    """the budget, fixed in the file"""
    patches: float = 1.0
    """share of the patches that the file spends, at mixed scale; below 1 its images have one size"""
    size: int | None = None
    """with --patches: the side of the square images, in pixels, a multiple of the patch size"""
    int8: tyro.conf.FlagCreatePairsOff[bool] = False
    """8-bit weights and activations: a quarter of the size, about 1.6 times as fast on CPUs with VNNI"""
    photos: tuple[Path, ...] = ()
    """photographs to compare on instead of scikit-image's"""


class Agreement(NamedTuple):
    """How the file's outputs compare with PyTorch's, over all photographs."""

    difference: float  # the largest, of any output
    dense_cosine: float  # mean over patches
    global_cosine: float
    sizes: list[str]


def main(arguments: list[str]) -> None:
    settings = parse(Export, arguments, "veca export")
    if (settings.out is None) == (settings.triton is None):
        raise InputError("give --out FILE.onnx or --triton DIR, one of them")
    out = settings.out
    if settings.triton is not None:
        refuse_file(settings.triton, "--triton")
        name = re.sub(r"[^\w.-]", "-", Path(settings.model.removesuffix(".safetensors")).name or "veca")
        out = settings.triton / f"{name}-{settings.cores}" / "1" / "model.onnx"
    assert out is not None
    if out.suffix != ".onnx":
        raise InputError(f"--out is an .onnx file, not {out}")
    for module in ("onnx", "onnxscript", "onnxruntime"):
        require(module, "export")
    photos = list(settings.photos) or bundled_photos()
    missing = next((photo for photo in photos if not photo.is_file()), None)
    if missing is not None:
        raise InputError(f"{missing}: no such file")
    check_share(settings.patches, "--patches")
    if (settings.patches < 1) != (settings.size is not None):
        raise InputError("--patches below 1 and --size go together: a file at mixed scale takes images of one size")
    if settings.patches < 1 and settings.triton is not None:
        raise InputError("--triton is for files that take images of any size, not for --patches")
    model = load(settings.model, cores=settings.cores)
    try:
        mixed = None if settings.size is None else Mixed(settings.patches, settings.size)
        agreement = export(model, out, settings.cores, settings.int8, photos, mixed)
        if settings.triton is not None:
            write_text(out.parents[1] / "config.pbtxt", triton_config(out.parents[1].name, model, settings.cores))
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror or error}") from error
    size = out.stat().st_size / 1e6
    kind = "8 bits" if settings.int8 else "float32"
    free = "batch, height and width free"
    if mixed is not None:
        free = f"{mixed.share:g} of the patches of {mixed.size}×{mixed.size} pixels; batch free"
    print(f"{out}: {size:.1f} MB, opset {OPSET}, {settings.cores} cores, {kind}; {free}")
    print(f"compared with PyTorch on {len(photos)} photographs at {', '.join(agreement.sizes)}:")
    allowed = f"at least {LEAST_COSINE}" if settings.int8 else "not judged"
    print(f"  cosine: dense {agreement.dense_cosine:.5f} ({allowed}), global {agreement.global_cosine:.5f}")
    allowed = "not judged" if settings.int8 else f"at most {TOLERANCE:g}"
    print(f"  largest difference: {agreement.difference:.1e} ({allowed})")


class Mixed(NamedTuple):
    """A file at mixed scale."""

    share: float  # of the patches
    size: int  # side of its images


def export(model: Veca, out: Path, cores: int, int8: bool, photos: list[Path], mixed: Mixed | None = None) -> Agreement:
    """Write `out` whole, or not at all when it does not agree with PyTorch."""
    if model.config.attention == "dense":
        raise InputError("the dense control arm is for training experiments and is not exported")
    model = copy.deepcopy(model).float().cpu().eval()  # the caller's own stays as it is
    if not 1 <= cores <= model.config.bank:
        raise InputError(f"--cores must lie between 1 and {model.config.bank} (this model's bank), not {cores}")
    if mixed is not None and (mixed.size < model.patch_size or mixed.size % model.patch_size):
        raise InputError(f"--size must be a multiple of the patch size {model.patch_size}, not {mixed.size}")
    with whole_file(out) as temporary:
        write_onnx(model, cores, temporary, mixed)
        if int8:
            quantize(temporary)
        agreement = compare(model, temporary, cores, photos, mixed)
        if int8 and not agreement.dense_cosine >= LEAST_COSINE:
            raise InputError(
                f"8 bits change the dense feature too much: cosine {agreement.dense_cosine:.4f} on photographs, at "
                f"least {LEAST_COSINE} is asked; export it without --int8"
            )
        if not int8 and not agreement.difference <= TOLERANCE:
            raise InputError(
                f"the exported file differs from PyTorch by {agreement.difference:.1e}, more than {TOLERANCE:g}: "
                f"its versions of torch, onnxscript and onnxruntime do not work together"
            )
    return agreement


def triton_config(name: str, model: Veca, cores: int) -> str:
    """Triton's config.pbtxt; the batch is not among its dims. It batches requests of equal size by itself."""
    width = model.config.feature_width
    outputs = {"cls": [width], "patches": [-1, width], "cores": [cores, width], "coords": [cores, 2]}

    def tensor(kind: str, name: str, dims: list[int]) -> str:
        return f'{kind} {{ name: "{name}" data_type: TYPE_FP32 dims: {dims} }}'

    lines = [f'name: "{name}"', 'backend: "onnxruntime"', f"max_batch_size: {TRITON_BATCH}", "dynamic_batching { }"]
    lines += [tensor("input", "images", [3, -1, -1])]
    lines += [tensor("output", *each) for each in outputs.items()]
    return "\n".join(lines) + "\n"


def bundled_photos() -> list[Path]:
    folder = Path(str(require("skimage.data", "export").__file__)).parent
    return [folder / name for name in PHOTOS]


def write_onnx(model: Veca, cores: int, path: Path, mixed: Mixed | None = None) -> None:
    """The float32 graph, weights inside."""
    if not hasattr(torch.onnx, "ops"):
        raise InputError(f"veca export needs torch 2.8 or newer, not {torch.__version__}")
    network = ExportedNetwork(model, cores, 1.0 if mixed is None else mixed.share).eval()
    patch = model.patch_size
    free = {0: torch.export.Dim("batch", min=1, max=2**16)}
    height, width = 5 * patch, 7 * patch
    if mixed is None:
        free[2] = patch * torch.export.Dim("grid_height", min=1, max=2**14)
        free[3] = patch * torch.export.Dim("grid_width", min=1, max=2**14)
    else:
        height = width = mixed.size
    with _quietly(), torch.no_grad():
        program = torch.onnx.export(
            network,
            (torch.zeros(2, 3, height, width),),
            dynamo=True,
            opset_version=OPSET,
            input_names=["images"],
            output_names=list(OUTPUTS),
            dynamic_shapes={"images": free},
            verbose=False,
        )
    assert program is not None
    about = {"patch_size": patch, "cores": cores, "mean": MEAN, "std": STD, "veca": __version__}
    if mixed is not None:
        about |= {"patches": mixed.share, "size": mixed.size}
    program.model.metadata_props.update({name: json.dumps(value) for name, value in about.items()})
    program.save(path)


def quantize(path: Path) -> None:
    """Weights to 8 bits a channel, activations as they come: every product with a constant matrix runs in integers."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with _quietly():
        quantize_dynamic(
            path, path, weight_type=QuantType.QInt8, per_channel=True, extra_options={"MatMulConstBOnly": True}
        )


def compare(model: Veca, path: Path, cores: int, photos: list[Path], mixed: Mixed | None = None) -> Agreement:
    """Run the file on every photograph at several sizes (or the middle at its own), alone, and on two turned to one
    shape as a batch.
    """
    session = open_session(path)
    inputs = [
        preprocess(open_image(photo), size=grid * model.patch_size, patch_size=model.patch_size)
        for photo, grid in ((photo, GRIDS[index % len(GRIDS)]) for index, photo in enumerate(photos))
    ]
    if mixed is not None:
        inputs = [middle(preprocess(open_image(photo), mixed.size, model.patch_size), mixed.size) for photo in photos]
    inputs.append(torch.cat((inputs[0], inputs[0].flip(-1))))
    differences, dense, overall = [], [], []
    for images in inputs:
        with torch.inference_mode():
            expected = model(images, cores=cores, patches=None if mixed is None else mixed.share)
        given = dict(zip(OUTPUTS, session.run(list(OUTPUTS), {"images": images.numpy()}), strict=True))
        for name in OUTPUTS:
            wanted = getattr(expected, name).numpy()
            if given[name].shape != wanted.shape:
                raise InputError(f"the exported file's {name} has shape {given[name].shape}, not {wanted.shape}")
            differences.append(float(np.abs(given[name] - wanted).max()))
        dense.append(cosine(given["patches"], expected.patches.numpy()))
        overall.append(cosine(given["cls"], expected.cls.numpy()))
    sizes = ["×".join(map(str, images.shape[-2:])) + (" twice" if len(images) > 1 else "") for images in inputs]
    return Agreement(max(differences), float(np.mean(dense)), float(np.mean(overall)), sizes)


def middle(images: Tensor, size: int) -> Tensor:
    """The square in the middle of images whose shorter side is `size`."""
    top, left = (images.shape[-2] - size) // 2, (images.shape[-1] - size) // 2
    return images[..., top : top + size, left : left + size]


def open_session(path: Path) -> Any:
    onnxruntime = require("onnxruntime", "export")
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def cosine(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    lengths = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return float(((a * b).sum(-1) / np.maximum(lengths, 1e-12)).mean())


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """The exporters talk of other packages' operators; errors still come as exceptions."""
    logging.disable(logging.WARNING)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(sys.stderr),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


class ExportedNetwork(nn.Module):
    """The forward pass at one budget, on a copy of the model whose attention turns by onnxruntime's own operator."""

    def __init__(self, model: Veca, cores: int, patches: float = 1.0) -> None:
        super().__init__()
        self.model, self.cores, self.patches = copy.deepcopy(model), cores, patches
        for block in self.model.blocks:
            assert isinstance(block, Block)
            block.attn = ExportedAttention(block.attn)
        for module in list(self.model.modules()):
            for name, layer in module.named_children():
                if isinstance(layer, nn.Linear):
                    setattr(module, name, Product(layer))

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        out = self.model(images, cores=self.cores, patches=None if self.patches == 1 else self.patches)
        return out.cls, out.patches, out.cores, out.coords


class Product(nn.Module):
    """A linear layer by its transposed weight: one constant for cores and patches, which the quantiser recognises."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().t().contiguous())
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class ExportedAttention(Attention):
    """The same in the operators that onnxruntime runs fastest: channels that turn together lie half a head apart."""

    def __init__(self, attention: Attention) -> None:
        nn.Module.__init__(self)
        self.heads, self.dense = attention.heads, attention.dense
        width = attention.q_proj.out_features // self.heads
        apart = torch.arange(self.heads * width).view(self.heads, width // 2, 2).transpose(1, 2).flatten()
        self.q_proj, self.k_proj = reordered(attention.q_proj, apart), reordered(attention.k_proj, apart)
        self.v_proj, self.out_proj = attention.v_proj, attention.out_proj

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """In plain products: the quantiser knows no fused attention."""
        return probabilities(q, k) @ v

    def turn(self, x: Tensor, by: Rotation | None) -> Tensor:  # B×H×T×d
        if by is None:
            return x
        cos, sin = (part[:, 0].expand(x.shape[0], -1, -1) for part in (by.cos, by.sin))  # B×T×d/2
        turned: Tensor = torch.onnx.ops.rotary_embedding(x, cos, sin)
        return turned


def reordered(linear: nn.Linear, channels: Tensor) -> nn.Linear:
    """A linear layer with its output channels in another order."""
    other = nn.Linear(linear.in_features, linear.out_features)
    with torch.no_grad():
        other.weight.copy_(linear.weight[channels])
        other.bias.copy_(linear.bias[channels])
    return other
