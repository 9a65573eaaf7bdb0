"""Reading in parts, and looking along a scan, against the plain forward pass and independent computations."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from hypothesis import given
from hypothesis import strategies as st
from large.files import aperio, cog, ome_tiff, ome_zarr
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_model import expected_forward
from test_streaming import SLOW, VARIANTS, photo, plain, small
from torch import Tensor

import veca
from veca import table
from veca.backbones import Backbone
from veca.block import Read, attend, read
from veca.cli import main as run_command
from veca.errors import InputError
from veca.extract.extractor import Extractor
from veca.images import open_image, to_tensor
from veca.large.picture import open_strips
from veca.large.where import mask_of
from veca.model import Veca
from veca.scan import choose, scanned
from veca.scan_file import ALIKE, sample_colours

pytestmark = pytest.mark.usefixtures("one_thread")


# Reading


@SLOW
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), order=st.randoms(), scale=st.floats(0.1, 60))
def test_reads_merge_in_any_order_and_any_split(sizes: list[int], order: object, scale: float) -> None:
    count = sum(sizes)
    q, k, v = torch.randn(2, 3, 5, 8) * scale, torch.randn(2, 3, count, 8), torch.randn(2, 3, count, 8)
    parts = list(zip(k.split(sizes, dim=2), v.split(sizes, dim=2), strict=True))
    order.shuffle(parts)  # type: ignore[attr-defined]
    whole: Read | None = None
    for key, value in parts:
        new = read(q, key, value)
        whole = new if whole is None else new.merge(whole)
    assert whole is not None
    nothing = Read.of_nothing(q)
    whole = nothing.merge(nothing).merge(whole).merge(nothing)
    logits = torch.einsum("bhcd,bhtd->bhct", q.double(), k.double()) / math.sqrt(8)
    expected = torch.softmax(logits, -1) @ v.double()
    torch.testing.assert_close(whole.result().double(), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(attend(q, k, v).double(), expected, atol=1e-5, rtol=1e-4)


def test_gradients_pass_a_merged_read() -> None:
    q, k, v = (torch.randn(1, 2, 6, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    whole = torch.softmax(q @ k.transpose(2, 3) / 2, -1) @ v
    expected = torch.autograd.grad(whole.square().sum(), (q, k, v))
    parts = [read(q, k[:, :, part], v[:, :, part]) for part in (slice(0, 1), slice(1, 6))]
    found = torch.autograd.grad(parts[0].merge(parts[1]).result().square().sum(), (q, k, v))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


# Looking


@SLOW
@given(
    variant=st.sampled_from(sorted(VARIANTS)),
    grid=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    cores=st.integers(1, 16),
    tile=st.integers(1, 50),
    tokens=st.sampled_from(["float32", "float16"]),
    data=st.data(),
)
def test_looking_equals_the_forward_pass(
    variant: str, grid: tuple[int, int], cores: int, tile: int, tokens: str, data: st.DataObject
) -> None:
    model = small(**VARIANTS[variant])
    p = model.patch_size
    h, w = grid
    images = torch.randn(1, 3, h * p, w * p)
    expected = plain(model, images, cores)
    dense, atol = expected.patches[0].view(h, w, -1), 1e-4 if tokens == "float32" else 3e-2
    scan = model.scan(images, cores=cores, tile=tile, tokens=tokens)  # type: ignore[arg-type]
    torch.testing.assert_close(scan.cls, expected.cls[0], atol=atol, rtol=0)
    torch.testing.assert_close(scan.cores, expected.cores[0], atol=atol, rtol=0)
    torch.testing.assert_close(scan.coords, expected.coords[0], atol=atol, rtol=0)
    torch.testing.assert_close(scan.look().features, dense, atol=atol, rtol=0)
    x = data.draw(st.integers(0, w * p - 1))
    y = data.draw(st.integers(0, h * p - 1))
    box = (x, y, data.draw(st.integers(1, w * p - x)), data.draw(st.integers(1, h * p - y)))
    rows = slice(y // p, (y + box[3] - 1) // p + 1)
    columns = slice(x // p, (x + box[2] - 1) // p + 1)
    found = scan.look(box=box)
    torch.testing.assert_close(found.features, dense[rows, columns], atol=atol, rtol=0)
    assert found.box == (
        columns.start * p,
        rows.start * p,
        (columns.stop - columns.start) * p,
        (rows.stop - rows.start) * p,
    )
    assert found.centres[0, 0].tolist() == [columns.start * p + p / 2, rows.start * p + p / 2]
    centres = [((column + 0.5) * p, (row + 0.5) * p) for row in range(h) for column in range(w)]
    torch.testing.assert_close(scan.look(points=centres).features.view_as(dense), dense, atol=atol, rtol=0)


@pytest.mark.parametrize("source", ["tiles", "strips", "plain", "npy", "png", "array", "pil", "tensor"])
def test_every_source_gives_the_same_looks(source: str, tmp_path: Path) -> None:
    model, values = small(), photo(75, 115)
    normalised = to_tensor(open_image(values[:64, :112]))[None]
    expected = plain(model, normalised, 9).patches[0].view(4, 7, -1)
    path = tmp_path / "photo"
    if source in ("tiles", "strips", "plain"):
        options = {"tiles": {"tile": (32, 48), "compression": "deflate"}, "strips": {"rowsperstrip": 23}, "plain": {}}
        tifffile.imwrite(path.with_suffix(".tif"), values, photometric="rgb", **options[source])  # type: ignore[arg-type]
        given_source: object = path.with_suffix(".tif")
    elif source == "npy":
        np.save(path, values)
        given_source = path.with_suffix(".npy")
    elif source == "png":
        open_image(values).save(path.with_suffix(".png"))
        given_source = path.with_suffix(".png")
    else:
        given_source = {"array": values, "pil": open_image(values), "tensor": normalised}[source]
    scan = model.scan(given_source, cores=9)  # type: ignore[arg-type]
    assert scan.size == ((112, 64) if source == "tensor" else (115, 75))
    for box, part in (
        ((0, 0, 112, 64), expected),
        ((40, 20, 30, 10), expected[1:2, 2:5]),
        ((111, 63, 1, 1), expected[3:, 6:]),
    ):
        torch.testing.assert_close(scan.look(box=box).features, part, atol=1e-4, rtol=0)


SOURCES = {
    "slide": lambda path, values: aperio(path / "slide.svs", values),
    "OME-TIFF": lambda path, values: ome_tiff(path / "slide.ome.tif", values),
    "Zarr 2": lambda path, values: ome_zarr(path / "slide.zarr", values, 2),
    "Zarr 3": lambda path, values: ome_zarr(path / "slide.zarr", values, 3),
    "COG": lambda path, values: cog(path / "scene.tif", values, nodata=None, photometric="RGB"),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("level", [0, 1])
def test_looks_at_large_sources_equal_the_forward_pass_of_their_pixels(source: str, level: int, tmp_path: Path) -> None:
    model, values = small(), photo(300, 420)
    with veca.open_source(SOURCES[source](tmp_path, values), level=level if source != "COG" else 0) as picture:
        width, height = (side // 16 * 16 for side in picture.size)
        pixels = picture.rgb(0, 0, width, height)
        if picture.size == (420, 300):
            assert np.array_equal(pixels, values[:height, :width])
        scan = model.scan(picture, cores=9)
        expected = plain(model, to_tensor(open_image(pixels))[None], 9).patches[0].view(height // 16, width // 16, -1)
        for x, y, wide, high in ((0, 0, width, height), (35, 50, 60, 33), (width - 1, height - 1, 1, 1)):
            found = scan.look(box=(x, y, wide, high)).features
            part = expected[y // 16 : -(-(y + high) // 16), x // 16 : -(-(x + wide) // 16)]
            torch.testing.assert_close(found, part, atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("fast", [False, True])
def test_looking_in_bfloat16_is_as_near_as_the_forward_pass(
    variant: str, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of three digits, rounded in another order: no two ways agree, but none is worse than the other."""
    model, images = small(**VARIANTS[variant]), torch.randn(1, 3, 112, 112)
    exact = plain(model, images, 16).patches[0]
    model.bfloat16()
    forward = plain(model, images.bfloat16(), 16).patches[0].float()
    monkeypatch.setattr("veca.fused.fast_bfloat16", lambda device: fast)
    found = model.scan(images, cores=16).look().features.flatten(0, 1)
    assert torch.cosine_similarity(found, forward, dim=-1).min() > 0.999
    ours, theirs = ((each - exact).square().mean().sqrt() for each in (found, forward))
    assert ours < 1.5 * theirs


def test_looking_through_adapters_and_on_plain_verbs() -> None:
    model, images = small(), torch.randn(1, 3, 48, 64)
    model.blocks[1].fc2.register_forward_hook(lambda module, args, out: out * 1.1)
    expected = plain(model, images, 16)
    torch.testing.assert_close(model.scan(images).look().features.flatten(0, 1), expected.patches[0], atol=1e-4, rtol=0)


def _trained(model: Veca) -> None:
    with torch.no_grad():
        model.blocks[1].fc2.weight[2, 3] += 1  # type: ignore[union-attr, operator, index]


def _loaded(model: Veca) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


def _averaged(model: Veca) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


@pytest.mark.parametrize("change", [_trained, _loaded, _averaged, Veca.bfloat16, Veca.half, lambda m: m.to("meta")])
def test_a_model_that_changed_cannot_look_along_its_scan(change: Callable[[Veca], object], tmp_path: Path) -> None:
    model = small()
    scan = model.scan(photo(75, 115), cores=9)
    scan.look(points=[(20, 20)])
    model.train().eval().requires_grad_(False)  # nothing that matters
    scan.look(points=[(20, 20)])
    change(model)
    for verb in (scan.look, lambda: scan.look(points=[(20, 20)]), lambda: scan.save(tmp_path / "photo.scan")):
        with pytest.raises(InputError, match=r"^the model's weights, precision or device changed after [^\n]*$"):
            verb()


# Between the patches of the grid


def independent_look(model: Veca, images: Tensor, cores: int, lefts: list[int], tops: list[int]) -> Tensor:
    """Features of patches at any edges: the grid's patches and these in one set, every formula written out, float64."""
    tokens, _ = expected_forward(model, images, cores, extra=(lefts, tops))
    return tokens[0, -len(lefts) :].float()


@SLOW
@given(variant=st.sampled_from(sorted(VARIANTS)), cores=st.integers(1, 16), data=st.data())
def test_points_off_the_grid(variant: str, cores: int, data: st.DataObject) -> None:
    model = small(**VARIANTS[variant])
    p = model.patch_size
    images = torch.randn(1, 3, 3 * p, 5 * p)
    centre = st.tuples(st.floats(0, 5 * p), st.floats(0, 3 * p))
    points = data.draw(st.lists(centre, min_size=1, max_size=6))
    found = model.scan(images, cores=cores).look(points=points)
    lefts, tops = ([int(value - p / 2) for value in axis] for axis in found.centres.T.tolist())
    for (x, y), left, top in zip(points, lefts, tops, strict=True):  # the nearest whole pixel inside the image
        for given_at, edge, length in ((x, left, 5 * p), (y, top, 3 * p)):
            assert 0 <= edge <= length - p
            assert abs(edge - min(max(given_at - p / 2, 0), length - p)) <= 0.5
    expected = independent_look(model, images, cores, lefts, tops)
    torch.testing.assert_close(found.features, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("stride", [3.5, 4, 14 / 3, 7, 8])
def test_a_finer_map_covers_the_image_and_aligns_with_it(variant: str, stride: float) -> None:
    model = small(**VARIANTS[variant])
    p = model.patch_size
    images = torch.randn(1, 3, 3 * p, 4 * p)
    found = model.scan(images, cores=6).look(stride=stride)
    h, w = (math.ceil(count * p / stride - 1e-9) for count in (3, 4))
    assert found.features.shape[:2] == (h, w)
    assert found.box == (0, 0, 4 * p, 3 * p)
    x, y = found.centres[0, :, 0], found.centres[:, 0, 1]
    for axis, count, length in ((x, w, 4 * p), (y, h, 3 * p)):
        cell = (torch.arange(count) + 0.5) * stride
        inner = (cell >= p / 2) & (cell <= length - p / 2)
        assert ((axis - cell)[inner].abs() <= 0.5).all()  # whole pixels
        assert axis.min() >= p / 2  # patches at the border are moved inside
        assert axis.max() <= length - p / 2
    lefts = [int(value - p / 2) for _ in range(h) for value in x.tolist()]
    tops = [int(value - p / 2) for value in y.tolist() for _ in range(w)]
    expected = independent_look(model, images, 6, lefts, tops)
    torch.testing.assert_close(found.features.flatten(0, 1), expected, atol=1e-4, rtol=0)


@given(size=st.integers(2, 9), count=st.integers(1, 12))
@SLOW
def test_the_table_at_points_is_the_resized_table_on_the_grid(size: int, count: int) -> None:
    entries = torch.randn(size, size, 6)
    axis = (torch.arange(count) + 0.5) / count * 2 - 1
    expected = table.resized(entries, (count, count))
    torch.testing.assert_close(table.on_lattice(entries, axis, axis), expected, atol=1e-5, rtol=0)
    coords = torch.stack((axis.repeat(count), axis.repeat_interleave(count)), dim=-1)
    torch.testing.assert_close(table.at_points(entries, coords), expected, atol=1e-5, rtol=0)


# Shares and masks


@SLOW
@given(
    variant=st.sampled_from(sorted(VARIANTS)),
    share=st.sampled_from([1.0, 0.6, 0.25, 0.01]),
    masked=st.booleans(),
    tile=st.integers(1, 50),
    seed=st.integers(0, 99),
)
def test_shares_and_masks_are_an_explicit_subset(
    variant: str, share: float, masked: bool, tile: int, seed: int
) -> None:
    model = small(**VARIANTS[variant])
    p = model.patch_size
    images = torch.randn(1, 3, 6 * p, 8 * p)
    mask = np.random.default_rng(seed).random((12, 16)) < 0.6  # two cells along each side of a patch
    inside = torch.from_numpy(mask.reshape(6, 2, 8, 2).mean((1, 3)) >= 0.5) if masked else torch.ones(6, 8).bool()
    chosen = torch.as_tensor(choose((6, 8), share, inside if masked else None))
    assert len(chosen) == max(1, round(share * int(inside.sum())))
    assert inside.flatten()[chosen].all()
    scan = model.scan(images, cores=6, share=share, where=mask if masked else None, tile=tile)
    tokens, _ = expected_forward(model, images, 6, chosen=chosen)
    torch.testing.assert_close(scan.cores, tokens[0, :6].float(), atol=1e-4, rtol=0)
    found = scan.look()
    assert torch.equal(found.inside, inside)
    assert not found.features[~inside].any()
    torch.testing.assert_close(found.features.flatten(0, 1)[chosen], tokens[0, 6:].float(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("share", [0.5, 0.25, 0.125])
def test_a_share_is_spread_evenly(share: float) -> None:
    chosen = choose((64, 64), share, None)
    taken = torch.zeros(64 * 64)
    taken[chosen] = 1
    blocks = taken.view(8, 8, 8, 8).mean((1, 3))  # of 8×8 patches
    assert (blocks - share).abs().max() < 0.05


def test_masks_of_any_resolution() -> None:
    fine = np.zeros((600, 800), np.uint8)
    fine[300:, :] = 255
    for mask in (fine, fine[::100, ::100], torch.from_numpy(fine), np.stack([fine] * 3, axis=-1)):
        assert torch.equal(mask_of(mask, (6, 8)), torch.arange(6)[:, None].expand(6, 8) >= 3)
    with pytest.raises(InputError, match="leaves no patch to read"):
        small().scan(torch.zeros(3, 32, 32), where=np.zeros((4, 4)))


# Files


def saved(tmp_path: Path, **options: object) -> tuple[Veca, np.ndarray, Path]:
    model, values = small(), photo(75, 115)
    model.scan(values, cores=9, **options).save(tmp_path / "photo.scan")  # type: ignore[arg-type]
    return model, values, tmp_path / "photo.scan"


def test_a_scan_is_saved_and_opened(tmp_path: Path) -> None:
    mask = np.ones((3, 3))
    mask[0, 0] = 0
    model, values, file = saved(tmp_path, where=mask, share=0.5)
    before, after = model.scan(values, cores=9, where=mask, share=0.5), veca.open_scan(file, values, model)
    assert (after.size, after.grid, after.share) == ((115, 75), (4, 7), 0.5)
    torch.testing.assert_close(after.cores, before.cores)
    torch.testing.assert_close(after.coords, before.coords)
    torch.testing.assert_close(after.look().features, before.look().features, atol=5e-3, rtol=0)  # float16
    assert torch.equal(after.look().inside, before.look().inside)


def test_a_scan_of_the_small_model_is_at_most_1_3_megabytes(tmp_path: Path) -> None:
    model = veca.create_model("veca_small").eval()
    model.scan(np.zeros((320, 480, 3), np.uint8), share=0.1).save(tmp_path / "photo.scan")
    assert (tmp_path / "photo.scan").stat().st_size <= 1_300_000


def test_another_model_or_image_is_refused(tmp_path: Path) -> None:
    model, values, file = saved(tmp_path)
    other = small()
    with torch.no_grad():
        other.blocks[0].fc2.bias[3] += 1e-2
    with pytest.raises(InputError, match="made with other weights"):
        veca.open_scan(file, values, other)
    with pytest.raises(InputError, match="made with a model of another shape"):
        veca.open_scan(file, values, small(depth=2))
    with pytest.raises(InputError, match="made of an image of 115×75 pixels; the image has 115×74"):
        veca.open_scan(file, values[:-1], model)
    turned = np.ascontiguousarray(values[::-1])
    with pytest.raises(InputError, match="made of another image than the image: their colours differ"):
        veca.open_scan(file, turned, model)
    veca.open_scan(file, np.clip(values.astype(int) + 1, 0, 255).astype(np.uint8), model)  # another decoder's rounding


def test_an_image_of_which_little_is_left_is_refused(tmp_path: Path) -> None:
    """The first format knew an image by 256 patches, and saw nothing of what lay between them."""
    model, values, file = small(), photo(800, 800), tmp_path / "photo.scan"
    model.scan(values, cores=2, share=0.01).save(file)
    seen = np.zeros((50, 50), bool)
    kept = np.linspace(0, 49, 16).round().astype(int)
    seen[np.ix_(kept, kept)] = True
    blackened = np.where(seen.repeat(16, 0).repeat(16, 1)[..., None], values, 0).astype(np.uint8)
    with pytest.raises(InputError, match="their colours differ"):
        veca.open_scan(file, blackened, model)
    old = sample_colours(open_strips(values, 16), 16, form=1)
    _rewrite(file, {"format": 1}, colours=old)
    veca.open_scan(file, blackened, model)  # what such a file can tell
    with pytest.raises(InputError, match="their colours differ"):
        veca.open_scan(file, values[::-1], model)


@SLOW
@given(left=st.integers(0, 3999), top=st.integers(0, 2399))
def test_any_change_of_a_32nd_of_a_side_is_seen(left: int, top: int) -> None:
    values = np.full((2400, 4000, 3), 128, np.uint8)
    before = sample_colours(open_strips(values, 16), 16)
    assert before.shape == (32 * 32, 3)
    changed = values.copy()
    x, y = min(left, 4000 - 125), min(top, 2400 - 75)
    changed[y : y + 75, x : x + 125] = 0
    assert ((sample_colours(open_strips(changed, 16), 16).float() - before.float()).abs() > ALIKE).any()


def test_a_scan_serves_its_model_in_either_precision(tmp_path: Path) -> None:
    """What a machine with bfloat16 scanned is looked at on one without it."""
    model, values, file = saved(tmp_path)
    expected = model.scan(values, cores=9).look().features
    half = small().bfloat16()
    torch.testing.assert_close(veca.open_scan(file, values, half).look().features, expected, atol=0.1, rtol=0)
    half.scan(values, cores=9).save(file)
    torch.testing.assert_close(veca.open_scan(file, values, model).look().features, expected, atol=0.1, rtol=0)


def _rewrite(file: Path, header: dict[str, object] | None = None, **tensors: Tensor) -> None:
    with safe_open(file, "pt") as opened:
        about = json.loads(opened.metadata()["scan"]) | (header or {})
    save_file(load_file(file) | tensors, file, {"scan": json.dumps(about)})


DAMAGES = {
    "not a file": (lambda file: file.unlink(), "no such file"),
    "cut short": (lambda file: file.write_bytes(file.read_bytes()[:900]), "not a scan that veca wrote, or damaged"),
    "other bytes": (lambda file: file.write_bytes(b"\0" * 4096), "not a scan that veca wrote, or damaged"),
    "no header": (lambda file: save_file(load_file(file), file), "not a scan that veca wrote, or damaged"),
    "a newer format": (lambda file: _rewrite(file, {"format": 9}), "has format 9"),
    "a wrong share": (lambda file: _rewrite(file, {"share": "all"}), "not a scan that veca wrote, or damaged"),
    "nested brackets": (
        lambda file: save_file(load_file(file), file, {"scan": "[" * 100_000}),
        "not a scan that veca wrote, or damaged",
    ),
    "not finite": (lambda file: _rewrite(file, keys=load_file(file)["keys"] * math.nan), "not finite"),
    "no keys": (
        lambda file: _rewrite(file, keys=torch.zeros(3, 2, 1, 24, dtype=torch.float16)),
        "model of another shape",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_scan_is_one_line(damage: str, tmp_path: Path) -> None:
    model, values, file = saved(tmp_path)
    change, message = DAMAGES[damage]
    change(file)
    with pytest.raises(InputError, match=message) as error:
        veca.open_scan(file, values, model)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"box": (0, 0, 0, 5)}, "is not inside the image of 115×75"),
        ({"box": (100, 0, 40, 5)}, "is not inside the image of 115×75"),
        ({"box": (113, 70, 2, 2)}, "beyond the last whole patch"),
        ({"box": (0.5, 0, 10, 10)}, "whole pixels"),
        ({"box": (math.nan, 0, 10, 10)}, "whole pixels"),
        ({"box": ("left", 0, 10, 10)}, "whole pixels"),
        ({"box": (0, 0, 10, 10), "points": [(1, 1)]}, "a box or at points, not both"),
        ({"points": [(1, 2, 3)]}, "pairs"),
        ({"points": [(1, 2), (3,)]}, "pairs"),
        ({"points": [(1, 200)]}, r"the point \(1, 200\) is outside"),
        ({"stride": 17}, "from 1 to the patch size 16, not 17"),
        ({"stride": 0.5}, "a number of pixels from 1 to"),
    ],
)
def test_wrong_looks_are_one_line(options: dict[str, object], message: str) -> None:
    scan = small().scan(photo(75, 115), cores=2)
    with pytest.raises(InputError, match=message) as error:
        scan.look(**options)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("share", [0, 1.5, -1, math.nan, True])
def test_wrong_shares_are_one_line(share: float) -> None:
    with pytest.raises(InputError, match="share must lie above 0"):
        small().scan(torch.zeros(3, 32, 32), share=share)


# The commands


def test_scan_and_look_as_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, values = small(), photo(75, 115)
    model.save(tmp_path / "model")
    tifffile.imwrite(tmp_path / "big.tif", values, tile=(32, 32), photometric="rgb")
    (tmp_path / "broken.tif").write_text("no picture")
    scan = ["scan", str(tmp_path / "big.tif"), "--out", str(tmp_path / "scans"), "--model", str(tmp_path / "model")]
    scan += ["--dtype", "float32"]
    assert run_command([*scan, "--cores", "9"]) == 0
    assert "115×75 pixels, 4×7 patches" in capsys.readouterr().out
    assert (
        run_command([*scan[:2], str(tmp_path / "broken.tif"), *scan[2:], "--cores", "9"]) == 1
    )  # the others are done all the same
    said = capsys.readouterr()
    assert "0 images scanned, 1 were there before, 1 could not be read" in said.out
    assert "broken.tif" in said.err
    assert run_command([*scan, "--cores", "9", "--dtype", "bfloat16"]) == 0
    assert "1 images scanned" in capsys.readouterr().out
    assert run_command([*scan, "--cores", "8"]) == 0  # other settings: scanned again
    assert "1 images scanned" in capsys.readouterr().out

    file, out = str(tmp_path / "scans/big.tif.scan"), tmp_path / "part.npy"
    look = ["look", file, "--dtype", "float32"]
    assert run_command([*look, "--box", "16,16,48,32", "--out", str(out)]) == 0
    expected = plain(model, to_tensor(open_image(values[:64, :112]))[None], 8).patches[0].view(4, 7, -1)
    np.testing.assert_allclose(np.load(out), expected[1:3, 1:4].numpy(), atol=5e-3)
    assert json.loads(out.with_suffix(".json").read_text())["box"] == [16, 16, 48, 32]
    (tmp_path / "places.csv").write_text("8,8\n24,40\n")
    assert run_command([*look, "--points", str(tmp_path / "places.csv"), "--out", str(out)]) == 0
    np.testing.assert_allclose(np.load(out), expected[[0, 2], [0, 1]].numpy(), atol=5e-3)
    assert run_command([*look, "--stride", "8", "--out", str(out)]) == 0
    assert np.load(out).shape == (8, 14, 48)
    assert run_command([*look, "--stride", "3.5", "--box", "7,0,14,14", "--out", str(out)]) == 0
    assert np.load(out).shape == (4, 4, 48)
    assert json.loads(out.with_suffix(".json").read_text())["box"] == [7, 0, 14, 14]
    capsys.readouterr()
    for wrong, message in (
        (["--box", "1,2,3"], "--box takes 4 numbers"),
        (["--box", "1,2,3,4", "--points", "1,2"], "give --box or --points"),
        (["--points", "1;2"], "--points takes 2 numbers"),
        (["--image", str(tmp_path / "none.tif")], "no such file"),
        (["--model", "veca-s14"], "another shape"),
    ):
        assert run_command([*look, *wrong, "--out", str(out)]) == 2
        assert message in capsys.readouterr().err
    assert run_command(["look", str(tmp_path / "big.tif"), "--out", str(out)]) == 2
    (tmp_path / "empty").mkdir()
    assert run_command(["scan", str(tmp_path / "empty"), "--out", str(tmp_path / "scans")]) == 2
    capsys.readouterr()
    (tmp_path / "mask.png").write_text("no picture")
    for wrong, message in (
        (["--share", "2"], "share must lie above 0"),
        (["--where", str(tmp_path / "mask.png")], "mask.png"),
    ):
        assert run_command([*scan, "--cores", "8", *wrong]) == 2  # of all images, so before the first
        assert message in capsys.readouterr().err


def test_a_look_is_told_in_the_pixels_and_with_the_mask_that_were_given(tmp_path: Path) -> None:
    small().save(tmp_path / "model")
    Image.fromarray(photo(256, 256)).save(tmp_path / "photo.png")
    mask = np.zeros((2, 2), np.uint8)
    mask[:, 1] = 255
    Image.fromarray(mask).save(tmp_path / "mask.png")
    scan = ["scan", "photo.png", "--out", ".", "--model", "model", "--cores", "2", "--scale", "0.5"]
    told = {}
    for name, more in (("masked", ["--where", "mask.png"]), ("whole", [])):
        words = [str(tmp_path / word) if (tmp_path / word).exists() else word for word in (*scan, *more)]
        assert run_command([*words, "--dtype", "float32"]) == 0
        for what, asked in (("points", ["100,80", "180,81"]), ("box", ["64,32,128,64"])):
            out = tmp_path / f"{name}-{what}.npy"
            look = ["look", str(tmp_path / "photo.png.scan"), f"--{what}", *asked, "--out", str(out)]
            assert run_command([*look, "--stride", "16"]) == 0
            told[name, what] = json.loads(out.with_suffix(".json").read_text())
    points = told["masked", "points"]
    assert points["centres"] == [[100, 80], [180, 82]]  # the nearest pixel of those that the model saw
    assert points["box"] == [84, 64, 112, 34]
    assert points["inside"] == ["01"]
    assert told["masked", "box"]["box"] == [64, 32, 128, 64]
    assert told["masked", "box"]["inside"] == ["0011", "0011"]
    assert told["whole", "box"]["inside"] is None


def test_a_mask_from_a_file(tmp_path: Path) -> None:
    mask = np.zeros((64, 112), np.uint8)
    mask[:, 56:] = 255
    Image.fromarray(mask).save(tmp_path / "tissue.png")
    scan = small().scan(photo(75, 115), cores=2, where=tmp_path / "tissue.png")
    assert scan.look().inside[0].tolist() == [False] * 3 + [True] * 4


def test_another_mask_under_the_same_name_is_another_scan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small().save(tmp_path / "model")
    Image.fromarray(photo(75, 115)).save(tmp_path / "photo.png")
    command = ["scan", tmp_path / "photo.png", "--out", tmp_path / "scans", "--model", tmp_path / "model"]
    command += ["--cores", "9", "--where", tmp_path / "mask.png"]
    for columns, said in ((3, "1 images scanned"), (3, "1 were there before"), (5, "1 images scanned")):
        mask = np.zeros((4, 7), np.uint8)
        mask[:, :columns] = 255
        if columns != 3 or not (tmp_path / "mask.png").exists():
            Image.fromarray(mask).save(tmp_path / "mask.png")
        assert run_command(list(map(str, command))) == 0
        assert said in capsys.readouterr().out


# For probes


def test_scanned_images_equal_the_ordinary_pass_where_everything_is_read() -> None:
    model, images = small(), torch.randn(2, 3, 48, 64)
    expected, ours = plain(model, images, 6), scanned(model, images, 6)
    assert ours.grid == (3, 4)
    for name in ("cls", "patches", "cores", "coords"):
        torch.testing.assert_close(getattr(ours, name), getattr(expected, name), atol=1e-4, rtol=0)
    assert scanned(model, images, 6, stride=8).grid == (6, 8)


def test_a_backbone_reads_a_share_or_looks_finer() -> None:
    model, pixels = small(), np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), np.uint8)
    backbone = Backbone("small", model, "small")
    found = Extractor(backbone.reading(0.25, 8), cores=6).compute(pixels)
    assert found.patches.shape == (2, 64, 48)
    expected = model.scan(pixels[1], cores=6, share=0.25)
    torch.testing.assert_close(found.cls[1], expected.cls)
    torch.testing.assert_close(found.patches[1], expected.look(stride=8).features.flatten(0, 1))
    for share, stride, message in (
        (0, None, "--share must lie above 0"),
        (1, 5, "--stride must divide"),
        (1, 32, "--stride"),
    ):
        with pytest.raises(InputError, match=message):
            backbone.reading(share, stride)
