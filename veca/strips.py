"""Images read part by part, so that the photo itself need not fit in memory: arrays, memory maps, TIFF files.

What a strip's values mean is decided by `veca.images`, as for whole images. Rows and columns beyond the last whole
patch, at the bottom and at the right, are left out.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Union

import numpy as np
from PIL import Image
from torch import Tensor

from veca.costly import costly_jpeg, costly_jpeg2000, costly_tiff
from veca.errors import InputError, require
from veca.images import MAX_PIXELS, open_image, to_tensor

StripSource = Union[str, "os.PathLike[str]", Image.Image, "np.ndarray[Any, Any]", Tensor]
TIFF = (".tif", ".tiff", ".btf", ".svs")
JPEG = (6, 7, 33007, 34892)  # TIFF's compressions that are JPEG
JPEG2000 = (33003, 33004, 33005, 34712)
MAX_BAND = 4 << 30  # bytes of a row of tiles
COLOURS = {1: "MINISBLACK", 2: "RGB", 6: "YCBCR"}  # TIFF's photometric interpretations that are plain values


class Strips(Protocol):
    """An upright picture of which any box can be read."""

    height: int  # in pixels, whole patches
    width: int
    size: tuple[int, int]  # (width, height) of the whole picture

    def read(self, top: int, bottom: int, left: int = 0, right: int | None = None) -> Tensor:
        """Rows top ≤ y < bottom of columns left ≤ x < right, normalised: 1×3×(bottom−top)×(right−left) float32."""

    def __enter__(self) -> Strips: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_strips(source: StripSource, patch_size: int) -> Strips:
    """A tensor (1×3×H×W or 3×H×W, normalised), an array (H×W×3), a path to a TIFF, an .npy or any other image.

    Formats other than TIFF and .npy can only be decoded whole.
    """
    if isinstance(source, Tensor):
        return TensorStrips(source, patch_size)
    if isinstance(source, np.ndarray):
        return ArrayStrips(source, patch_size)
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if not path.is_file():
            raise InputError(f"{path}: {'is a folder, not an image' if path.is_dir() else 'no such file'}")
        if path.suffix.lower() in TIFF:
            return TiffStrips(path, patch_size)
        if path.suffix.lower() == ".npy":
            try:
                with np.errstate(over="ignore"):  # a product of hostile sides; the file is shorter, which is an error
                    array = np.load(path, mmap_mode="r", allow_pickle=False)
            except Exception as error:  # hostile headers: ValueError, OSError, EOFError, OverflowError, SyntaxError, …
                raise InputError(f"{path}: not an array of numbers ({one_line(error)})") from error
            return ArrayStrips(array, patch_size, str(path))
    name = str(source) if isinstance(source, (str, os.PathLike)) else "image"
    return ArrayStrips(np.asarray(open_image(source, MAX_PIXELS)), patch_size, name)


def whole_patches(height: int, width: int, patch_size: int, name: str) -> tuple[int, int]:
    if height < patch_size or width < patch_size:
        raise InputError(f"{name}: {width}×{height} is smaller than a patch of {patch_size}×{patch_size}")
    return height // patch_size * patch_size, width // patch_size * patch_size


class OpenStrips:
    """Nothing to close."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class TensorStrips(OpenStrips):
    """Pixels that are normalised already, as the model takes them."""

    def __init__(self, images: Tensor, patch_size: int) -> None:
        images = images[None] if images.ndim == 3 else images
        if images.ndim != 4 or images.shape[:2] != (1, 3) or not images.is_floating_point():
            shape = "×".join(map(str, images.shape))
            raise InputError(
                f"a tensor to stream is one normalised image, 3×H×W or 1×3×H×W, not {images.dtype} {shape}"
            )
        self.images = images
        self.height, self.width = images.shape[-2:]
        self.size = (self.width, self.height)
        if (self.height, self.width) != whole_patches(self.height, self.width, patch_size, "tensor"):
            raise InputError(
                f"the height and width of images must be multiples of the patch size {patch_size}, "
                f"not {self.height}×{self.width}"
            )

    def read(self, top: int, bottom: int, left: int = 0, right: int | None = None) -> Tensor:
        return self.images[:, :, top:bottom, left:right].float()


class ArrayStrips(OpenStrips):
    def __init__(self, array: np.ndarray[Any, Any], patch_size: int, name: str = "array") -> None:
        if not isinstance(array, np.ndarray) or array.ndim not in (2, 3) or min(array.shape) < 1:
            raise InputError(
                f"{name}: an image array is H×W, H×W×3 or H×W×4, not {'×'.join(map(str, np.shape(array)))}"
            )
        self.array = array
        self.size = (array.shape[1], array.shape[0])
        self.height, self.width = whole_patches(array.shape[0], array.shape[1], patch_size, name)

    def read(self, top: int, bottom: int, left: int = 0, right: int | None = None) -> Tensor:
        return pixels(self.array[top:bottom, left : self.width if right is None else right])


class TiffStrips:
    """The first page of a TIFF file; one row of its tiles (or strips) is decoded at a time."""

    def __init__(self, path: Path, patch_size: int) -> None:
        tifffile = require("tifffile", "stream")
        self.name = str(path)
        try:
            self.file = tifffile.TiffFile(path)
        except Exception as error:  # damaged files raise many kinds
            raise InputError(f"{path}: not a readable TIFF file ({one_line(error)})") from error
        try:
            self.page = self.file.pages[0]
            if refusal := self._unsupported() or self._incomplete():
                raise InputError(f"{path}: {refusal}")
            self.height, self.width = whole_patches(self.full_height, self.full_width, patch_size, self.name)
            self.plain = self.page.is_contiguous and self.page.compression == 1  # values in order, in one run
            # A fourth value is either how opaque a pixel is or another band, infrared say: the file tells.
            opacity = page_opacity(self.page)
            self.channels = 3 if self.page.samplesperpixel == 4 and not opacity else self.page.samplesperpixel
        except InputError:
            self.file.close()
            raise
        except Exception as error:  # ValueError, ZeroDivisionError, TypeError, … from tags that make no sense
            self.file.close()
            raise InputError(f"{path}: its tags are damaged ({one_line(error)})") from error
        self.size = (self.full_width, self.full_height)
        self.tile_width = self.page.tilewidth if self.page.is_tiled else self.full_width
        # The last row of tiles: its number, the first and the last of its tiles that were wanted, their pixels.
        self.band: tuple[tuple[int, int, int], np.ndarray[Any, Any]] | None = None

    def _unsupported(self) -> str:
        """What of TIFF this does not read, with a way out; empty where there is nothing."""
        page = self.page
        orientation = page.tags.get("Orientation")
        if orientation is not None and orientation.value != 1:
            return "it is stored turned (its Orientation tag); rewrite it upright first"
        if page.photometric not in COLOURS:
            return f"colours are stored as {page.photometric!s}, not {', '.join(COLOURS.values())}; convert it to RGB"
        if page.photometric == 6 and page.compression not in JPEG:  # decoding JPEG gives RGB, decoding others does not
            return "colours are stored as YCBCR without JPEG; convert it to RGB"
        if page.bitspersample not in (1, 8, 16, 32, 64):
            return f"it has {page.bitspersample} bits a value, whose range is not that of 8 or 16; convert it"
        if page.planarconfig == 2 and page.samplesperpixel > 1:
            return "its colours are stored in separate planes; rewrite it with them together"
        if page.samplesperpixel not in (1, 3, 4) or page.imagedepth != 1:
            return f"it has {page.samplesperpixel} values a pixel; 1, 3 or 4 can be read"
        return ""

    def _incomplete(self) -> str:
        """Whether the file holds every tile (or strip) that its tags speak of; found now, not after an hour."""
        page = self.page
        self.full_height, self.full_width = page.imagelength, page.imagewidth
        wide, high = (page.tilewidth, page.tilelength) if page.is_tiled else (self.full_width, page.rowsperstrip)
        if min(self.full_height, self.full_width, wide, high or self.full_height) < 1:
            return f"its tags say {self.full_width}×{self.full_height} pixels in tiles of {wide}×{high}"
        self.band_height = min(high or self.full_height, self.full_height)
        self.across = -(-self.full_width // wide)
        needed = self.across * -(-self.full_height // self.band_height)
        offsets, counts = page.dataoffsets, page.databytecounts
        if not (len(offsets) == len(counts) == needed or page.is_contiguous):
            return f"it should have {needed} tiles or strips, but lists {len(offsets)} places and {len(counts)} lengths"
        end = max((start + count for start, count in zip(offsets, counts, strict=True) if count), default=0)
        if end > self.file.filehandle.size:
            return f"it is cut short: its tiles end at byte {end}, the file at {self.file.filehandle.size}"
        bits = max(8, page.bitspersample) * page.samplesperpixel  # as decoded
        if not page.is_contiguous and self.band_height * self.across * wide * bits // 8 > MAX_BAND:
            size = f"{self.across * wide}×{self.band_height}"
            return f"a row of its tiles has {size} pixels, too many to decode at once; rewrite it in tiles of 512×512"
        return costly_tiff(counts, (self.full_width, self.full_height), (wide, self.band_height), bits)

    def read(self, top: int, bottom: int, left: int = 0, right: int | None = None) -> Tensor:
        right = self.width if right is None else right
        if self.plain:  # old files may hold all rows in one strip: read no more than is asked for
            return pixels(self._run(top, bottom)[:, left:right, : self.channels])
        tiles = left // self.tile_width, -(-right // self.tile_width)
        offset = tiles[0] * self.tile_width
        parts = []
        while top < bottom:
            number = top // self.band_height
            band, start = self._band(number, *tiles), number * self.band_height
            parts.append(band[top - start : bottom - start, left - offset : right - offset, : self.channels])
            top = start + self.band_height
        return pixels(np.concatenate(parts) if len(parts) > 1 else parts[0])

    def _run(self, top: int, bottom: int) -> np.ndarray[Any, Any]:
        dtype = np.dtype(self.file.byteorder + self.page.dtype.char)
        row = self.full_width * self.page.samplesperpixel
        self.file.filehandle.seek(self.page.dataoffsets[0] + top * row * dtype.itemsize)
        data = self.file.filehandle.read((bottom - top) * row * dtype.itemsize)
        if len(data) < (bottom - top) * row * dtype.itemsize:
            raise InputError(f"{self.name}: the file ends before its last row")
        values = np.frombuffer(data, dtype).astype(self.page.dtype, copy=False)
        return values.reshape(bottom - top, self.full_width, self.page.samplesperpixel)

    def _band(self, number: int, first: int, last: int) -> np.ndarray[Any, Any]:
        """Tiles first ≤ i < last of a row of tiles."""
        wanted = (number, first, last)
        if self.band is None or self.band[0] != wanted:
            height = min(self.band_height, self.full_height - number * self.band_height)
            offset, end = first * self.tile_width, min(last * self.tile_width, self.full_width)
            shape = (height, end - offset, self.page.samplesperpixel)
            try:
                band = np.zeros(shape, self.page.dtype)
            except MemoryError:
                raise InputError(f"{self.name}: no memory for a row of its tiles, {shape[1]}×{height} pixels") from None
            for index in range(number * self.across + first, number * self.across + last):
                tile, left = self._tile(index)
                if tile is not None:  # a tile that was never written is black
                    part = band[:, left - offset : left - offset + tile.shape[1]]
                    part[: tile.shape[0]] = tile[: part.shape[0], : part.shape[1]]
            self.band = (wanted, band)
        return self.band[1]

    def _tile(self, index: int) -> tuple[np.ndarray[Any, Any] | None, int]:
        """A decoded tile (h×w×samples) and its left edge."""
        try:
            self.file.filehandle.seek(self.page.dataoffsets[index])
            data = self.file.filehandle.read(self.page.databytecounts[index])
            if len(data) < self.page.databytecounts[index]:
                raise InputError("the file ends before it")
            if self.page.compression in JPEG and (costly := costly_jpeg(data)):
                raise InputError(costly)
            if self.page.compression in JPEG2000 and (costly := costly_jpeg2000(io.BytesIO(data))):
                raise InputError(costly)
            decoded, where, shape = self.page.decode(data or None, index, jpegtables=self.page.jpegtables)
        except Exception as error:  # damaged data, or a compression that needs another package
            raise InputError(f"{self.name}: tile {index} cannot be decoded ({one_line(error)})") from error
        if decoded is None and data:
            raise InputError(f"{self.name}: tile {index} is empty when decoded")
        left = where[3]
        return (None, left) if decoded is None else (decoded[0, : shape[1], : shape[2]], left)

    def __enter__(self) -> TiffStrips:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def page_opacity(page: Any) -> bool:
    """Whether a TIFF page's last sample is its opacity (ExtraSamples 1 or 2)."""
    return any(int(kind) in (1, 2) for kind in page.extrasamples)


def pixels(values: np.ndarray[Any, Any]) -> Tensor:
    """A strip of stored values, normalised: 1×3×h×W."""
    return to_tensor(open_image(np.ascontiguousarray(values), max_pixels=None))[None]
