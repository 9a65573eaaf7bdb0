"""Hostile large images: TIFF whose tags or tiles are damaged, and .npy headers that lie."""

from __future__ import annotations

import io
import random
import struct

import numpy as np
import tifffile

from .images import damaged

EXTREMES = (0, 1, 2, 3, 7, 16, 255, 65535, 2**31 - 1, 2**31, 2**32 - 1)
SHAPES = ("(-1, 64, 3)", "(64, -64, 3)", "(0, 64, 3)", "(64,)", "(2147483648, 2147483648, 3)", "(64, 64, 3, 1)", "()")
TYPES = ("|u1", "<f8", "|O", "<U8", ">u2", "|b1", "<c16", "|V3", "[('a', '|u1')]", "x")


def tiff(chance: random.Random) -> bytes:
    """A small TIFF as an encoder writes it."""
    pixels = np.random.default_rng(chance.randrange(9)).integers(0, 256, (96, 80, 3), dtype=np.uint8)
    layout = chance.choice(({"tile": (32, 32)}, {"tile": (16, 48)}, {"rowsperstrip": 8}, {}))
    options = {"compression": chance.choice((None, "deflate", "lzw", "jpeg", "packbits", "jpeg2000")), **layout}
    file = io.BytesIO()
    tifffile.imwrite(file, pixels, photometric="rgb", bigtiff=chance.random() < 0.2, **options)
    return file.getvalue()


def with_changed_tags(data: bytes, chance: random.Random) -> bytes:
    """One field of one or two tags of the first directory made extreme."""
    changed = bytearray(data)
    if data[2] == 43:  # BigTIFF
        start, size, count = struct.unpack_from("<Q", data, 8)[0], 20, 8
    else:
        start, size, count = struct.unpack_from("<I", data, 4)[0], 12, 2
    tags = int.from_bytes(data[start : start + count], "little")
    for _ in range(chance.choice((1, 1, 2))):
        at = start + count + size * chance.randrange(tags)
        field, width = chance.choice(((0, 2), (2, 2), (4, 4), (size - 4, 4), (size - 4, 4)))
        value = chance.choice(EXTREMES) if chance.random() < 0.8 else chance.randrange(2**32)
        changed[at + field : at + field + width] = (value % 256**width).to_bytes(width, "little")
    return bytes(changed)


def npy(chance: random.Random) -> bytes:
    shape = chance.choice(SHAPES) if chance.random() < 0.7 else "(32, 32, 3)"
    kind = chance.choice(TYPES) if chance.random() < 0.5 else "|u1"
    kind = kind if kind.startswith("[") else repr(kind)
    header = f"{{'descr': {kind}, 'fortran_order': {chance.choice(('True', 'False', '3'))}, 'shape': {shape}, }}"
    if chance.random() < 0.1:
        header = 3000 * "(" + header
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text) % 65536) + text + bytes(32 * 32 * 3)


def hostile_large(seed: int) -> tuple[str, bytes]:
    """A file's suffix and its content."""
    chance = random.Random(seed)
    if chance.random() < 0.25:
        data = npy(chance)
        return ".npy", damaged(data, chance) if chance.random() < 0.2 else data
    data = tiff(chance)
    return ".tif", with_changed_tags(data, chance) if chance.random() < 0.6 else damaged(data, chance)
