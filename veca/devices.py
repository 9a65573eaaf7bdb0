"""Where to compute: one answer for every command's `--device`."""

from __future__ import annotations

import torch

from veca.errors import InputError


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
