"""Where to compute, and how precisely: one answer for every command's `--device` and `--dtype`."""

from __future__ import annotations

import torch

from veca.errors import InputError


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the device computes in it, else float32."""
    from veca.fused import native_bfloat16

    if name == "auto":
        native = native_bfloat16() if device.type == "cpu" else device.type == "cuda" and torch.cuda.is_bf16_supported()
        name = "bfloat16" if native else "float32"
    if name not in ("float32", "bfloat16"):
        raise InputError(f"--dtype is auto, float32 or bfloat16, not {name!r}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one, else the CPU: nobody has tried these networks on Apple's mps yet."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"--device {name} cannot be used here: {' '.join(str(error).split())[:120]}; use --device cpu"
        ) from None
