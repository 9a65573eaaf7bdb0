"""Where to compute, and how precisely: one answer for every command's `--device` and `--dtype`."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from veca.errors import InputError

Dtype = Literal["auto", "float32", "bfloat16"]


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the device computes in it rather than imitating it, else float32."""
    if name == "auto":
        name = "bfloat16" if fast_bfloat16(device) else "float32"
    if name not in ("float32", "bfloat16"):
        raise InputError(f"--dtype is auto, float32 or bfloat16, not {name!r}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def pick_device(name: str, local_rank: int | None = None) -> torch.device:
    """`auto` is CUDA where there is one, else the CPU: nobody has tried these networks on Apple's mps yet.

    Of several ranks on one machine each takes the GPU of its number, unless one is named. It is made the current one
    before anything touches CUDA: otherwise every rank would also take memory on the first.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if name == "cuda" and local_rank is not None and torch.cuda.is_available():
            torch.cuda.set_device(local_rank)
            return torch.empty(0, device=f"cuda:{local_rank}").device
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"--device {name} cannot be used here: {' '.join(str(error).split())[:120]}; use --device cpu"
        ) from None


def fast_bfloat16(device: torch.device) -> bool:
    """Whether the device computes in bfloat16. A CPU without AMX or AVX512-BF16 imitates it, four times slower."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
        return any(bool(check()) for check in checks if check is not None)
    return False


def no_memory(error: BaseException) -> bool:
    """Whether a computation failed because it did not fit in memory, the device's or numpy's."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in str(error)


def in_memory(module: nn.Module, name: str) -> Tensor:
    """A module's own parameter: where accelerate keeps it on disk, it has it only while its `forward` runs."""
    parameter: Tensor = getattr(module, name)
    hook: Any = getattr(module, "_hf_hook", None)  # accelerate's
    if hook is None or not parameter.is_meta:
        return parameter
    hook.pre_forward(module)
    try:
        return cast(Tensor, getattr(module, name))
    finally:
        hook.post_forward(module, None)
