"""TIFF files, a row of tiles (or strips) at a time: plain ones, pyramids, OME-TIFF with its channels in pages."""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from veca.costly import costly_jpeg, costly_jpeg2000, costly_tiff
from veca.errors import InputError, require
from veca.large.source import MAX_BLOCK, Array, Source, one_line

JPEG = (6, 7, 33007, 34892)  # TIFF's compressions that are JPEG
JPEG2000 = (33003, 33004, 33005, 34712)
GEO = (33550, 34264, 34735)  # tags of a reference system: pixel scale, transformation, keys
COLOURS = {1: "MINISBLACK", 2: "RGB", 6: "YCBCR"}  # TIFF's photometric interpretations that are plain values
LENGTHS = {"m": 1e6, "dm": 1e5, "cm": 1e4, "mm": 1e3, "µm": 1.0, "um": 1.0, "nm": 1e-3}  # in micrometres


class TiffSource(Source):
    """The first image of a TIFF file: its levels, each a page, or a page for each channel."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        tifffile = require("tifffile", "stream")
        self.name = str(path)
        try:
            self.file = tifffile.TiffFile(path, _multifile=False)  # other files that it names are not opened
        except Exception as error:  # damaged files raise many kinds
            raise InputError(f"{path}: not a readable TIFF file ({one_line(error)})") from error
        try:
            self._open()
        except InputError:
            self.file.close()
            raise
        except Exception as error:  # ValueError, ZeroDivisionError, TypeError, … from tags that make no sense
            self.file.close()
            raise InputError(f"{path}: its tags are damaged ({one_line(error)})") from error

    def _open(self) -> None:
        first = TiffPage(self.file, self.file.pages[0], self.name)
        self.pages = [[first]]  # of each level, of each channel
        if len(self.file.pages) > 1 or first.page.subifds:
            with contextlib.suppress(IndexError):  # tags that tifffile makes no series of
                self._series(self.file.series[0], first)
        if len(self.pages) == 1 == len(self.pages[0]):
            self._reduced(first)
        self.levels = [(pages[0].width, pages[0].height) for pages in self.pages]
        self.dtype = first.page.dtype
        samples = first.page.samplesperpixel
        # A fourth value is either how opaque a pixel is or another band, infrared say: the file tells.
        self.opacity = samples == 4 and len(self.pages[0]) == 1 and page_opacity(first.page)
        self.colours = (0, 1, 2) if samples >= 3 and first.page.photometric in (2, 6) else None
        self.places = list(itertools.product(range(len(self.pages[0])), range(samples)))
        self.bands = len(self.places)
        self.mpp = self._mpp(first.page)
        self.reference = any(tag in first.page.tags for tag in GEO)
        if others := self._others():
            self.notes = (*self.notes, f"takes the first of {others + 1} images in the file")
        with contextlib.suppress(KeyError, ValueError, AttributeError):
            self.nodata = float(first.page.tags[42113].value)

    def _series(self, series: Any, first: TiffPage) -> None:
        axes, shape = series.get_axes(squeeze=False), series.get_shape(squeeze=False)
        sizes = dict(zip(axes, shape, strict=True))
        leading = [axis for axis in axes if axis not in "YXS"]
        others = [f"{sizes[axis]} along {axis}" for axis in leading if axis != "C" and sizes[axis] > 1]
        if others:
            self.notes = (f"takes the first of {', '.join(others)}",)
        channels = sizes.get("C", 1) if "C" in leading else 1
        counts = [sizes[axis] for axis in leading]

        def number(channel: int) -> int:
            place = [channel if axis == "C" else 0 for axis in leading]
            return int(np.ravel_multi_index(place, counts)) if counts else 0

        levels = []
        for level in series.levels:
            pages = [level.pages[number(channel)] for channel in range(channels)]
            if any(page is None for page in pages):
                raise InputError(f"{self.name}: some of its channels have no page; rewrite it as OME-TIFF")
            levels.append([page if hasattr(page, "tags") else page.aspage() for page in pages])
        if levels[0][0].index != first.page.index:
            return  # a series that begins elsewhere: the first page it is
        self.pages = [[first, *(TiffPage(self.file, page, self.name) for page in levels[0][1:])]]
        for pages in levels[1:]:
            page = pages[0]
            same = (page.samplesperpixel, page.dtype) == (first.page.samplesperpixel, first.page.dtype)
            if same and page.imagewidth <= self.pages[-1][0].width and page.imagelength <= self.pages[-1][0].height:
                self.pages.append([TiffPage(self.file, page, self.name) for page in pages])

    def _reduced(self, first: TiffPage) -> None:
        """Later pages that call themselves reduced copies, where tifffile makes no series of them."""
        for page in itertools.islice(self.file.pages, 1, 32):
            page = page if hasattr(page, "tags") else page.aspage()
            same = (page.samplesperpixel, page.dtype) == (first.page.samplesperpixel, first.page.dtype)
            shares = page.imagewidth / first.width, page.imagelength / first.height
            smaller = page.imagewidth < self.pages[-1][0].width
            if page.is_reduced and same and smaller and abs(shares[0] - shares[1]) < 0.02 * shares[0]:
                self.pages.append([TiffPage(self.file, page, self.name)])

    def _others(self) -> int:
        """How many images of the file are not read; masks, thumbnails and a slide's label are no images."""
        if len(self.file.pages) < 2 or self.file.is_svs:
            return 0
        used = {page.page.index for pages in self.pages for page in pages}
        with contextlib.suppress(Exception):  # tags of pages that nobody asked for may be damaged
            first = [series.keyframe for series in self.file.series]
            return sum(page.index not in used and not int(page.subfiletype) & 5 for page in first)
        return 0

    def _mpp(self, page: Any) -> float | None:
        """Micrometres a pixel: of OME's metadata, of Aperio's, or of a resolution in centimetres (others write 72 dpi
        whatever the picture is)."""
        try:
            if self.file.is_ome:
                import xml.etree.ElementTree as tree

                element = next(node for node in tree.fromstring(self.file.ome_metadata).iter() if tag(node) == "Pixels")
                size = float(element.attrib["PhysicalSizeX"])
                return positive(size * LENGTHS[element.attrib.get("PhysicalSizeXUnit", "µm")])
            if self.file.is_svs:
                from tifffile import tifffile

                return positive(float(tifffile.svs_description_metadata(page.description)["MPP"]))
            if page.tags["ResolutionUnit"].value == 3:
                up, down = page.tags["XResolution"].value
                return positive(1e4 * down / up)
        except Exception:  # missing or senseless: then it is not known
            pass
        return None

    def read(self, x: int, y: int, width: int, height: int, level: int, bands: Sequence[int]) -> Array:
        wanted = [self.places[band] for band in bands]
        pages, samples = {page for page, _ in wanted}, [sample for _, sample in wanted]
        if len(pages) == 1:
            return self.pages[level][pages.pop()].read(x, y, width, height, samples)
        parts = [self.pages[level][page].read(x, y, width, height, [sample]) for page, sample in wanted]
        return np.concatenate(parts, axis=2)

    def close(self) -> None:
        self.file.close()


class TiffPage:
    """One page, of which one row of tiles (or strips) is decoded at a time."""

    def __init__(self, file: Any, page: Any, name: str) -> None:
        self.file, self.page, self.name = file, page, name
        if refusal := self._unsupported() or self._incomplete():
            raise InputError(f"{name}: {refusal}")
        self.plain = page.is_contiguous and page.compression == 1  # values in order, in one run
        self.tile_width = page.tilewidth if page.is_tiled else self.width
        # The last row of tiles: its number, plane, the first and the last of its tiles that were wanted, their pixels.
        self.band: tuple[tuple[int, int, int, int], Array] | None = None

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
        if page.dtype is None or page.dtype.kind not in "buif":
            return "its values are not plain numbers; convert it"
        if not 1 <= page.samplesperpixel <= 4096 or page.imagedepth != 1:
            return f"it has {page.samplesperpixel} values a pixel and is {page.imagedepth} deep; convert it"
        return ""

    def _incomplete(self) -> str:
        """Whether the file holds every tile (or strip) that its tags speak of; found now, not after an hour."""
        page = self.page
        self.height, self.width = page.imagelength, page.imagewidth
        self.planes = page.samplesperpixel if page.planarconfig == 2 else 1
        self.together = page.samplesperpixel // self.planes  # values of a pixel that lie side by side
        wide, high = (page.tilewidth, page.tilelength) if page.is_tiled else (self.width, page.rowsperstrip)
        if min(self.height, self.width, wide, high or self.height) < 1:
            return f"its tags say {self.width}×{self.height} pixels in tiles of {wide}×{high}"
        self.band_height = min(high or self.height, self.height)
        self.across = -(-self.width // wide)
        self.tiles = self.across * -(-self.height // self.band_height)  # of a plane
        needed = self.tiles * self.planes
        offsets, counts = page.dataoffsets, page.databytecounts
        if not (len(offsets) == len(counts) == needed or page.is_contiguous):
            return f"it should have {needed} tiles or strips, but lists {len(offsets)} places and {len(counts)} lengths"
        end = max((start + count for start, count in zip(offsets, counts, strict=True) if count), default=0)
        if end > self.file.filehandle.size:
            return f"it is cut short: its tiles end at byte {end}, the file at {self.file.filehandle.size}"
        bits = max(8, page.bitspersample) * self.together  # as decoded
        if not page.is_contiguous and self.band_height * self.across * wide * bits // 8 > MAX_BLOCK:
            size = f"{self.across * wide}×{self.band_height}"
            return f"a row of its tiles has {size} pixels, too many to decode at once; rewrite it in tiles of 512×512"
        return costly_tiff(counts, (self.width, self.height * self.planes), (wide, self.band_height), bits)

    def read(self, x: int, y: int, width: int, height: int, samples: list[int]) -> Array:
        if self.planes > 1:
            return np.concatenate([self._plane(x, y, width, height, plane) for plane in samples], axis=2)
        values = self._plane(x, y, width, height, 0)
        whole = samples == list(range(self.together))
        return values if whole else values[..., samples]

    def _plane(self, x: int, y: int, width: int, height: int, plane: int) -> Array:
        if self.plain:  # old files may hold all rows in one strip: read no more than is asked for
            if width == self.width:
                return self._run(plane, y, 0, width, height)
            return np.concatenate([self._run(plane, row, x, width, 1) for row in range(y, y + height)])
        tiles = x // self.tile_width, -(-(x + width) // self.tile_width)
        offset = tiles[0] * self.tile_width
        parts, top = [], y
        while top < y + height:
            number = top // self.band_height
            band, start = self._band(number, plane, *tiles), number * self.band_height
            parts.append(band[top - start : y + height - start, x - offset : x - offset + width])
            top = start + self.band_height
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def _run(self, plane: int, y: int, x: int, width: int, height: int) -> Array:
        """Whole rows, or a part of one: pixels that follow each other in the file."""
        dtype = np.dtype(self.file.byteorder + self.page.dtype.char)
        pixel = self.together * dtype.itemsize
        self.file.filehandle.seek(self.page.dataoffsets[0] + ((plane * self.height + y) * self.width + x) * pixel)
        data = self.file.filehandle.read(width * height * pixel)
        if len(data) < width * height * pixel:
            raise InputError(f"{self.name}: the file ends before its last row")
        values = np.frombuffer(data, dtype).astype(self.page.dtype, copy=False)
        return values.reshape(height, width, self.together)

    def _band(self, number: int, plane: int, first: int, last: int) -> Array:
        """Tiles first ≤ i < last of a row of tiles."""
        wanted = (number, plane, first, last)
        if self.band is None or self.band[0] != wanted:
            height = min(self.band_height, self.height - number * self.band_height)
            offset, end = first * self.tile_width, min(last * self.tile_width, self.width)
            shape = (height, end - offset, self.together)
            try:
                band = np.zeros(shape, self.page.dtype)
            except MemoryError:
                raise InputError(f"{self.name}: no memory for a row of its tiles, {shape[1]}×{height} pixels") from None
            begin = plane * self.tiles + number * self.across
            for index in range(begin + first, begin + last):
                tile, left = self._tile(index)
                if tile is not None:  # a tile that was never written is black
                    part = band[:, left - offset : left - offset + tile.shape[1]]
                    part[: tile.shape[0]] = tile[: part.shape[0], : part.shape[1]]
            self.band = (wanted, band)
        return self.band[1]

    def _tile(self, index: int) -> tuple[Array | None, int]:
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


def page_opacity(page: Any) -> bool:
    """Whether a TIFF page's last sample is its opacity (ExtraSamples 1 or 2)."""
    return any(int(kind) in (1, 2) for kind in page.extrasamples)


def tag(node: Any) -> str:
    return str(node.tag).rsplit("}", 1)[-1]


def positive(value: float) -> float | None:
    return value if 0 < value < 1e9 else None
