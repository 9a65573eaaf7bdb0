"""Inference in pieces and streaming against the plain forward pass: any grid, tile, budget, precision and source."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from veca import block as block_file
from veca import fused
from veca.block import Attention, Block, attend
from veca.cli import main as run_command
from veca.config import VecaConfig
from veca.errors import InputError
from veca.images import open_image, to_tensor
from veca.large.picture import open_strips
from veca.model import Veca, VecaOutput

SMALL = {"depth": 3, "width": 48, "heads": 2, "bank": 16}
VARIANTS = {
    "paper": {},
    "converted": {"patch_size": 14, "mlp": "gelu", "mlp_ratio": 4.0, "positions": "table", "table_size": 5},
    "projected": {"out_width": 20, "rope_zero_fraction": 1.0, "norm_eps": 1e-3},
}
SLOW = settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


pytestmark = pytest.mark.usefixtures("one_thread")


def small(**overrides: object) -> Veca:
    """A small model whose weights are large enough that every term of the forward pass matters."""
    torch.manual_seed(1)
    model = Veca(VecaConfig(**{**SMALL, **overrides}))  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model.eval()


def plain(model: Veca, images: Tensor, cores: int) -> VecaOutput:
    """The forward pass that training uses: with gradients enabled there are no pieces."""
    with torch.enable_grad():
        return VecaOutput(*(part.detach() if isinstance(part, Tensor) else part for part in model(images, cores=cores)))


def same(ours: VecaOutput, expected: VecaOutput, atol: float = 1e-4) -> None:
    assert ours.grid == expected.grid
    for name in ("cls", "patches", "cores", "coords"):
        torch.testing.assert_close(getattr(ours, name).float(), getattr(expected, name), atol=atol, rtol=0)


def photo(height: int, width: int, dtype: type = np.uint8, channels: int = 3) -> np.ndarray:
    values = np.random.default_rng(height * width).random((height, width, channels))
    return (values * np.iinfo(dtype).max).astype(dtype)


# In pieces


@SLOW
@given(
    variant=st.sampled_from(sorted(VARIANTS)),
    grid=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    batch=st.integers(1, 4),
    cores=st.integers(1, 16),
    piece=st.integers(1, 90),
)
def test_pieces_equal_the_plain_forward(
    variant: str, grid: tuple[int, int], batch: int, cores: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small(**VARIANTS[variant])
    images = torch.randn(batch, 3, grid[0] * model.patch_size, grid[1] * model.patch_size)
    expected = plain(model, images, cores)
    monkeypatch.setattr(fused, "piece_size", lambda block, dtype: piece)
    with torch.no_grad():
        same(model(images, cores=cores), expected, atol=2e-5)
    with torch.inference_mode():
        same(model(images, cores=cores), expected, atol=2e-5)


def test_every_layer_is_kept_as_it_was() -> None:
    model, images = small(), torch.randn(2, 3, 64, 48)
    expected = model.forward_layers(images, 5)
    with torch.no_grad():
        ours = model.forward_layers(images, 5)
    for mine, theirs in zip(ours.tokens, expected.tokens, strict=True):
        torch.testing.assert_close(mine, theirs.detach(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("count", [9, 64, 65, 200])
def test_pieces_cover_every_token_once(count: int) -> None:
    for patches in (1, 7, 64, 1000):
        bounds = list(fused.pieces(count, patches))
        assert bounds[0][0] == 0
        assert bounds[-1][1] == count
        assert [start for start, _ in bounds[1:]] == [stop for _, stop in bounds[:-1]]
        lengths = [stop - start for start, stop in bounds]
        assert max(lengths) <= patches
        assert max(lengths) - min(lengths) <= 1


def test_the_size_of_a_piece_follows_the_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index, size in enumerate(("48K", "2048K", "16M", "none")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}/size").write_text(f"{size}\n")
    assert fused.cache_size.__wrapped__(tmp_path) == 16 * 2**20
    assert fused.cache_size.__wrapped__(tmp_path / "nowhere") == 32 * 2**20
    block, sizes = small().blocks[0], []
    for megabytes in (1, 4, 16, 999):
        monkeypatch.setattr(fused, "cache_size", lambda megabytes=megabytes: megabytes * 2**20)
        sizes.append(fused.piece_size(block, torch.float32))  # type: ignore[arg-type]
    assert sizes == sorted(sizes)
    assert sizes[0] == 512  # fewer rows are no fast product
    assert sizes[-1] == 4096
    monkeypatch.setattr(fused, "cache_size", lambda: 2**21)
    assert fused.piece_size(block, torch.bfloat16) == pytest.approx(2 * fused.piece_size(block, torch.float32), abs=1)  # type: ignore[arg-type]


def _step(model: Veca) -> None:
    model(torch.randn(1, 3, 32, 32)).patches.square().mean().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()


CHANGES = {
    "an optimiser's step": _step,
    "loaded weights": lambda model: model.load_state_dict(small(norm_eps=1e-5).state_dict() | {
        name: value * 1.3 for name, value in model.state_dict().items()
    }),
    "through .data, which PyTorch does not record": lambda model: [p.data.mul_(1.2) for p in model.parameters()],
    "one head only, through .data": lambda model: [
        block.attn.v_proj.weight.data[16:32].zero_() for block in model.blocks
    ],
    "an inner part, through .data": lambda model: [block.fc1.weight.data[1:, 1:].zero_() for block in model.blocks],
    "a new parameter": lambda model: setattr(model.blocks[1], "fc2", nn.Linear(model.config.hidden_width, 48)),
    "half the precision and back": lambda model: model.bfloat16().float(),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_changed_parameters_are_used(change: str) -> None:
    model, images = small(), torch.randn(1, 3, 48, 48)
    with torch.no_grad():
        before = model(images)
    CHANGES[change](model)  # type: ignore[no-untyped-call]
    expected = plain(model, images, 16)
    assert not torch.allclose(expected.patches, before.patches, atol=1e-3)
    with torch.no_grad():
        same(model(images), expected, atol=2e-5)
        same(copy.deepcopy(model)(images), expected, atol=2e-5)


class Adapter(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def test_hooks_and_adapters_inside_a_block_are_heard() -> None:
    model, images, seen = small(), torch.randn(1, 3, 48, 48), []
    handle = model.blocks[1].attn.v_proj.register_forward_hook(lambda *_: seen.append(1))  # type: ignore[union-attr]
    with torch.no_grad():
        model(images)
        assert len(seen) == 2  # cores and patches
        model.stream(images)
    assert len(seen) == 4
    handle.remove()
    model.blocks[0].attn.q_proj = Adapter(48, 48)
    with torch.no_grad():
        same(model(images), plain(model, images, 16))
        same(model.stream(images), plain(model, images, 16))


def _own_block(model: Veca) -> None:
    class Louder(Block):
        def forward(self, *args: object, **more: object) -> tuple[Tensor, Tensor]:
            cores, patches = super().forward(*args, **more)  # type: ignore[arg-type]
            return cores * 1.1, patches * 1.1

    model.blocks[1].__class__ = Louder


def _own_attention(model: Veca) -> None:
    attention = model.blocks[1].attn
    before = attention.forward  # type: ignore[union-attr]
    attention.forward = lambda *args: tuple(part * 2 for part in before(*args))  # type: ignore[union-attr, operator]


def _hooked(model: Veca) -> None:
    model.blocks[0].register_forward_hook(lambda module, args, out: (out[0], out[1] * 1.5))


def _own_mixing(model: Veca) -> None:
    model.blocks[1].attn.attend = lambda *args: attend(*args) * 2  # type: ignore[union-attr]


@pytest.mark.parametrize("change", [_own_block, _own_attention, _own_mixing, _hooked])
def test_a_forward_of_ones_own_is_never_ignored(change: Callable[[Veca], None]) -> None:
    model, images = small(), torch.randn(1, 3, 48, 48)
    before = plain(model, images, 16)
    change(model)
    expected = plain(model, images, 16)
    assert not torch.allclose(before.patches, expected.patches, atol=1e-2)
    with torch.no_grad():
        same(model(images), expected)
    for verb in (model.stream, model.scan):
        with pytest.raises(InputError, match="hooks or a forward of their own"):
            verb(images)


@pytest.mark.parametrize(("kind", "name"), [(nn.Linear, "forward"), (Block, "mlp"), (Attention, "values")])
def test_a_patched_class_is_never_ignored(kind: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Profilers and quantisers replace methods of classes."""
    model, images = small(), torch.randn(1, 3, 48, 48)
    written = getattr(kind, name)
    monkeypatch.setattr(kind, name, lambda self, x: written(self, x) * 1.05)
    expected = plain(model, images, 16)
    with torch.no_grad():
        same(model(images), expected)
        same(model.stream(images), expected)


@pytest.mark.parametrize("kind", [Block, Attention])
def test_a_patched_forward_cannot_be_streamed(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    written = kind.forward
    monkeypatch.setattr(kind, "forward", lambda *args: written(*args))
    with pytest.raises(InputError, match="hooks or a forward of their own"):
        small().stream(torch.randn(1, 3, 48, 48))


PATCHES = [(nn.functional, "linear"), (nn.Linear, "__call__"), (block_file, "attend"), (block_file, "rotate")]


@pytest.mark.parametrize(("owner", "name"), PATCHES, ids=lambda part: getattr(part, "__name__", part))
def test_a_patched_function_is_never_ignored(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, images, written = small(), torch.randn(1, 3, 48, 48), getattr(owner, name)
    before = plain(model, images, 16)
    monkeypatch.setattr(owner, name, lambda *args: written(*args) * 1.05)
    expected = plain(model, images, 16)
    assert not torch.allclose(before.patches, expected.patches, atol=1e-3)
    with torch.no_grad():
        same(model(images), expected)
        if name != "attend":
            same(model.stream(images), expected)
            return
    with pytest.raises(InputError, match="hooks or a forward of their own"):  # the cores read in parts without it
        model.stream(images)


class Functions(TorchFunctionMode):
    """Counts products, as a function and as an operation (below)."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is nn.functional.linear
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [Functions, Operations])
def test_a_mode_sees_the_plain_forward(kind: type[Functions | Operations]) -> None:
    """Tools that watch or replace every function (FLOP counters, quantisers) see what they would see in training."""
    model, images = small(), torch.randn(1, 3, 48, 48)
    counts = []
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled), kind() as mode:
            model(images)
        counts.append(mode.count)
    assert counts[0] == counts[1] > 0


def test_layers_without_a_bias_and_vmap_see_the_plain_forward() -> None:
    model, images = small(), torch.randn(2, 3, 48, 48)
    expected = plain(model, images, 16)
    with torch.no_grad():
        many = torch.func.vmap(lambda image: model(image[None]).patches[0])(images)
    torch.testing.assert_close(many, expected.patches, atol=1e-4, rtol=0)
    model.blocks[1].fc1 = nn.Linear(48, model.blocks[1].fc1.out_features, bias=False)  # type: ignore[union-attr, arg-type]
    with torch.no_grad():
        same(model(images), plain(model, images, 16))


def test_global_hooks_hear_every_module() -> None:
    model, images = small(), torch.randn(1, 3, 48, 48)
    heard: list[list[str]] = []
    for enabled in (True, False):
        names: list[str] = []
        handle = register_module_forward_hook(lambda module, *_: names.append(type(module).__name__))  # noqa: B023
        with torch.set_grad_enabled(enabled):
            model(images)
        handle.remove()
        heard.append(names)
    assert heard[0] == heard[1]
    assert len(heard[0]) > 30


def test_a_pass_on_fake_tensors_leaves_nothing_behind() -> None:
    model, images = small(), torch.randn(1, 3, 48, 48)
    expected = plain(model, images, 16)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model(torch.empty(1, 3, 48, 48))
    with torch.no_grad():
        same(model(images), expected)


def test_nothing_is_kept_beside_the_weights() -> None:
    """A pass holds no copy of any weight when it is over."""
    model, images = small(), torch.randn(1, 3, 48, 48)
    gc.collect()
    before = {id(thing) for thing in gc.get_objects() if type(thing) is Tensor}
    with torch.no_grad():
        out = model(images)
    gc.collect()
    left = [thing for thing in gc.get_objects() if type(thing) is Tensor and id(thing) not in before]
    given = {id(part) for part in out if isinstance(part, Tensor)}
    assert not [thing.shape for thing in left if id(thing) not in given and thing.numel() >= 48 * 48]


def test_an_empty_batch_has_empty_features() -> None:
    with torch.inference_mode():
        assert small().eval()(torch.zeros(0, 3, 32, 48)).patches.shape[:2] == (0, 6)


def test_pruned_layers_see_the_plain_forward() -> None:
    """Pruning keeps the layer's type and makes its weight anew before every call."""
    model, images = small().eval(), torch.randn(1, 3, 48, 48)
    prune.l1_unstructured(model.blocks[0].fc1, "weight", amount=0.5)
    with torch.no_grad():
        same(model(images), plain(model, images, 16))


def test_weights_of_another_kind_see_the_plain_forward() -> None:
    """Quantisation replaces a weight by a tensor that only its own products understand."""

    class Packed(Tensor):
        """Stands for 8 bits: may be used by a linear layer, and by nothing else."""

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func not in (nn.functional.linear, Tensor.dtype.__get__, Tensor.requires_grad.__get__):  # type: ignore[attr-defined]
                raise NotImplementedError(func)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    model, images = small().eval(), torch.randn(1, 3, 48, 48)
    expected = plain(model, images, 16)
    layer = model.blocks[1].attn.v_proj
    layer._parameters["weight"] = layer.weight.detach().as_subclass(Packed)  # type: ignore[union-attr, assignment]
    with torch.no_grad():
        same(model(images), expected)
        same(model.stream(images), expected)


def test_autocast_is_left_alone() -> None:
    model, images = small(), torch.randn(1, 3, 48, 48)
    tokens = torch.randn(1, 9, 48)
    with torch.no_grad():
        assert fused.can_fuse(model.blocks, tokens)
        with torch.autocast("cpu", torch.bfloat16):
            assert not fused.can_fuse(model.blocks, tokens)
    assert not fused.can_fuse(model.blocks, tokens)  # with gradients
    with torch.no_grad():
        assert not fused.can_fuse(model.bfloat16().blocks, images)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_fused_verbs_in_bfloat16(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As near to float32 as the ordinary pass in bfloat16 is; on every CPU, though only some gain by it."""
    model, images = small(**VARIANTS[variant]), torch.randn(2, 3, 112, 112)
    expected = plain(model, images, 16)
    model.bfloat16()
    ordinary = plain(model, images.bfloat16(), 16)
    monkeypatch.setattr(fused, "fast_bfloat16", lambda device: True)
    with torch.no_grad():
        assert fused.can_fuse(model.blocks, images.bfloat16())
        ours = model(images.bfloat16())
    for name in ("cls", "patches", "cores"):
        wanted = getattr(expected, name)
        mine, theirs = ((getattr(out, name).float() - wanted).square().mean().sqrt() for out in (ours, ordinary))
        assert mine < 1.5 * theirs, name


# Streaming


@SLOW
@given(
    variant=st.sampled_from(sorted(VARIANTS)),
    grid=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    cores=st.integers(1, 16),
    tile=st.integers(1, 70),
    spilled=st.booleans(),
)
def test_streaming_equals_the_plain_forward(
    variant: str, grid: tuple[int, int], cores: int, tile: int, spilled: bool, tmp_path: Path
) -> None:
    model = small(**VARIANTS[variant])
    images = torch.randn(1, 3, grid[0] * model.patch_size, grid[1] * model.patch_size)
    expected = plain(model, images, cores)
    same(model.stream(images, cores=cores, tile=tile, spill=tmp_path if spilled else None), expected)
    rounded = model.stream(images[0], cores=cores, tile=tile, spill=tmp_path if spilled else None, tokens="float16")
    assert rounded.patches.dtype == torch.float16
    same(rounded, expected, atol=3e-2)
    assert not list(tmp_path.iterdir())


def tiff(path: Path, values: np.ndarray, **options: object) -> Path:
    tifffile.imwrite(path, values, **options)  # type: ignore[arg-type]
    return path


SOURCES = {
    "tiles, deflate": {"tile": (32, 48), "compression": "deflate"},
    "tiles, plain": {"tile": (16, 16)},
    "strips, LZW, a row each": {"rowsperstrip": 1, "compression": "lzw"},
    "strips that cut patches": {"rowsperstrip": 23, "compression": "zlib"},
    "one strip, as older writers do": {"rowsperstrip": 10_000},
    "big TIFF, big-endian": {"bigtiff": True, "byteorder": ">"},
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_tiff_is_read_strip_by_strip(source: str, dtype: type, tmp_path: Path) -> None:
    values = photo(75, 115, dtype)
    model = small()
    path = tiff(tmp_path / "photo.tif", values, photometric="rgb", **SOURCES[source])
    expected = plain(model, to_tensor(open_image(values[:64, :112]))[None], 9)
    for tile in (3, 14, 1000):
        same(model.stream(path, cores=9, tile=tile), expected)


def test_other_sources(tmp_path: Path) -> None:
    model, values = small(), photo(70, 50)
    expected = plain(model, to_tensor(open_image(values[:64, :48]))[None], 16)
    np.save(tmp_path / "photo.npy", values)
    open_image(values).save(tmp_path / "photo.png")
    mapped = np.load(tmp_path / "photo.npy", mmap_mode="r")
    for source in (values, mapped, tmp_path / "photo.npy", str(tmp_path / "photo.png"), open_image(values)):
        same(model.stream(source), expected)
    grey = photo(70, 50, channels=1)
    same(
        model.stream(tiff(tmp_path / "grey.tif", grey[..., 0])),
        plain(model, to_tensor(open_image(grey[:64, :48]))[None], 16),
    )
    same(model.stream(values / 255.0), expected)


@pytest.mark.parametrize("layout", [{}, {"tile": (32, 32)}])
def test_a_fourth_band_is_no_opacity_unless_the_file_says_so(layout: dict[str, object], tmp_path: Path) -> None:
    model, values = small(), photo(64, 48, channels=4)
    colours = plain(model, to_tensor(open_image(values[..., :3]))[None], 16)
    blended = plain(model, to_tensor(open_image(values))[None], 16)
    assert not torch.allclose(colours.patches, blended.patches, atol=1e-2)
    infrared = tiff(tmp_path / "nir.tif", values, photometric="rgb", extrasamples=["unspecified"], **layout)
    with pytest.warns(UserWarning, match="bands 1,2,3 of 4"):
        same(model.stream(infrared), colours)
    opacity = tiff(tmp_path / "rgba.tif", values, photometric="rgb", extrasamples=["unassalpha"], **layout)
    same(model.stream(opacity), blended)


def test_tiff_with_jpeg_tiles(tmp_path: Path) -> None:
    smooth = np.linspace(0, 255, 96, dtype=np.uint8)[:, None, None] * np.ones((1, 96, 3), np.uint8)
    path = tiff(tmp_path / "jpeg.tif", smooth, tile=(32, 32), compression="jpeg", photometric="rgb")
    whole = tifffile.imread(path)
    model = small()
    same(model.stream(path), plain(model, to_tensor(open_image(whole))[None], 16))


def test_dense_output_in_a_file_that_is_mapped(tmp_path: Path) -> None:
    model, images = small(out_width=20), torch.randn(1, 3, 64, 48)
    out = model.stream(images, out=tmp_path / "dense.npy", tile=5)
    stored = np.load(tmp_path / "dense.npy", mmap_mode="r")
    assert stored.shape == (4, 3, 20)
    assert stored.dtype == np.float32
    same(out, plain(model, images, 16))
    np.testing.assert_array_equal(stored.reshape(12, 20), out.patches[0].numpy())
    model.stream(images, out=tmp_path / "half.npy", tokens="float16")
    assert np.load(tmp_path / "half.npy").dtype == np.float16


def test_progress_is_by_layer() -> None:
    heard: list[tuple[str, int, int]] = []
    small().stream(torch.randn(1, 3, 64, 48), cores=4, tile=5, report=lambda *what: heard.append(what))
    stages = list(dict.fromkeys(what for what, _, _ in heard))
    assert stages == ["patches", "layer 1 of 3", "layer 2 of 3", "layer 3 of 3", "output"]
    for stage in stages:
        done = [(count, total) for what, count, total in heard if what == stage]
        assert [count for count, _ in done] == sorted(count for count, _ in done)
        assert done[-1][0] == done[-1][1]


def test_bfloat16_weights_stream() -> None:
    model, images = small(), torch.randn(1, 3, 64, 48)
    model.bfloat16()
    expected = plain(model, images.bfloat16(), 16)
    ours = model.stream(images)
    distance = (ours.patches.float() - expected.patches.float()).square().mean().sqrt()
    assert distance < 0.03 * expected.patches.float().square().mean().sqrt()  # each rounds in its own places


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("missing.tif", {}, "missing.tif: no such file"),
        (".", {}, "is a folder, not an image"),
        (np.zeros((8, 64, 3), np.uint8), {}, "64×8 is smaller than a patch of 16×16"),
        (np.zeros((64, 64, 3), np.int32), {}, "image values must be uint8"),
        (np.zeros(64, np.uint8), {}, "an image array is H×W"),
        (torch.zeros(2, 3, 32, 32), {}, "a tensor to stream is one normalised image"),
        (torch.zeros(3, 33, 32), {}, "multiples of the patch size 16, not 33×32"),
        (torch.zeros(3, 32, 32), {"cores": 17}, "between 1 and 16"),
        (torch.zeros(3, 32, 32), {"tile": 0}, "tile must be at least 1 patch"),
        (torch.zeros(3, 32, 32), {"tokens": "int8"}, "float32 or float16"),
        (torch.zeros(3, 32, 32), {"spill": "/proc/none"}, "cannot keep tokens in /proc/none"),
    ],
)
def test_mistakes_are_one_line(source: object, options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        small().stream(source, **options)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_the_dense_arm_cannot_be_streamed() -> None:
    with pytest.raises(InputError, match="every patch reads every other"):
        small(attention="dense").stream(torch.zeros(3, 32, 32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"photometric": "rgb", "extratags": [(274, 3, 1, 6, True)]}, "stored turned"),
        ({"photometric": "separated"}, "convert it to RGB"),
        ({"photometric": "minisblack", "planarconfig": "contig"}, "2 values a pixel"),
    ],
)
def test_unsupported_tiff_says_so(options: dict[str, object], message: str, tmp_path: Path) -> None:
    values = photo(32, 32, channels=4 if options["photometric"] == "separated" else 3)
    if options["photometric"] == "minisblack":
        values = photo(32, 32, channels=2)
    path = tiff(tmp_path / "odd.tif", values, **options)
    with pytest.raises(InputError, match=message):
        small().stream(path)


@pytest.mark.parametrize(
    ("mode", "compression", "message"),
    [
        ("YCbCr", "raw", "YCBCR without JPEG"),
        ("YCbCr", "tiff_lzw", "YCBCR without JPEG"),
        ("L", "4 bits", "4 bits a value"),
    ],
)
def test_values_that_are_not_what_they_seem_are_refused(
    mode: str, compression: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "odd.tif"
    if compression == "4 bits":
        tifffile.imwrite(path, photo(32, 32, channels=1)[..., 0] // 16, photometric="minisblack", bitspersample=4)
    else:
        Image.fromarray(photo(32, 32)).convert(mode).save(path, compression=compression)
    with pytest.raises(InputError, match=message):
        small().stream(path)


def test_a_damaged_tiff_says_so(tmp_path: Path) -> None:
    path = tiff(tmp_path / "photo.tif", photo(64, 64), tile=(32, 32), compression="deflate")
    content = bytearray(path.read_bytes())
    with tifffile.TiffFile(path) as file:
        start = file.pages[0].dataoffsets[2]  # type: ignore[union-attr]
    content[start : start + 40] = b"\0" * 40
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"photo\.tif: tile 2 cannot be decoded"):
        small().stream(path)
    (tmp_path / "text.tif").write_text("not a picture")
    with pytest.raises(InputError, match="not a readable TIFF file"):
        small().stream(tmp_path / "text.tif")


# The command


def test_the_command_writes_a_mapped_array(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = small()
    model.save(tmp_path / "model")
    path = tiff(tmp_path / "big.tif", photo(70, 100), tile=(32, 32), photometric="rgb")
    arguments = ["--out", str(tmp_path / "out"), "--model", str(tmp_path / "model"), "--cores", "5"]
    assert run_command(["features", "--stream", str(path), *arguments, "--tile", "7", "--dtype", "float32"]) == 0
    assert "4×6 features of 96×64 pixels" in capsys.readouterr().out
    expected = plain(model, to_tensor(open_image(tifffile.imread(path)[:64, :96]))[None], 5)
    dense = np.load(tmp_path / "out/big.tif.npy", mmap_mode="r")
    np.testing.assert_allclose(dense.reshape(24, 48), expected.patches[0].numpy(), atol=1e-4)
    rest = np.load(tmp_path / "out/big.tif.npz")
    np.testing.assert_allclose(rest["cls"], expected.cls[0].numpy(), atol=1e-4)
    assert rest["grid"].tolist() == [4, 6]
    assert run_command(["features", "--stream", str(tmp_path / "none.tif"), *arguments]) == 2
    assert run_command(["features", "--stream", str(path), str(path), *arguments]) == 2


# Memory

MEASURE = """
import sys, torch, veca
from pathlib import Path
torch.set_num_threads(1)
model = veca.load(sys.argv[1])
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) // 1024
model.stream(sys.argv[2], cores=4, out=sys.argv[4])  # libraries, and the workspace of a piece
before = peak()
model.stream(sys.argv[3], cores=4, out=sys.argv[4], **eval(sys.argv[5]))
print(peak() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.end_to_end
def test_memory_is_the_token_buffer_and_a_constant(tmp_path: Path) -> None:
    """A photo of 4096×4096 pixels (50 MB, 65,536 patches) through a model of width 256: the buffer is 67 MB."""
    Veca(VecaConfig(depth=1, width=256, heads=4, bank=4, mlp_ratio=0.25)).save(tmp_path / "model")
    warm = tiff(tmp_path / "warm.tif", np.zeros((768, 4096, 3), np.uint8), tile=(256, 256), photometric="rgb")
    options = {"tile": (256, 256), "photometric": "rgb", "shape": (4096, 4096, 3), "dtype": np.uint8}
    tifffile.imwrite(tmp_path / "big.tif", (np.full((256, 256, 3), i, np.uint8) for i in range(256)), **options)
    at_once = os.environ | {"MALLOC_MMAP_THRESHOLD_": "262144"}  # what is freed is given back, not kept for later
    grown = {}
    for name, keep in {"float32": {}, "float16": {"tokens": "float16"}, "spilled": {"spill": str(tmp_path)}}.items():
        command = [sys.executable, "-c", MEASURE, tmp_path / "model", warm, tmp_path / "big.tif", tmp_path / "o.npy"]
        done = subprocess.run([*map(str, command), repr(keep)], capture_output=True, text=True, check=True, env=at_once)
        grown[name] = int(done.stdout)
    buffer = 65_536 * 256 * 4 / 2**20  # MB
    assert grown["float32"] < buffer + 24
    assert grown["float16"] < buffer / 2 + 24
    assert grown["spilled"] < 24  # neither the photo, nor the tokens, nor the output
    assert grown["float32"] > buffer * 0.7  # the measurement sees what is there


def test_a_file_that_is_too_small_is_named(tmp_path: Path) -> None:
    Image.new("RGB", (1, 1)).save(tmp_path / "one.png")
    with pytest.raises(InputError, match=r"one\.png: 1×1 is smaller than a patch of 16×16"):
        small().stream(tmp_path / "one.png")


@pytest.mark.parametrize("compression", [None, "deflate", "jpeg"])
def test_a_tiff_cut_at_the_border_of_a_tile_is_refused(compression: str | None, tmp_path: Path) -> None:
    """Its missing tiles used to be black. A tile that was never written, whose length is 0, still is."""
    pixels = np.random.default_rng(0).integers(0, 256, (96, 64, 3), dtype=np.uint8)
    path = tmp_path / "cut.tif"
    tifffile.imwrite(path, pixels, tile=(32, 32), compression=compression, photometric="rgb")
    with tifffile.TiffFile(path) as file:
        page = file.pages[0]
        starts, places = page.dataoffsets, page.tags["TileByteCounts"].valueoffset
        size = {3: 2, 4: 4}[int(page.tags["TileByteCounts"].dtype)]
    whole = path.read_bytes()
    for start in starts[1:]:
        path.write_bytes(whole[:start])
        with pytest.raises(InputError, match="it is cut short"):
            small().stream(path)
    if compression:  # a plain file is one run of values
        path.write_bytes(whole[: places + 5 * size] + bytes(size) + whole[places + 6 * size : starts[5]])
        with open_strips(path, 16) as strips:
            last = strips.read(64, 96)[0, :, :, 32:]
        assert (last == last[:, :1, :1]).all()


def test_hostile_large_images_are_one_line(tmp_path: Path) -> None:
    """Damaged tags, lying headers: each is an image or an InputError of one line, and nothing else."""
    from attack.large import hostile_large

    refused = 0
    for seed in range(400):
        suffix, data = hostile_large(seed)
        path = tmp_path / f"image{suffix}"
        path.write_bytes(data)
        try:
            with open_strips(path, 16) as strips:
                assert strips.read(0, 16).shape == (1, 3, 16, strips.width)
        except InputError as error:
            assert "\n" not in str(error)
            refused += 1
    assert 100 < refused < 400


def test_what_cannot_be_written_is_refused_before_any_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small().save(tmp_path / "model")
    np.save(tmp_path / "image.npy", np.zeros((64, 64, 3), np.uint8))
    (tmp_path / "file").write_text("here already")
    (tmp_path / "out/image.npy.npy").mkdir(parents=True)
    np.lib.format.open_memmap(tmp_path / "huge.npy", "w+", np.uint8, (2**22, 2**20, 3))  # a file with a hole
    monkeypatch.setattr(Veca, "stream", None)
    for name, out, said in [
        ("image.npy", "file", "is a file, not a folder"),
        ("image.npy", "out", "is a folder, not a file"),
        ("huge.npy", "new", "its features need"),
    ]:
        arguments = ["--model", str(tmp_path / "model"), "--out", str(tmp_path / out), "--cores", "8"]
        assert run_command(["features", "--stream", str(tmp_path / name), *arguments]) == 2
        printed = capsys.readouterr().err
        assert said in printed
        assert len(printed.strip().splitlines()) == 1
