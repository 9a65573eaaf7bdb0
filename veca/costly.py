"""Files that cost far more to decode than their pixels do: told from how they are built, before they are decoded.

Bounds on bytes and pixels say nothing about these: a JPEG of 2 MB may go over its picture 20,000 times, a JPEG 2000 of
146 bytes ask for gigabytes of bookkeeping, and a TIFF name one and the same megabyte as the content of each tile.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from PIL import Image

SCANS = 64  # of a JPEG, each over the whole picture; encoders write up to 18
SHARE = 64  # pixels for each code block and packet of a JPEG 2000; encoders write one of each for 1024 or more
FEW = 1 << 14  # … and so many are never too many


def why_costly(image: Image.Image, file: Any) -> str:
    """What makes this file costly, of which only the header was read; empty where nothing does."""
    position = file.tell()
    try:
        if image.format in ("JPEG", "MPO"):
            file.seek(0)
            return costly_jpeg(file.read())
        if image.format == "JPEG2000":
            return costly_jpeg2000(file)
        if image.format == "TIFF":
            tags: Any = image.tag_v2  # type: ignore[attr-defined]
            counts = tags.get(325) or tags.get(279) or ()  # bytes of each tile, or of each strip
            unit = (tags.get(322), tags.get(323)) if 325 in tags else (image.width, tags.get(278, image.height))
            bits = sum(tags.get(258, (8,)))
            return costly_tiff(counts if isinstance(counts, tuple) else (counts,), image.size, unit, bits)
        return ""
    finally:
        file.seek(position)


def costly_jpeg(data: bytes) -> str:
    """Every scan goes over the whole picture, however few bytes it has."""
    if data.count(b"\xff\xda") <= SCANS:  # a thumbnail may hold one too, so this is at least how many there are
        return ""
    scans, position = 0, 2
    while (marker := re.compile(rb"\xff+[^\x00\xff\xd0-\xd7]").search(data, position)) is not None:
        kind, position = data[marker.end() - 1], marker.end()
        if kind == 0xD9:  # the end of the picture; what comes after it is not decoded
            break
        scans += kind == 0xDA
        position += int.from_bytes(data[position : position + 2], "big")
        if scans > SCANS:
            return f"it goes over its picture more than {SCANS} times (scans of a progressive JPEG); save it anew"
    return ""


def costly_tiff(counts: Sequence[int], size: tuple[int, int], unit: tuple[int, int], bits: int) -> str:
    """Tiles may share their bytes, and each is read for itself: together they are not much more than the picture."""
    width, height = (-(-side // max(1, part)) * max(1, part) for side, part in zip(size, unit, strict=True))
    if sum(counts) > 2 * width * height * max(1, bits) // 8 + 4096 * len(counts):
        return f"its {len(counts)} tiles or strips claim more bytes than their pixels have; it is damaged"
    return ""


def costly_jpeg2000(file: Any) -> str:
    """Every code block, and every packet (a precinct in a layer), is kept in memory, however little data it has."""
    pixels, most = 0, 0.0
    size = tile = (1, 1)
    components = 1
    for kind, body in _segments(file):
        if kind == 0x51:  # SIZ
            right, below, left, above, wide, high = struct.unpack_from(">6I", body, 2)
            size, tile = (right - left, below - above), (max(1, wide), max(1, high))
            components = struct.unpack_from(">H", body, 34)[0]
            pixels = size[0] * size[1]
        elif kind in (0x52, 0x53):  # COD; COC, which is of one component
            start = 5 if kind == 0x52 else 2 + (components > 256)
            layers = struct.unpack_from(">H", body, 2)[0] if kind == 0x52 else 1
            own_precincts = body[0 if kind == 0x52 else start - 1] & 1
            tiles = -(-size[0] // tile[0]) * -(-size[1] // tile[1])
            part = (min(size[0], tile[0]), min(size[1], tile[1]))
            precincts = list(body[start + 5 :]) if own_precincts else []
            most = max(most, tiles * components * _pieces(part, body[start:], layers, precincts))
    if most > pixels / SHARE + FEW:
        return f"it is cut into {most:.0f} pieces, too many for {size[0]}×{size[1]} pixels; save it anew"
    return ""


def _pieces(size: tuple[int, int], style: bytes, layers: int, precincts: list[int]) -> float:
    """Code blocks and packets of one component of one tile."""
    levels, block = min(style[0], 32), ((style[1] & 15) + 2, (style[2] & 15) + 2)
    total = 0.0
    for level in range(levels + 1):
        sides = [max(1, -(-side >> (levels - level))) for side in size]  # of this resolution
        stored = precincts[level] if level < len(precincts) else 0xFF
        powers = (stored & 15, stored >> 4)
        count = [-(-side >> power) for side, power in zip(sides, powers, strict=True)]
        # A precinct above the lowest resolution covers three bands of half its side, and blocks are no larger than it.
        inner = [max(0, min(one, power - (level > 0))) for one, power in zip(block, powers, strict=True)]
        blocks = max(sides[0] * sides[1] / 2 ** sum(inner), count[0] * count[1])
        total += blocks + count[0] * count[1] * layers
    return total


def _segments(file: Any) -> Iterator[tuple[int, bytes]]:
    """The markers of a JPEG 2000's headers, the picture's and those of its tiles."""
    file.seek(0)
    position = 0
    if file.read(4) != b"\xff\x4f\xff\x51":  # in boxes
        while True:
            file.seek(position)
            head = file.read(16)
            if len(head) < 8:
                return
            length = int.from_bytes(head[:4], "big")
            start = 16 if length == 1 else 8
            if head[4:8] == b"jp2c":
                position += start
                break
            position += max(8, int.from_bytes(head[8:16], "big") if length == 1 else length or 1 << 62)
    position, next_part = position + 2, 0
    while True:
        file.seek(position)
        head = file.read(4)
        if len(head) < 4 or head[0] != 0xFF or head[1] == 0xD9:
            return
        if head[1] == 0x93:  # the data of a tile's part
            if not next_part:
                return
            position = next_part
            continue
        length = int.from_bytes(head[2:], "big")
        body = file.read(max(0, length - 2))
        if len(body) < length - 2 or length < 2:
            return
        if head[1] == 0x90:  # SOT: where this part of a tile ends
            whole = int.from_bytes(body[2:6], "big")
            next_part = position + whole if whole > 12 else 0
        yield head[1], body
        position += 2 + length
