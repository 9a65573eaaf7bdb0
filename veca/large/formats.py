"""Which file is read by which source: the one list to add a format to."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from veca.errors import InputError
from veca.large.arrays import open_npy, open_photo
from veca.large.source import Source

SLIDES = (".ndpi", ".mrxs", ".scn", ".vms", ".vmu", ".bif", ".svslide", ".czi", ".dcm")  # and .svs
TIFF = (".tif", ".tiff", ".btf", ".svs")
ZARR = (".zarr",)
HDF5 = (".h5", ".hdf5", ".he5", ".nc")


def open_slide(path: Path) -> Source:
    from veca.large.slides import SlideSource

    return SlideSource(path)


def open_tiff(path: Path) -> Source:
    """By what it holds: a scanner's slide, a scene with a reference system, or any other TIFF."""
    from veca.large.tiff import TiffSource

    if has("openslide"):
        import openslide

        # Scanners write .tif too. What has no maker (generic-tiff) is a slide by its name only.
        maker = openslide.OpenSlide.detect_format(path)
        if maker and (maker != "generic-tiff" or path.suffix.lower() == ".svs"):
            return open_slide(path)
    plain = TiffSource(path)
    if plain.reference and has("rasterio"):
        from veca.large.scenes import SceneSource

        plain.close()  # its tags were checked: as many tiles as the file has, none costlier than its pixels
        scene = SceneSource(path)
        scene.notes = plain.notes
        return scene
    if plain.reference:
        plain.notes = (*plain.notes, "its reference system is not read without pip install 'veca[geo]'")
    return plain


def open_zarr(path: Path) -> Source:
    from veca.large.zarr_source import ZarrSource

    return ZarrSource(path)


# How a name ends, and what opens it; the first that fits. The modules are imported when a file asks for them.
FORMATS: list[tuple[tuple[str, ...], Callable[[Path], Source]]] = [
    (SLIDES, open_slide),
    (TIFF, open_tiff),
    (ZARR, open_zarr),
    ((".npy",), open_npy),
]


READ_BY_PARTS = tuple(end for ends, _ in FORMATS for end in ends)


def open_file(path: Path) -> Source:
    """The source of a file, or of a folder that is one; formats that are not listed are decoded whole."""
    if not path.exists():
        raise InputError(f"{path}: no such file")
    if opener := opener_of(path):
        return opener(path)
    if path.is_dir():
        raise InputError(f"{path}: is a folder, not an image")
    if path.name.lower().endswith(HDF5):
        raise InputError(f"{path}: HDF5 is read as Zarr: copy the array in it once, with h5py and zarr.from_array")
    return open_photo(path)


def opener_of(path: Path) -> Callable[[Path], Source] | None:
    """What reads it box by box, without decoding it whole."""
    if path.is_dir():  # an array inside of a Zarr group has no suffix of its own
        marks = (".zarray", ".zgroup", "zarr.json")
        return open_zarr if any((path / mark).is_file() for mark in marks) else None
    return next((opener for ends, opener in FORMATS if path.name.lower().endswith(ends)), None)


def has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
