"""Files that cost more than their pixels are refused before they are decoded; what encoders write is not."""

from __future__ import annotations

import io
import threading

import numpy as np
import pytest
from attack import images
from PIL import Image

import veca
from veca.images import open_header, open_image

tifffile = pytest.importorskip("tifffile")


@pytest.mark.parametrize(
    ("bomb", "reason"),
    [
        (images.jpeg_of_scans, "goes over its picture more than 64 times"),
        (images.jpeg2000_of_precincts, "is cut into 294000000 pieces"),
        (images.tiff_of_shared_tiles, "tiles or strips claim more bytes than their pixels have"),
    ],
)
def test_bombs_are_refused(bomb: object, reason: str) -> None:
    with pytest.raises(veca.InputError, match=reason):
        open_image(bomb())  # type: ignore[operator]


def test_scans_after_the_picture_and_in_thumbnails_do_not_count() -> None:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x9286] = 300 * b"\xff\xda"  # a comment; a thumbnail would hold one
    Image.new("RGB", (64, 64)).save(file, "JPEG", progressive=True, exif=exif)
    assert open_image(file.getvalue() + 300 * file.getvalue()).size == (64, 64)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"irreversible": True, "quality_mode": "rates", "quality_layers": [80, 40, 20, 10, 5, 2, 1]},
        {"tile_size": (128, 128)},
        {"precinct_size": (128, 128), "codeblock_size": (32, 32)},
        {"codeblock_size": (16, 16), "no_jp2": True},
        {"num_resolutions": 1},
    ],
)
def test_jpeg2000_of_an_encoder_is_read(options: dict[str, object]) -> None:
    for side in (17, 600):
        assert open_image(images.photo("JPEG2000", side=side, **options)).width == side


@pytest.mark.parametrize("compression", [None, "deflate", "lzw", "packbits", "jpeg", "zstd", "lzma"])
@pytest.mark.parametrize("noise", [False, True])
def test_tiff_of_an_encoder_is_read(compression: str | None, noise: bool) -> None:
    pixels = np.random.default_rng(0).integers(0, 256 if noise else 1, (300, 500, 3), dtype=np.uint8)
    for tile in (None, (16, 16), (512, 512)):
        file = io.BytesIO()
        tifffile.imwrite(
            file, pixels, compression=compression, tile=tile, photometric="rgb", rowsperstrip=None if tile else 1
        )
        assert open_image(file.getvalue()).size == (500, 300)


def test_pillows_own_limit_is_left_alone() -> None:
    """It is global: another thread that relies on it must see it at every moment."""
    limit, seen, stop = Image.MAX_IMAGE_PIXELS, set(), threading.Event()

    def watch() -> None:
        while not stop.is_set():
            seen.add(Image.MAX_IMAGE_PIXELS)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        whole = images.png_of_zeros(14_000)  # more pixels than Pillow opens
        for _ in range(300):
            assert open_header(io.BytesIO(whole), "photo").size == (14_000, 14_000)
    finally:
        stop.set()
        thread.join()
    assert seen == {limit}


def test_transparency_is_laid_on_white_in_bands_as_in_one() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (700, 40, 4), dtype=np.uint8)
    layer = Image.fromarray(pixels)
    white = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    assert np.array_equal(np.asarray(open_image(layer)), np.asarray(white))
