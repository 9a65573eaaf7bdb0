"""The contenders of a benchmark, each as a function to call: VECA in all its forms, its dense arm, DINOv3, products."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from veca.bench.flops import PREFIX, dino
from veca.block import attend
from veca.config import VecaConfig
from veca.errors import InputError, require
from veca.model import Veca

Call = Callable[[], object]
FLOAT32 = torch.float32


class Arm(NamedTuple):
    """One row of the table: which network, with how many cores (0: it has none)."""

    name: str  # veca, dense, dinov2, dinov3; stream, compile, onnx, int8: veca by another way; products: those alone
    cores: int
    patches: float = 1.0  # share of them that is spent, at mixed scale

    @property
    def label(self) -> str:
        spent = "" if self.patches == 1 else f", patches {self.patches:g}"
        return (f"{self.name}, {self.cores} cores" if self.cores else self.name) + spent


def network(
    arm: Arm, config: VecaConfig, size: int, batch: int, device: torch.device, dtype: torch.dtype = FLOAT32
) -> Call:
    """A whole forward pass of `batch` size×size images, random weights."""
    if arm.name == "products":
        torch.manual_seed(0)
        return products(config, size, arm.cores, batch, device, dtype)
    if arm.name in ("onnx", "int8"):
        dtype = FLOAT32  # exported files have no other
    model, images = build(arm, config, device, dtype), torch.randn(batch, 3, size, size, device=device).to(dtype)
    if arm.name in PREFIX:
        return lambda: model(images)
    if arm.name in ("onnx", "int8"):
        return in_onnxruntime(model, arm, images)
    if arm.name == "stream":
        if batch != 1:
            raise InputError("streaming takes one image at a time: use --batches 1")
        pixels = np.random.default_rng(0).integers(0, 256, (size, size, 3), np.uint8)
        assert isinstance(model, Veca)
        return lambda: model.stream(pixels, cores=arm.cores)
    ours: Callable[..., object] = torch.compile(model) if arm.name == "compile" else model
    return lambda: ours(images, cores=arm.cores, patches=arm.patches)


def build(arm: Arm, config: VecaConfig, device: torch.device, dtype: torch.dtype = FLOAT32) -> nn.Module:
    """The network of an arm, in evaluation mode, the same random weights every time."""
    torch.manual_seed(0)
    if arm.name in PREFIX:
        return dino(arm.name, config).to(device, dtype)
    attention: Literal["core", "dense"] = "dense" if arm.name == "dense" else "core"
    return Veca(replace(config, attention=attention)).eval().to(device, dtype)


def in_onnxruntime(model: nn.Module, arm: Arm, images: Tensor) -> Call:
    """The exported file in onnxruntime, with as many threads as PyTorch has."""
    from veca.export import quantize, write_onnx

    onnxruntime = require("onnxruntime", "export")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    assert isinstance(model, Veca)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        with torch.inference_mode(False):
            write_onnx(model, arm.cores, file)
        if arm.name == "int8":
            quantize(file)
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    feed = {"images": images.numpy()}
    return lambda: session.run(None, feed)


def training_step(
    arm: Arm, config: VecaConfig, size: int, batch: int, device: torch.device, dtype: torch.dtype = FLOAT32
) -> Call:
    """A forward and a backward pass; arms whose name ends in `checkpointed` compute activations again."""
    name, _, checkpointed = arm.name.partition(" ")
    model = build(Arm(name, arm.cores), config, device, dtype).train()
    images = torch.randn(batch, 3, size, size, device=device).to(dtype)
    if checkpointed and isinstance(model, Veca):
        model.set_grad_checkpointing(True)
    elif checkpointed:
        model.gradient_checkpointing_enable()  # type: ignore[operator]

    def run() -> None:
        if isinstance(model, Veca):
            out = model(images, cores=arm.cores)
            loss = out.patches.square().mean() + out.cls.square().mean()
        else:
            loss = model(images).last_hidden_state.square().mean()
        loss.backward()
        model.zero_grad(set_to_none=True)

    return run


def attention_path(
    arm: Arm, config: VecaConfig, size: int, batch: int, device: torch.device, dtype: torch.dtype = FLOAT32
) -> Call:
    """The attention of every layer alone, from queries, keys and values to the mixed values (paper, Fig. S.7)."""
    patches, heads, cores = (size // config.patch_size) ** 2, config.heads, arm.cores
    tokens = patches + PREFIX.get(arm.name, cores)
    q, k, v = torch.randn(3, batch, heads, tokens, config.head_width, device=device).to(dtype)

    def dense() -> None:
        for _ in range(config.depth):
            attend(q, k, v)

    def core_periphery() -> None:
        for _ in range(config.depth):
            rows = attend(q[:, :, :cores], k, v), attend(q[:, :, cores:], k[:, :, :cores], v[:, :, :cores])
            torch.cat(rows, dim=-2)

    return core_periphery if arm.name == "veca" else dense


def products(
    config: VecaConfig, size: int, cores: int, batch: int, device: torch.device, dtype: torch.dtype = FLOAT32
) -> Call:
    """Every matrix product of a VECA forward pass, of the same shapes, into memory that is there already."""
    width, hidden, heads, d = config.width, config.hidden_width, config.heads, config.head_width
    patches = (size // config.patch_size) ** 2
    tokens, pixels = batch * (patches + cores), 3 * config.patch_size**2
    first = hidden * (2 if config.mlp == "swiglu" else 1)

    def new(*shape: int) -> Tensor:
        return (torch.randn(*shape, device=device) * 0.05).to(dtype)

    # (rows, weights of every layer, result): weights differ by layer, as they do in a network
    linear = [(new(tokens, width), new(config.depth, width, width), new(tokens, width)) for _ in range(4)]
    linear.append((linear[0][0], new(config.depth, first, width), new(tokens, first)))
    linear.append((new(tokens, hidden), new(config.depth, width, hidden), linear[0][2]))
    embed = (new(batch * patches, pixels), new(width, pixels), new(batch * patches, width))
    groups = batch * heads
    core_query, patch_query = new(groups, cores, d), new(groups, patches, d)
    keys, core_keys = new(groups, patches + cores, d), new(groups, cores, d)
    core_logits, patch_logits = new(groups, cores, patches + cores), new(groups, patches, cores)

    def run() -> None:
        torch.mm(embed[0], embed[1].t(), out=embed[2])
        for layer in range(config.depth):
            for rows, weights, result in linear:
                torch.mm(rows, weights[layer].t(), out=result)
            torch.bmm(core_query, keys.transpose(1, 2), out=core_logits)
            torch.bmm(core_logits, keys)
            torch.bmm(patch_query, core_keys.transpose(1, 2), out=patch_logits)
            torch.bmm(patch_logits, core_keys)

    return run
