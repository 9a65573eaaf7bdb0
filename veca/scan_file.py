"""The file of a scan: safetensors with a header, recognised and checked when it is opened (docs/scan.md).

It is untrusted: every field and shape is checked against the model before it is used.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, load_file, save
from torch import Tensor

from veca._version import __version__
from veca.block import CoreSide
from veca.errors import InputError
from veca.large.picture import Picture, Strips, StripSource, open_source, open_strips
from veca.model import Veca
from veca.scan import Scan
from veca.streaming import dtype_of, grid_of, refuse_changed
from veca.weights import weights_digest

FORMAT = 2
READ = (1, FORMAT)  # the first format knew its image by fewer colours
SAMPLES = 32  # an image is recognised by the mean colours of so many squares along each axis
SQUARE = 64  # pixels of their sides, at most: up to 2048² every pixel counts, and above no more are read
ALIKE = 0.05  # largest difference of such a colour, in deviations: decoders round differently
DTYPES = {  # of what a scan file holds
    "keys": torch.float16,
    "values": torch.float16,
    "cores": torch.float32,
    "coords": torch.float32,
    "colours": torch.float16,
    "inside": torch.uint8,  # a bit a patch; only with a mask
}
LARGEST = 2**30  # bytes of a scan file that is opened


def pack(scan: Scan, weights: str, **more: Any) -> bytes:
    """What `Scan.save` writes; `weights` is its model's `digest_of`."""
    side = [torch.stack([getattr(layer, name)[0] for layer in scan.path]) for name in ("key", "value")]
    limit = torch.finfo(torch.float16).max
    if any(float(part.float().abs().amax()) > limit for part in side):
        raise InputError("a key or value of the cores is too large for the float16 of a scan file")
    tensors = {
        "keys": side[0].to("cpu", torch.float16),  # L×H×C×d
        "values": side[1].to("cpu", torch.float16),
        "cores": scan.cores.float().cpu(),
        "coords": scan.coords.float().cpu(),
        "colours": sample_colours(scan.strips, scan.model.patch_size),
    }
    if scan.inside is not None:
        tensors["inside"] = torch.from_numpy(np.packbits(scan.inside.numpy()))
    about = {
        **more,
        "format": FORMAT,
        "weights": weights,
        "size": list(scan.size),
        "share": scan.share,
        "patches": scan.patches,
        "cores": len(scan.cores),
        "dtype": str(dtype_of(scan.model)).removeprefix("torch."),
        "veca": __version__,
    }
    whole = {name: part.contiguous() for name, part in tensors.items()}
    return bytes(save(whole, {"scan": json.dumps(about)}))


def sample_colours(strips: Strips, patch: int, form: int = FORMAT) -> Tensor:
    """The mean colours of evenly spread squares (n×3): by these an image is recognised."""
    down, across = (sample_spans(length, patch, form) for length in (strips.height, strips.width))
    return torch.stack([strips.read(*rows, *columns)[0].mean((1, 2)) for rows in down for columns in across]).half()


def sample_spans(length: int, patch: int, form: int) -> list[tuple[int, int]]:
    """From where to where the squares reach along an axis, none smaller than a patch: decoders differ in details."""
    count = length // patch
    if form == 1:
        starts = np.linspace(0, count - 1, min(16, count)).round().astype(int) * patch
        return [(start, start + patch) for start in starts.tolist()]
    number = min(SAMPLES, count)
    edges = [length * index // number for index in range(number + 1)]
    middles = [(start, stop, max(0, stop - start - SQUARE) // 2) for start, stop in itertools.pairwise(edges)]
    return [(start + left, min(stop, start + left + SQUARE)) for start, stop, left in middles]


def open_scan(file: str | os.PathLike[str], source: StripSource, model: Veca) -> Scan:
    """A scan that `Scan.save` wrote, with the image it was made of and the model that made it.

    Both are recognised: the model by a digest of its weights, the image by its size and the colours of 1024 squares.
    """
    return opened(Path(file), source, model, digest_of(model))


def digest_of(model: Veca) -> str:
    """By what a scan knows its model: the weights as bfloat16 has them, so that both precisions are one model."""
    return weights_digest(model, torch.bfloat16)


def opened(file: Path | bytes, source: StripSource, model: Veca, weights: str) -> Scan:
    """The same of a file, or of its bytes; `weights` is the model's `digest_of`."""
    refuse_changed(model)
    label, (about, tensors) = name_of(file), read_scan(file, model)
    if about["weights"] != weights:
        raise InputError(f"{label} was made with other weights than this model's; scan the image again with this one")
    view = about.get("view")
    if view and isinstance(source, (str, os.PathLike)):  # the same resolution and channels
        source = viewed(Path(source), view, label)
    strips = open_strips(source, model.patch_size)
    name = source if isinstance(source, (str, os.PathLike)) else "the image"
    if list(strips.size) != about["size"]:
        size, given = ("×".join(map(str, pair)) for pair in (about["size"], strips.size))
        raise InputError(f"{label} was made of an image of {size} pixels; {name} has {given}")
    colours = sample_colours(strips, model.patch_size, about["format"]).float()
    if colours.shape != tensors["colours"].shape or not bool(
        ((colours - tensors["colours"].float()).abs() <= ALIKE).all()
    ):
        raise InputError(f"{label} was made of another image than {name}: their colours differ")
    grid, inside = grid_of(model, strips), None
    if "inside" in tensors:
        bits = np.unpackbits(tensors["inside"].numpy())[: grid[0] * grid[1]]
        if len(bits) != grid[0] * grid[1]:
            raise InputError(f"{label}: its mask does not fit the image; the file is damaged")
        inside = torch.from_numpy(bits.astype(bool)).view(grid)
    device, dtype = model.patch_embed.proj.weight.device, dtype_of(model)
    keys, values = (tensors[part].to(device, dtype) for part in ("keys", "values"))
    path = [CoreSide(key[None], key[None], value[None]) for key, value in zip(keys, values, strict=True)]
    return Scan(model, strips, path, tensors["cores"], tensors["coords"], about["share"], inside, about["patches"])


def viewed(image: Path, view: Any, label: str) -> Picture:
    names = {"level", "scale", "bands", "stretch"}
    if not isinstance(view, dict) or not set(view) <= names:
        raise InputError(f"{label}: what it says of resolution and bands makes no sense; the file is damaged")
    return open_source(image, **view)


def name_of(file: Path | bytes) -> str:
    return "the scan" if isinstance(file, bytes) else str(file)


def scan_header(file: Path | bytes) -> dict[str, Any]:
    """What a scan file says of itself, checked."""
    name = name_of(file)
    if isinstance(file, Path) and not file.is_file():
        raise InputError(f"{file}: {'is a folder, not a scan' if file.is_dir() else 'no such file'}")
    if isinstance(file, Path) and file.stat().st_size > LARGEST:
        raise InputError(f"{file}: {file.stat().st_size / 1e9:.1f} GB is no scan; those have about a megabyte")
    try:
        if isinstance(file, bytes):  # safetensors opens files only; theirs begin with the length of the header
            text = json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])["__metadata__"]["scan"]
        else:
            with safe_open(file, "pt") as safe:
                text = (safe.metadata() or {})["scan"]
        about = json.loads(text)
        if about["format"] not in READ:
            raise InputError(f"{name} has format {about['format']!r}; this veca reads {READ}: scan the image again")
        about.setdefault("patches", 1.0)  # scans of before mixed scale
        size, cores = about["size"], about["cores"]
        if not (
            isinstance(about["weights"], str)
            and all(isinstance(part, (int, float)) and 0 < part <= 1 for part in (about["share"], about["patches"]))
            and isinstance(cores, int)
            and cores > 0
            and isinstance(size, list)
            and all(isinstance(side, int) for side in size)
        ):
            raise ValueError("header")
    except (SafetensorError, KeyError, ValueError, TypeError, RecursionError, OSError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{name}: not a scan that veca wrote, or damaged") from None
    return dict(about)


def read_scan(file: Path | bytes, model: Veca) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the tensors of a scan file, checked against the model's shape."""
    about, config, source = scan_header(file), model.config, name_of(file)
    cores = about["cores"]
    side = (config.depth, config.heads, cores, config.head_width)
    expected = {"keys": side, "values": side, "cores": (cores, config.feature_width), "coords": (cores, 2)}
    try:
        tensors = load(file) if isinstance(file, bytes) else load_file(file)
        if any(tensors[name].dtype != dtype for name, dtype in DTYPES.items() if name != "inside" or name in tensors):
            raise ValueError("dtype")
    except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError, AssertionError):
        raise InputError(f"{source}: not a scan that veca wrote, or damaged") from None
    if any(tuple(tensors[name].shape) != shape for name, shape in expected.items()):
        raise InputError(f"{source} was made with a model of another shape; scan the image again with this one")
    if not all(bool(torch.isfinite(tensors[name]).all()) for name in (*expected, "colours")):
        raise InputError(f"{source}: it holds values that are not finite; the file is damaged")
    return about, tensors
