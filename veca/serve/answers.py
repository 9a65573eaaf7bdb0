"""Features and maps as JSON, .npz and PNG."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from PIL import Image

Array = np.ndarray[Any, Any]
MEDIA = {"json": "application/json", "npz": "application/x-npz", "png": "image/png", "scan": "application/octet-stream"}

# Dark to light through blue, green and yellow, so that a map also reads in grey.
PALETTE = np.array([(13, 8, 65), (43, 57, 136), (32, 120, 142), (58, 178, 114), (180, 214, 60), (253, 240, 150)])


def encode_json(values: Mapping[str, Any]) -> bytes:
    """Arrays as nested lists, rounded to 7 decimals.

    Row by row: one call of json.dumps over millions of numbers would hold the interpreter, and with it every other
    client, until it is done.
    """
    return "".join(_pieces(values)).encode()


def _pieces(values: Mapping[str, Any]) -> Iterator[str]:
    for index, (name, value) in enumerate(values.items()):
        yield f"{',' if index else '{'}{json.dumps(name)}:"
        yield from _array(value) if isinstance(value, np.ndarray) else (json.dumps(value, ensure_ascii=False),)
    yield "}"


def _array(array: Array) -> Iterator[str]:
    if array.ndim == 1:
        yield json.dumps((array if array.dtype == bool else array.astype(np.float64).round(7)).tolist())
        return
    yield "["
    for index, row in enumerate(array):
        yield "," if index else ""
        yield from _array(row)
    yield "]"


def encode_npz(values: Mapping[str, Any]) -> bytes:
    """Arrays as they are; numbers and texts as arrays without axes."""
    file = io.BytesIO()
    arrays: dict[str, Any] = {name: np.asarray(value) for name, value in values.items()}
    np.savez(file, **arrays)
    return file.getvalue()


def encode_png(values: Array, pixels: tuple[int, int]) -> bytes:  # h×w floats, (height, width)
    """The map in colours, lowest to highest value, enlarged to the picture the model saw."""
    low, high = float(values.min()), float(values.max())
    share = (values - low) / (high - low if high > low else 1.0)
    large = Image.fromarray(share.astype(np.float32)).resize((pixels[1], pixels[0]), Image.Resampling.BILINEAR)
    steps = np.linspace(0, 1, len(PALETTE))
    colours = [np.interp(np.asarray(large), steps, PALETTE[:, channel]) for channel in range(3)]
    file = io.BytesIO()
    Image.fromarray(np.stack(colours, axis=-1).round().astype(np.uint8)).save(file, "PNG")
    return file.getvalue()
