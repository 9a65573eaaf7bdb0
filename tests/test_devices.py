"""Each rank its own GPU. There is none here, so the order of the calls is what can be looked at."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from veca.devices import pick_device, pick_dtype
from veca.errors import InputError


def test_a_rank_touches_no_gpu_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    there = torch.zeros(0)

    def empty(*_: object, device: str) -> torch.Tensor:
        calls.append(("empty", device))
        return there

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: calls.append(("set", number)))
    monkeypatch.setattr(torch, "empty", empty)
    pick_device("auto", local_rank=3)
    pick_device("cuda:1", local_rank=3)
    pick_device("cuda")
    assert calls == [("set", 3), ("empty", "cuda:3"), ("empty", "cuda:1"), ("empty", "cuda")]


def test_a_device_that_is_not_there_is_one_line() -> None:
    with pytest.raises(InputError, match=r"--device cuda cannot be used here: .*; use --device cpu"):
        pick_device("cuda")
    assert pick_device("cpu", 1) == torch.device("cpu")


@pytest.mark.parametrize("native", [False, True])
def test_auto_is_bfloat16_only_where_the_cpu_computes_in_it(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN also takes bfloat16 on a CPU with AVX512 alone, and imitates it there."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: native, raising=False)
    cpu = torch.device("cpu")
    assert pick_dtype("auto", cpu) == (torch.bfloat16 if native else torch.float32)
    assert pick_dtype("bfloat16", cpu) == torch.bfloat16
    with pytest.raises(InputError, match="--dtype is auto, float32 or bfloat16, not 'float16'"):
        pick_dtype("float16", cpu)
