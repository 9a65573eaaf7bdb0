"""Hostile weights and configurations: damaged files, tensors that lie, settings that make no sense."""

from __future__ import annotations

import io
import json
import math
import random
import struct
import zipfile
from typing import Any

import torch

from veca.config import VecaConfig
from veca.weights import save

from .images import damaged

TINY = VecaConfig(depth=2, width=32, heads=2, bank=8)
ODD: tuple[Any, ...] = (
    *(0, -1, 1, 3, 2**31, 2**63, 10**40, 0.0, -0.0, 1e-300, 1e300, math.nan, math.inf, -math.inf, True, None),
    *("", "x", "core", "table", [], [1], {}, {"a": 1}, "\x00", "\ud800", 2000 * "y"),
)
PROGRAMS = (
    b"cbuiltins\nbytearray\n(J\x00\x00\x00\x70tR.",
    b"ctorch\nFloatTensor\n(J\x00\x00\x00\x40tR.",
    b"cos\nsystem\n(X\x04\x00\x00\x00truetR.",
    b"X\xff\xff\xff\x7f",
    b"(lp0\n" + 5000 * b"(l" + b".",
)


def configuration(seed: int) -> object:
    """Settings of a model of which some make no sense; seldom none at all."""
    chance = random.Random(seed)
    if chance.random() < 0.05:
        return chance.choice(ODD)
    values: dict[Any, Any] = TINY.to_dict()
    for _ in range(chance.choice((1, 1, 2, 4))):
        name = chance.choice(list(values)) if chance.random() < 0.9 else chance.choice(("", "x", "heads "))
        values[name] = chance.choice(ODD)
    return values


def whole_safetensors(folder: Any) -> bytes:
    from veca.model import Veca

    torch.manual_seed(0)
    save(Veca(TINY), folder)
    return bytes((folder / "model.safetensors").read_bytes())


def hostile_weights(seed: int, whole: bytes) -> tuple[str, bytes]:
    """A file's suffix and its content, made of a whole .safetensors file."""
    chance = random.Random(seed)
    way = chance.random()
    if way < 0.4:
        return ".safetensors", damaged(whole, chance)
    if way < 0.75:
        return ".safetensors", with_changed_header(whole, chance)
    return ".pt", checkpoint(chance)


def with_changed_header(whole: bytes, chance: random.Random) -> bytes:
    size = int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8 : 8 + size]), bytearray(whole[8 + size :])
    about = json.loads(header["__metadata__"]["veca"])
    tensor = chance.choice([name for name in header if name != "__metadata__"])
    way = chance.randrange(8)
    if way == 0:
        about["config"] = configuration(chance.randrange(10**9))
    elif way == 1:
        about[chance.choice(("card", "crc32", "format"))] = chance.choice(ODD)
    elif way == 2:
        header[tensor]["shape"] = chance.choice(([], [2**40], [0], [-1], [2**32, 2**32]))
    elif way == 3:
        header[tensor]["dtype"] = chance.choice(("F64", "BF16", "I32", "F8_E4M3", "X"))
    elif way == 4:
        header[tensor]["data_offsets"] = [0, chance.choice((0, 4, 2**40))]
    elif way == 5:
        del header[tensor]
    elif way == 6:
        struct.pack_into("<f", data, 4 * chance.randrange(len(data) // 4), chance.choice((math.nan, math.inf)))
        about.pop("crc32")
    else:
        header["__metadata__"]["veca"] = chance.choice(("[" * 10**5, "{", "3", '{"a": ' * 9999, ""))
    if way < 7:
        header["__metadata__"]["veca"] = json.dumps(about)
    if chance.random() < 0.8:
        header["__metadata__"].pop("veca_crc32", None)  # as earlier editions wrote it, so that more is reached
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


def checkpoint(chance: random.Random) -> bytes:
    """An authors' checkpoint, or an archive with a program of its own."""
    file = io.BytesIO()
    odd = chance.choice(ODD[:-2])
    tensors: dict[str, Any] = {
        "patch_embed.proj.weight": torch.zeros(32, 3, 16, 16),
        "query_token_chunks.0": torch.zeros(1, 8, 32),
        "blocks.0.fc2.weight": torch.zeros(32, 85),
    }
    name = chance.choice(list(tensors))
    tensors[name] = chance.choice((torch.zeros(1).expand(4096, 4096), torch.zeros(0), torch.zeros(3), odd, 1))
    config = {chance.choice(("mlp_ratio", "num_heads", "hidden_dim", "in_channels", "distill_output_dim")): odd}
    torch.save({"student": tensors, "config": config}, file)
    if chance.random() < 0.5:
        return damaged(file.getvalue(), chance)
    changed = io.BytesIO()
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(changed, "w", chance.choice((0, 0, 8))) as new:
        for record in old.infolist():
            program = record.filename.endswith("data.pkl") and chance.random() < 0.8
            new.writestr(record.filename, b"\x80\x02" + chance.choice(PROGRAMS) if program else old.read(record))
    return changed.getvalue() if chance.random() < 0.8 else chance.choice(PROGRAMS)
