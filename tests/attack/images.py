"""Hostile images: bombs of each format, and ordinary photos with bytes changed, cut, doubled or joined."""

from __future__ import annotations

import io
import random
import struct
import zlib

import numpy as np
from PIL import Image

KINDS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")


def photo(kind: str, seed: int = 0, side: int = 96, **options: object) -> bytes:
    """A small picture with structure, as this format stores it."""
    small = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize((side, side * 3 // 4), Image.Resampling.BICUBIC).save(file, kind, **options)
    return file.getvalue()


def jpeg_of_scans(side: int = 7000, scans: int = 20_000) -> bytes:
    """A progressive JPEG whose last scan, of a few bytes, is repeated: each time the whole picture is gone over."""
    file = io.BytesIO()
    Image.new("RGB", (side, side), (90, 120, 60)).save(file, "JPEG", progressive=True, quality=30)
    whole = file.getvalue()
    last = whole[whole.rfind(b"\xff\xda") : -2]
    return whole[:-2] + scans * last + whole[-2:]


def jpeg2000_of_precincts(side: int = 7000) -> bytes:
    """150 bytes that name a precinct for every pixel, of which a decoder keeps half a kilobyte each."""
    data = bytearray(photo("JPEG2000", side=64, no_jp2=True))
    size = data.index(b"\xff\x51")
    struct.pack_into(">II", data, size + 6, side, side)
    struct.pack_into(">II", data, size + 22, side, side)
    style = data.index(b"\xff\x52")
    end = style + 2 + struct.unpack_from(">H", data, style + 2)[0]
    small = data[style : style + 14] + b"\x00"  # precincts of one pixel, in one level
    small[4], small[9] = small[4] | 1, 0
    struct.pack_into(">H", small, 2, len(small) - 2)
    return bytes(data[:style] + small + data[end:])


def tiff_of_shared_tiles(side: int = 7000, size: int = 1_000_000) -> bytes:
    """Every tile is one and the same megabyte, of which nearly all is nothing, deflated."""
    tile, nothing = 16, b"\x00\x00\x00\xff\xff"
    data = b"\x78\x01" + size // 5 * nothing + zlib.compress(bytes(tile * tile))[2:]
    count = (-(-side // tile)) ** 2
    body = 134 + 8 * count
    tags = [(256, side), (257, side), (258, 8), (259, 8), (262, 1), (277, 1), (322, tile), (323, tile)]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    entries += struct.pack("<HHIIHHII", 324, 4, count, 134, 325, 4, count, 134 + 4 * count)
    arrays = count * struct.pack("<I", body) + count * struct.pack("<I", len(data))
    return b"II*\0" + struct.pack("<IH", 8, 10) + entries + bytes(4) + arrays + data


def png_of_zeros(side: int) -> bytes:
    """A few kilobytes that decode to side² bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    pixels = zlib.compress(bytes(side * (side + 1)), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def gif_of_comments(size: int = 2_000_000) -> bytes:
    whole = photo("GIF")
    return whole[:-1] + b"\x21\xfe" + size // 2 * b"\x01a" + b"\x00" + whole[-1:]


def damaged(data: bytes, chance: random.Random) -> bytes:
    """The same bytes with some changed, cut out, doubled, or a number made as large as it gets."""
    data = bytes(data)
    for _ in range(chance.choice((1, 1, 2, 5, 20))):
        at = chance.randrange(max(1, min(len(data), chance.choice((64, 600, len(data) or 1)))))
        way = chance.randrange(6)
        if way == 0:
            data = data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]
        elif way == 1:
            data = data[:at] + chance.choice((b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", bytes(4))) + data[at + 4 :]
        elif way == 2:
            data = data[:at]
        elif way == 3:
            data = data[:at] + data[at + chance.randrange(64) :]
        elif way == 4:
            data = data[:at] + data[at : at + chance.randrange(1, 400)] * chance.randrange(2, 40) + data[at:]
        else:
            data = data[:at] + chance.randbytes(chance.randrange(1, 40)) + data[at:]
    return data


BOMBS = (jpeg_of_scans, jpeg2000_of_precincts, tiff_of_shared_tiles, lambda: png_of_zeros(20_000), gif_of_comments)


def hostile_image(seed: int) -> bytes:
    """One image of the endless series."""
    chance = random.Random(seed)
    if chance.random() < 0.03:
        return chance.choice(BOMBS)()
    options: dict[str, object] = {}
    kind = chance.choice(KINDS)
    if kind == "JPEG":
        options = {"progressive": chance.random() < 0.5}
    elif kind == "TIFF":
        options = {"compression": chance.choice((None, "tiff_lzw", "tiff_deflate", "jpeg", "packbits"))}
    whole = photo(kind, seed=chance.randrange(20), **options)
    if chance.random() < 0.1:
        whole += photo(chance.choice(KINDS))
    return damaged(whole, chance)
