"""Every kind of image a user may bring, and every way in which it may be broken."""

from __future__ import annotations

import inspect
import io
import random
import re
import struct
import zlib
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import veca
from veca.errors import InputError
from veca.images import (
    MAX_PIXELS,
    MEAN,
    SIZE,
    STD,
    grid_size,
    image_size,
    open_image,
    preprocess,
    resize_short_side,
    to_tensor,
)

Array = np.ndarray[Any, Any]


def photo(width: int = 60, height: int = 40) -> Array:
    """Smooth, coloured, and different in each corner, so that a turn or a swap of channels shows."""
    y, x = np.mgrid[:height, :width]
    return np.stack([x * 255 / width, y * 255 / height, (x + y) * 200 / (width + height)], axis=-1).astype(np.uint8)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def difference(image: Image.Image, expected: Array) -> float:
    assert image.mode == "RGB"
    assert image.size == (expected.shape[1], expected.shape[0])
    return float(np.abs(np.asarray(image).astype(float) - expected).max())


# --- sources


def test_a_path_bytes_an_image_and_an_array_are_the_same_picture(tmp_path: Path) -> None:
    pixels = photo()
    path = tmp_path / "photo.png"
    Image.fromarray(pixels).save(path)
    data = path.read_bytes()
    for source in (path, str(path), data, bytearray(data), memoryview(data), Image.open(path), pixels):
        assert difference(open_image(source), pixels) == 0
        assert torch.equal(preprocess(source, 32, 16), preprocess(pixels, 32, 16))
    assert veca.preprocess is preprocess


def test_the_callers_image_is_left_as_it_was() -> None:
    image = Image.fromarray(photo())
    result = open_image(image)
    result.putpixel((0, 0), (9, 9, 9))
    assert image.getpixel((0, 0)) == (0, 0, 0)


@pytest.mark.parametrize("kind", ["AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP", "MPO"])
def test_formats(kind: str) -> None:
    lossy = {"AVIF": 12, "JPEG": 12, "WEBP": 12, "MPO": 12, "GIF": 40}  # GIF has 256 colours, dithered
    pixels = photo(64, 48)
    assert difference(open_image(encoded(Image.fromarray(pixels), kind)), pixels) <= lossy.get(kind, 0)


# --- orientation


TURNS = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: np.rot90(a, 1),
}


@pytest.mark.parametrize("kind", ["AVIF", "JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", TURNS)
def test_exif_orientation(kind: str, orientation: int, tmp_path: Path) -> None:
    pixels = photo(64, 48)
    image = Image.fromarray(pixels)
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 95} if kind in ("AVIF", "JPEG", "WEBP") else {}
    data = encoded(image, kind, exif=exif, **options)
    (tmp_path / "turned").write_bytes(data)
    expected = TURNS[orientation](pixels)
    assert difference(open_image(data), expected) <= (10 if options else 0)
    assert difference(open_image(Image.open(io.BytesIO(data))), expected) <= (10 if options else 0)
    assert image_size(tmp_path / "turned") == (expected.shape[1], expected.shape[0])
    h, w = grid_size(*image_size(tmp_path / "turned"), 32, 16)
    assert preprocess(data, 32, 16).shape == (1, 3, h * 16, w * 16)


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize("exif", [b"Exif\0\0nonsense", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff", b"", b"Exif\0\0"])
def test_damaged_exif_does_not_cost_the_picture(exif: bytes) -> None:
    pixels = photo(64, 48)
    data = encoded(Image.fromarray(pixels), "JPEG", quality=95)
    segment = b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif
    assert difference(open_image(data[:2] + segment + data[2:]), pixels) <= 10


# --- modes


def test_grey_and_bilevel() -> None:
    grey = photo()[..., 0]
    assert difference(open_image(encoded(Image.fromarray(grey), "PNG")), np.repeat(grey[..., None], 3, axis=2)) == 0
    bits = grey > 100
    expected = np.repeat(bits[..., None] * 255, 3, axis=2)
    assert difference(open_image(encoded(Image.fromarray(bits), "PNG")), expected) == 0
    assert difference(open_image(bits), expected) == 0


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM", "array"])
def test_sixteen_bits_are_scaled_not_clipped(kind: str) -> None:
    values = np.linspace(0, 65535, 64 * 48).astype(np.uint16).reshape(48, 64)
    source = values if kind == "array" else encoded(Image.fromarray(values), kind)
    expected = np.repeat(np.rint(values.astype(float) / 257)[..., None], 3, axis=2)
    assert difference(open_image(source), expected) == 0


def test_sixteen_bits_of_big_endian_tiff() -> None:
    values = np.linspace(0, 65535, 64 * 48).astype(np.uint16).reshape(48, 64)
    image = Image.frombytes("I;16B", (64, 48), values.astype(">u2").tobytes())
    expected = np.repeat(np.rint(values.astype(float) / 257)[..., None], 3, axis=2)
    assert difference(open_image(image), expected) == 0
    assert difference(open_image(encoded(image, "TIFF")), expected) == 0


def test_sixteen_bit_colour_png() -> None:
    """Pillow cannot write one, so this is made by hand."""
    values = (photo(8, 6).astype(np.uint16) * 257).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in values)
    data = png_header(8, 6, depth=16) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    assert difference(open_image(data), photo(8, 6)) <= 1


def test_integers_and_floats_of_32_bits() -> None:
    ramp = np.linspace(0, 65535, 100).astype(np.int32).reshape(10, 10)
    expected = np.repeat(np.rint(ramp / 257)[..., None], 3, axis=2)
    assert difference(open_image(Image.fromarray(ramp)), expected) == 0
    with pytest.raises(InputError, match="32-bit integers"):
        open_image(Image.fromarray(ramp * 2))
    floats = (ramp / 65535).astype(np.float32)
    assert difference(open_image(encoded(Image.fromarray(floats), "TIFF")), expected) <= 1
    with pytest.raises(InputError, match="floats must lie in 0 to 1"):
        open_image(Image.fromarray(floats * 255))


def test_palette() -> None:
    image = Image.fromarray(photo()).quantize(64)
    assert difference(open_image(encoded(image, "PNG")), np.asarray(image.convert("RGB"))) == 0


def test_transparency_is_laid_on_white() -> None:
    pixels = photo()
    alpha = np.linspace(0, 255, pixels.shape[1]).astype(np.uint8)[None].repeat(pixels.shape[0], 0)
    share = alpha[..., None] / 255
    expected = pixels * share + 255 * (1 - share)
    rgba = np.dstack([pixels, alpha])
    for source in (encoded(Image.fromarray(rgba), "PNG"), encoded(Image.fromarray(rgba), "TIFF"), rgba):
        assert difference(open_image(source), expected) <= 1
    la = np.dstack([pixels[..., 0], alpha])
    expected = np.repeat((pixels[..., :1] * share + 255 * (1 - share)), 3, axis=2)
    assert difference(open_image(encoded(Image.fromarray(la, "LA"), "PNG")), expected) <= 1


def test_a_transparent_palette_colour_and_a_transparent_key_become_white() -> None:
    index = np.zeros((8, 8), np.uint8)
    index[:, 4:] = 1
    image = Image.fromarray(index, "P")
    image.putpalette([200, 30, 10, 0, 0, 255])
    expected = np.full((8, 8, 3), 255)
    expected[:, :4] = [200, 30, 10]
    assert difference(open_image(encoded(image, "PNG", transparency=1)), expected) == 0
    assert difference(open_image(encoded(image, "GIF", transparency=1)), expected) == 0
    assert difference(open_image(encoded(image.convert("RGB"), "PNG", transparency=(0, 0, 255))), expected) == 0


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_cmyk(kind: str) -> None:
    pixels = photo(64, 48)
    ink = np.dstack([255 - pixels, np.zeros_like(pixels[..., 0])])
    options = {"quality": 95} if kind == "JPEG" else {}
    data = encoded(Image.fromarray(ink, "CMYK"), kind, **options)
    assert difference(open_image(data), pixels) <= (10 if options else 1)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_the_first_frame_of_many_is_taken(kind: str) -> None:
    frames = [Image.new("RGB", (20, 10), colour) for colour in ("red", "lime", "blue")]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert getattr(Image.open(io.BytesIO(data)), "n_frames", 1) == 3
    assert difference(open_image(data), np.full((10, 20, 3), [255, 0, 0])) == 0


def test_arrays() -> None:
    pixels = photo()
    assert difference(open_image(pixels[..., :1]), np.repeat(pixels[..., :1], 3, axis=2)) == 0
    assert difference(open_image(pixels[::2, ::-1]), pixels[::2, ::-1]) == 0  # not contiguous
    for dtype in (np.float16, np.float32, np.float64):
        assert difference(open_image((pixels / 255).astype(dtype)), pixels) <= (1 if dtype == np.float16 else 0)
    assert difference(open_image(pixels.astype(np.uint16) * 257), pixels) == 0


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((4, 4, 2), np.uint8), "H×W, H×W×3 or H×W×4, not 4×4×2"),
        (np.zeros((3, 4, 4, 3), np.uint8), "not 3×4×4×3"),
        (np.zeros((0, 4, 3), np.uint8), "not 0×4×3"),
        (np.zeros((4, 4, 3), np.int64), "not int64"),
        (np.full((4, 4), 1.5), "from 1.5 to 1.5"),
        (np.full((4, 4), np.nan), "nan"),
        (np.full((4, 4), -0.1), "floats must lie in 0 to 1"),
    ],
)
def test_arrays_that_are_no_image(array: Array, message: str) -> None:
    with pytest.raises(InputError, match=message):
        open_image(array)


# --- limits and damage


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_header(width: int, height: int, depth: int = 8) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0))


def test_a_bomb_is_refused_from_its_header(tmp_path: Path) -> None:
    """The file holds no pixels at all, so being told of its size shows that nothing was decoded."""
    data = png_header(60000, 50000) + chunk(b"IDAT", b"")
    path = tmp_path / "bomb.png"
    path.write_bytes(data)
    for source, name in ((path, "bomb.png"), (data, "image bytes")):
        with pytest.raises(InputError, match=rf"{name}: 60000×50000 is over the limit of {MAX_PIXELS} pixels"):
            preprocess(source, patch_size=16)
    assert image_size(path) == (60000, 50000)
    with pytest.raises(InputError, match="truncated"):  # below the limit the same file is merely broken
        preprocess(png_header(600, 500) + chunk(b"IDAT", b""), patch_size=16)


def test_the_limit_can_be_moved_and_pillows_own_does_not_interfere(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(Image.fromarray(photo(60, 40)), "PNG")
    with pytest.raises(InputError, match="60×40 is over the limit of 2399 pixels"):
        open_image(data, max_pixels=2399)
    with pytest.raises(InputError, match="over the limit"):
        open_image(Image.open(io.BytesIO(data)), max_pixels=2399)
    assert open_image(data, max_pixels=2400).size == (60, 40)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # Pillow alone would refuse this image
    assert open_image(data).size == (60, 40)
    assert open_image(data, max_pixels=None).size == (60, 40)
    assert Image.MAX_IMAGE_PIXELS == 100


def test_a_strip_is_not_blown_up_beyond_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "strip.png"
    Image.new("RGB", (40, 1)).save(path)
    with pytest.raises(InputError, match=r"strip\.png: 40×1 resized to 17920×448 is over the limit of 1000000 pixels"):
        preprocess(path, patch_size=16, max_pixels=10**6)


def one_line_about(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        preprocess(path, patch_size=16)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message


def test_files_that_are_no_image(tmp_path: Path) -> None:
    for name, content in (
        ("empty.jpg", b""),
        ("text.png", b"hello\n" * 100),
        ("eps.jpg", b"%!PS-Adobe-3.0 EPSF-3.0\n"),
    ):
        (tmp_path / name).write_bytes(content)
        assert "not an image" in one_line_about(tmp_path / name)
    assert "no such file" in one_line_about(tmp_path / "absent.png")
    with pytest.raises(InputError, match=r"absent\.png: No such file"):
        image_size(tmp_path / "absent.png")
    assert "is a folder" in one_line_about(tmp_path)
    with pytest.raises(InputError, match="image bytes: not an image"):
        preprocess(b"\0" * 50, patch_size=16)
    with pytest.raises(InputError, match="must be a path, bytes, PIL image or numpy array, not int"):
        preprocess(7, patch_size=16)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP"])
def test_truncated_files(kind: str, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(noise), kind)
    for share in (0.02, 0.3, 0.6):
        path = tmp_path / f"cut{share}.img"
        path.write_bytes(data[: int(len(data) * share)])
        one_line_about(path)


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # Pillow's comments on damaged TIFF tags
@pytest.mark.parametrize("kind", ["AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP"])
def test_flipped_bits_give_a_picture_or_one_line(kind: str) -> None:
    data = encoded(Image.fromarray(photo(32, 24)), kind)
    rng = random.Random(0)
    for _ in range(60):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 6)):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        message = "image bytes: "
        try:
            assert open_image(damaged, max_pixels=10**6).mode == "RGB"
        except InputError as error:
            message = str(error)
        assert re.fullmatch("image bytes: .*", message)  # one line


# --- size and values


@given(
    width=st.integers(1, 3000), height=st.integers(1, 3000), size=st.integers(1, 2048), patch=st.sampled_from([14, 16])
)
def test_the_grid_keeps_the_aspect_ratio(width: int, height: int, size: int, patch: int) -> None:
    grid = grid_size(width, height, size, patch)
    for patches, side in zip(grid, (height, width), strict=True):
        exact = side * size / min(width, height) / patch
        assert abs(patches - exact) <= 0.5 + 1e-9 or (patches == 1 and exact < 1)
    assert min(grid) >= 1
    assert grid_size(height, width, size, patch) == grid[::-1]


@settings(max_examples=30, deadline=None)
@given(
    width=st.integers(1, 90), height=st.integers(1, 90), size=st.integers(1, 100), patch=st.sampled_from([1, 14, 16])
)
def test_preprocess_has_the_grid_promised(width: int, height: int, size: int, patch: int) -> None:
    h, w = grid_size(width, height, size, patch)
    x = preprocess(photo(width, height), size, patch)
    assert x.shape == (1, 3, h * patch, w * patch)
    assert x.dtype == torch.float32


def test_a_size_of_nothing_is_refused() -> None:
    for size, patch in ((0, 16), (-5, 16), (64, 0)):
        with pytest.raises(InputError, match="at least 1"):
            preprocess(photo(), size, patch)


@pytest.mark.parametrize(("width", "height"), [(300, 200), (90, 64), (41, 173)])  # down, near, up
def test_values_are_bicubic_antialiased_and_normalised(width: int, height: int) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (height, width, 3), dtype=np.uint8)
    pixels = noise // 3 + photo(width, height) // 3 + 40  # no overshoot, which Pillow would clip after the first axis
    x = preprocess(pixels, 64, 16)
    planes = torch.from_numpy(pixels).permute(2, 0, 1)[None].float()
    resized = torch.nn.functional.interpolate(planes, x.shape[-2:], mode="bicubic", antialias=True, align_corners=False)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
    restored = (x * std + mean) * 255
    assert (restored - resized.clamp(0, 255)).abs().max() <= 1.2  # Pillow rounds to whole values after each axis


def test_preprocess_does_not_guess_the_model() -> None:
    """It took patches of 16 unless told otherwise, and the only trained model has 14."""
    with pytest.raises(InputError, match=r"model\.preprocess\(photo\) knows, or name patch_size=model\.patch_size"):
        preprocess(photo())
    model = veca.load("veca-s14")
    own = model.preprocess(photo(90, 60), 56)
    assert torch.equal(own, preprocess(photo(90, 60), 56, model.patch_size))
    assert model(own).grid == (4, 6)


def test_one_default_size() -> None:
    """What every way to a feature takes where nobody names a size; probes and training follow the paper's."""
    from veca.analysis import core_figures, figures
    from veca.demo import Demo
    from veca.extract.command import FeaturesSettings
    from veca.integrations.transformers.configuration import VecaConfig
    from veca.integrations.transformers.processing import VecaImageProcessor
    from veca.serve.settings import ServeSettings

    assert SIZE == 448
    for kind in (FeaturesSettings, ServeSettings, Demo):
        assert {field.name: field.default for field in fields(kind)}["size"] == SIZE
    functions = (preprocess, veca.Veca.preprocess, veca.Extractor, figures.similarity_figure, figures.cores_figure)
    functions += (core_figures.positions_figure, core_figures.budgets_figure, core_figures.layers_figure)
    assert {inspect.signature(function).parameters["size"].default for function in functions} == {SIZE}
    assert VecaConfig().image_size == SIZE
    assert VecaImageProcessor().size == {"shortest_edge": SIZE}


def test_to_tensor_is_imagenets_normalisation() -> None:
    pixels = photo()
    expected = (pixels / 255 - np.array([0.485, 0.456, 0.406])) / np.array([0.229, 0.224, 0.225])
    x = to_tensor(Image.fromarray(pixels))
    assert np.allclose(x.permute(1, 2, 0).numpy(), expected, atol=1e-6)
    assert torch.equal(to_tensor(Image.fromarray(pixels[..., 0])), to_tensor(open_image(pixels[..., 0])))


def test_resize_short_side() -> None:
    for size, expected in (((300, 200), (96, 64)), ((200, 301), (64, 96)), ((64, 64), (64, 64)), ((1, 3), (64, 192))):
        assert resize_short_side(Image.new("RGB", size), 64).size == expected
    with pytest.raises(InputError, match="1×20000 resized to 504×10080000 is over the limit"):
        resize_short_side(Image.new("RGB", (1, 20_000)), 504)


def test_real_photographs(shared: Path) -> None:
    for path in sorted((shared / "data/voc-seg/val/images").iterdir())[:3]:
        width, height = image_size(path)
        h, w = grid_size(width, height, 224, 14)
        x = preprocess(path, size=224, patch_size=14)
        assert x.shape == (1, 3, h * 14, w * 14)
        assert x.abs().max() < 3
        assert x.std() > 0.3
