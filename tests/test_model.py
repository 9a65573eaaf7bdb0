"""The network against the authors' vectors, against an independent computation, and in every mode it must run in."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

import veca
from veca.block import attend
from veca.config import MODELS, VecaConfig
from veca.errors import InputError
from veca.model import Veca
from veca.rope import jitter

TINY = {"depth": 3, "width": 48, "heads": 2, "bank": 16}
VARIANTS = {
    "paper": {},
    "dense": {"attention": "dense"},
    "converted": {"patch_size": 14, "mlp": "gelu", "mlp_ratio": 4.0, "positions": "table", "table_size": 5},
    "projected": {"out_width": 20, "rope_zero_fraction": 1.0},
}


def small(**overrides: object) -> Veca:
    """A small model whose weights are large enough that every term of the forward pass matters."""
    model = Veca(VecaConfig(**{**TINY, **overrides}))  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model.eval()


# An independent computation: one sequence, one N×N mask, complex rotations, loops where loops are clear.


def cubic(entries: Tensor, at: float) -> Tensor:
    """A table at `at` along its first axis (0: the middle of the first entry): bicubic, a = −0.75, ends repeated."""
    first, total = math.floor(at), torch.zeros_like(entries[0])
    for tap in range(first - 1, first + 3):
        x = abs(at - tap)
        weight = (1.25 * x - 2.25) * x * x + 1 if x <= 1 else ((-0.75 * x + 3.75) * x - 6) * x + 3
        total = total + weight * entries[min(max(tap, 0), len(entries) - 1)]
    return total


def expected_forward(
    model: Veca,
    images: Tensor,
    cores: int,
    chosen: Tensor | None = None,  # only these patches of the grid take part
    extra: tuple[list[int], list[int]] | None = None,  # left and upper edges of further patches, which nobody reads
) -> tuple[Tensor, Tensor]:
    """All output tokens and core coordinates, from the weights and docs/research/mathematics.md alone, in float64."""
    config, weights = model.config, {name: tensor.double() for name, tensor in model.state_dict().items()}
    p, d = config.patch_size, config.width // config.heads
    batch, _, height, width = images.shape
    h, w = height // p, width // p
    pixels = images.double().reshape(batch, 3, h, p, w, p).permute(0, 2, 4, 1, 3, 5).reshape(batch, h * w, -1)
    patches = pixels @ weights["patch_embed.proj.weight"].flatten(1).T + weights["patch_embed.proj.bias"]
    if config.positions == "table":
        table = weights["table"].permute(2, 0, 1)[None]
        table = nn.functional.interpolate(table, size=(h, w), mode="bicubic", align_corners=False)
        patches = patches + table[0].flatten(1).T
    where = torch.tensor([[(j + 0.5) / w * 2 - 1, (i + 0.5) / h * 2 - 1] for i in range(h) for j in range(w)]).double()
    if chosen is not None:
        patches, where = patches[:, chosen], where[chosen]
    read = cores + patches.shape[1]
    for left, top in zip(*(extra or ([], [])), strict=True):
        square = images[:, :, top : top + p, left : left + p].double().flatten(1)
        token = square @ weights["patch_embed.proj.weight"].flatten(1).T + weights["patch_embed.proj.bias"]
        centre = ((left + p / 2) / width, (top + p / 2) / height)
        if config.positions == "table":
            size = config.table_size
            token = token + cubic(cubic(weights["table"], centre[1] * size - 0.5), centre[0] * size - 0.5)
        patches = torch.cat((patches, token[:, None]), 1)
        where = torch.cat((where, torch.tensor([[2 * side - 1 for side in centre]]).double()))
    x = torch.cat((weights["bank.tokens"][:cores].expand(batch, -1, -1), patches), 1)
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
    if config.attention == "core":
        mask[cores:, cores:] = False
    mask[:, read:] = False
    state = weights["bank.states"][:cores].expand(batch, -1, -1)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    count = d // 4
    periods = [100 ** (2 * i / (d / 2)) for i in range(count)]
    for i in range(count - round(config.rope_zero_fraction * count), count):
        periods[i] = math.inf

    for layer in range(config.depth):
        if layer:
            shift = linear(x[:, :cores], f"bank.heads.{layer - 1}")
            state = state + weights["bank.alpha"][layer - 1] * shift
        coords = torch.cat((state.tanh(), where.expand(batch, -1, -1)), 1)
        angles = torch.stack([2 * math.pi * coords[..., axis] / period for axis in (0, 1) for period in periods], -1)
        turn = torch.polar(torch.ones_like(angles), angles)[:, :, None]

        def heads(y: Tensor) -> Tensor:
            return y.reshape(batch, -1, config.heads, d)

        def turned(y: Tensor, turn: Tensor = turn) -> Tensor:
            return torch.view_as_real(
                torch.view_as_complex(heads(y).reshape(batch, -1, config.heads, d // 2, 2)) * turn
            )

        y = norm(x, f"blocks.{layer}.norm_attn")
        q, k = (turned(linear(y, f"blocks.{layer}.attn.{n}_proj")).flatten(-2) for n in "qk")
        logits = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(d)
        probabilities = logits.masked_fill(~mask, -math.inf).softmax(-1)
        mixed = torch.einsum("bhij,bjhd->bihd", probabilities, heads(linear(y, f"blocks.{layer}.attn.v_proj")))
        x = x + linear(mixed.flatten(2), f"blocks.{layer}.attn.out_proj")
        hidden = linear(norm(x, f"blocks.{layer}.norm_mlp"), f"blocks.{layer}.fc1")
        if config.mlp == "swiglu":
            u, v = hidden.split(config.hidden_width, -1)
            hidden = u / (1 + (-u).exp()) * v
        else:
            hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
        x = x + linear(hidden, f"blocks.{layer}.fc2")
    x = norm(x, "norm")
    return (linear(x, "project") if config.out_width else x), state.tanh()


def test_reference_vectors(shared: Path) -> None:
    reference = load_file(shared / "reference/tiny.safetensors")
    model = veca.load(shared / "reference/tiny_official.pt")
    with torch.no_grad():
        for shape in ("sq", "wide"):
            for cores in (8, 16):
                out = model(reference[f"input/{shape}"], cores=cores)
                torch.testing.assert_close(out.cls, reference[f"cls/{shape}/{cores}"], atol=1e-5, rtol=0)
                torch.testing.assert_close(out.patches, reference[f"patch/{shape}/{cores}"], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [("veca_small", "small"), ("veca_small_plus", "splus"), ("veca_base", "base"), ("veca_large", "large")],
)
def test_paper_sizes_have_exactly_the_authors_parameters(shared: Path, name: str, theirs: str) -> None:
    official = json.loads((shared / "reference/official_state_dicts.json").read_text())[theirs]
    with torch.device("meta"):
        model = veca.create_model(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == official["params"]


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=8, deadline=None)
@given(h=st.integers(1, 6), w=st.integers(1, 6), cores=st.integers(1, 16), batch=st.integers(1, 3))
def test_forward_equals_independent_dense_computation(variant: str, h: int, w: int, cores: int, batch: int) -> None:
    torch.manual_seed(h * 1000 + w * 100 + cores)
    model = small(**VARIANTS[variant])
    images = torch.randn(batch, 3, h * model.patch_size, w * model.patch_size)
    with torch.no_grad():
        out = model(images, cores=cores)
    tokens, coords = expected_forward(model, images, cores)
    assert out.grid == (h, w)
    for given_, wanted in (
        (out.cls, tokens[:, 0]),
        (out.cores, tokens[:, :cores]),
        (out.patches, tokens[:, cores:]),
        (out.coords, coords),
    ):
        torch.testing.assert_close(given_.double(), wanted, atol=2e-4, rtol=1e-4)


def patch_to_patch_gradient(model: Veca, depth: int) -> float:
    """How much the last patch after `depth` blocks depends on the pixels of the first patch."""
    images = torch.randn(1, 3, 64, 64, requires_grad=True)
    tokens = model.forward_layers(images, 8).tokens[depth - 1]
    (gradient,) = torch.autograd.grad(tokens[0, -1].sum(), images)
    return gradient[..., :16, :16].abs().max().item()


def test_patches_never_read_each_other_but_talk_through_the_cores() -> None:
    model = small()
    assert patch_to_patch_gradient(model, 1) == 0
    assert patch_to_patch_gradient(model, 2) > 0
    assert patch_to_patch_gradient(small(attention="dense"), 1) > 0


@pytest.mark.parametrize("attention", ["core", "dense"])
def test_cores_beyond_the_budget_change_nothing(attention: str) -> None:
    model, images = small(attention=attention), torch.randn(1, 3, 48, 32)
    before = model(images, cores=5)
    with torch.no_grad():
        model.bank.tokens[5:] += 100
        model.bank.states[5:] += 1
    after = model(images, cores=5)
    assert torch.equal(before.patches, after.patches)
    assert torch.equal(before.cores, after.cores)
    assert not torch.equal(after.patches, model(images, cores=6).patches)


@pytest.mark.parametrize("variant", VARIANTS)
def test_batch_equals_one_by_one(variant: str) -> None:
    model = small(**VARIANTS[variant])
    images = torch.randn(3, 3, 2 * model.patch_size, 4 * model.patch_size)
    with torch.no_grad():
        together = model(images, cores=7)
        for index in range(3):
            alone = model(images[index : index + 1], cores=7)
            torch.testing.assert_close(together.patches[index], alone.patches[0], atol=2e-5, rtol=1e-5)
            torch.testing.assert_close(together.cls[index], alone.cls[0], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("side", [16, 2048])
def test_smallest_and_largest_image(side: int) -> None:
    model = Veca(VecaConfig(depth=2, width=16, heads=1, bank=4)).eval()
    with torch.no_grad():
        out = model(torch.randn(1, 3, side, side), cores=4)
    assert out.patches.shape == (1, (side // 16) ** 2, 16)
    assert out.patches.isfinite().all()


def test_no_tensor_grows_with_the_square_of_the_patches() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, Tensor):
                    self.numel = max(self.numel, tensor.numel())
            return out

    model = small(bank=8)
    sizes = {}
    for side in (256, 1024):
        images = torch.randn(1, 3, side, side)
        with torch.no_grad(), Largest() as largest:
            model(images, cores=8)
        sizes[side] = largest.numel
    patches = (1024 // 16) ** 2
    assert sizes[1024] < patches * patches / 5  # the largest is the image itself, as the rows of a product
    assert sizes[1024] <= 16.1 * sizes[256]  # 16 times the patches


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 3, 40, 32), "multiples of the patch size 16, not 40×32"),
        ((1, 3, 32, 0), "multiples of the patch size 16, not 32×0"),
        ((3, 32, 32), "B×3×H×W, not 3×32×32"),
        ((1, 1, 32, 32), "B×3×H×W, not 1×1×32×32"),
    ],
)
def test_wrong_shapes_are_named(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small()(torch.zeros(shape))


@pytest.mark.parametrize("cores", [0, -1, 17, 2.0, True, "8"])
def test_wrong_budgets_are_named(cores: object) -> None:
    with pytest.raises(ValueError, match=r"1 (to|and) 16"):
        small()(torch.zeros(1, 3, 32, 32), cores=cores)


@pytest.mark.parametrize(
    ("images", "more", "message"),
    [
        ("photo.jpg", {}, r"not str: .* model\(model\.preprocess\(photo\)\)"),
        ([torch.zeros(3, 32, 32), torch.zeros(3, 16, 16)], {}, r"not a list of 2 tensors: stack crops of one size"),
        (
            torch.zeros(1, 3, 32, 32),
            {"is_training": True},
            r"True is model\.forward_features\(images\) here",
        ),
        (torch.zeros(1, 3, 32, 32), {"is_training": False}, r"is_training=False is model\(images\)\.cls"),
    ],
)
def test_habits_of_other_libraries_are_told_the_way(images: object, more: dict[str, bool], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        small()(images, **more)
    assert "\n" not in str(caught.value)
    if not isinstance(images, torch.Tensor):
        with pytest.raises(InputError, match=message):
            small().forward_features(images)  # type: ignore[arg-type]


def test_integer_images_are_refused() -> None:
    with pytest.raises(ValueError, match=r"floating point.*uint8"):
        small()(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_half_precision_stays_close_and_positions_stay_float32(dtype: torch.dtype, variant: str) -> None:
    model = Veca(VecaConfig(**{**TINY, **VARIANTS[variant]})).eval()  # type: ignore[arg-type]
    images = torch.randn(2, 3, 4 * model.patch_size, 3 * model.patch_size)
    with torch.no_grad():
        exact = model(images, cores=8)
        with torch.autocast("cpu", dtype=dtype):
            cast = model(images, cores=8)
        half = model.to(dtype)(images.to(dtype), cores=8)
    assert half.patches.dtype == dtype
    for out in (cast, half):
        assert out.coords.dtype == torch.float32
        cosine = nn.functional.cosine_similarity(out.patches.float(), exact.patches, dim=-1)
        assert cosine.min() > 0.999


def test_training_draws_positions_anew_and_inference_does_not() -> None:
    model, images = small(), torch.randn(1, 3, 64, 64)
    assert torch.equal(model(images).patches, model(images).patches)
    model.train()
    assert not torch.equal(model(images).patches, model(images).patches)


def test_jitter_has_the_stated_ranges() -> None:
    scales, shifts = [], []
    for _ in range(400):
        across, down = jitter(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]))
        origin, scale = torch.stack((across[0], down[0])), across[1] - across[0]
        torch.testing.assert_close(down[1] - down[0], scale)  # one factor for both axes
        scales.append(scale)
        shifts.append(origin / scale)
    scale, shift = torch.stack(scales), torch.stack(shifts)
    assert 0.5 <= scale.min() < 0.52
    assert 1.9 < scale.max() <= 2.0
    assert 0.45 < (scale < 1).float().mean() < 0.55  # log-uniform: half the draws shrink
    assert 0.07 < shift.abs().max() <= 0.0801
    assert (shift[:, 0] != shift[:, 1]).all()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_training_in_half_precision(dtype: torch.dtype, checkpointing: bool) -> None:
    """Under autocast and as a converted model, the gradient points where the float32 one does."""

    def gradient(model: Veca, cast: bool) -> Tensor:
        torch.manual_seed(1)  # the positions' jitter
        with torch.autocast("cpu", dtype=dtype, enabled=cast):
            out = model(images.to(model.bank.tokens.dtype), cores=6)
        out.patches.float().square().mean().backward()
        grad = model.bank.tokens.grad
        assert grad is not None
        model.zero_grad()
        return grad.float().flatten()

    images = torch.randn(2, 3, 64, 48)
    model = Veca(VecaConfig(depth=2, width=48, heads=2, bank=8, out_width=7)).train()
    model.set_grad_checkpointing(checkpointing)
    exact, cast = gradient(model, cast=False), gradient(model, cast=True)
    half = gradient(model.to(dtype), cast=False)
    assert nn.functional.cosine_similarity(exact, cast, dim=0) > 0.99
    assert nn.functional.cosine_similarity(exact, half, dim=0) > 0.99


@pytest.mark.parametrize(("queries", "keys"), [(5, 300), (300, 5), (300, 300)])
def test_attention_and_its_gradients_in_bfloat16(queries: int, keys: int) -> None:
    """Against float64 on the same numbers: few rows or columns take plain operations, many the fused kernel."""
    torch.manual_seed(queries)
    given_ = [torch.randn(2, 3, count, 16).bfloat16().requires_grad_() for count in (queries, keys, keys)]
    exact = [tensor.detach().double().requires_grad_() for tensor in given_]
    weights = torch.randn(2, 3, queries, 16).bfloat16()
    mixed = attend(*given_)
    (mixed * weights).sum().backward()
    expected = (exact[0] @ exact[1].mT / 4).softmax(-1) @ exact[2]
    (expected * weights.double()).sum().backward()
    for ours, wanted in [(mixed, expected), *((a.grad, b.grad) for a, b in zip(given_, exact, strict=True))]:
        assert ours is not None
        assert wanted is not None
        assert float((ours.double() - wanted).detach().norm() / wanted.detach().norm()) < 0.01


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient_checkpointing_changes_nothing(variant: str) -> None:
    model = small(**VARIANTS[variant]).train()
    images = torch.randn(2, 3, 2 * model.patch_size, 2 * model.patch_size)

    def gradients() -> list[Tensor]:
        torch.manual_seed(1)  # the positions' jitter
        model.zero_grad()
        out = model(images, cores=6)
        (out.patches.square().mean() + out.cls.square().mean() + out.coords.square().mean()).backward()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        assert all(parameter.grad is not None for parameter in trained)  # also cores beyond the budget
        return [parameter.grad.clone() for parameter in trained]

    plain = gradients()
    model.set_grad_checkpointing()
    for a, b in zip(plain, gradients(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("variant", ["paper", "converted"])
@pytest.mark.end_to_end
def test_compile_has_no_graph_break_and_few_recompiles(variant: str) -> None:
    torch._dynamo.reset()
    model = small(depth=2, **VARIANTS[variant])
    images = torch.randn(2, 3, 2 * model.patch_size, 3 * model.patch_size)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        for cores in (4, 8, 12, 4):
            expected = model(images, cores=cores).patches
            torch.testing.assert_close(compiled(images, cores=cores).patches, expected, atol=1e-5, rtol=1e-5)
    assert counter.frame_count <= 3  # at most one graph per budget
    compiled.train()
    compiled(images, cores=4).patches.sum().backward()
    assert model.patch_embed.proj.weight.grad is not None


@pytest.mark.parametrize("variant", VARIANTS)
def test_export_with_dynamic_shapes(variant: str) -> None:
    model = small(depth=2, **VARIANTS[variant])
    patch = model.patch_size
    height, width = torch.export.Dim("h", min=1, max=64), torch.export.Dim("w", min=1, max=64)
    shapes = {"images": {0: torch.export.Dim("batch"), 2: patch * height, 3: patch * width}, "cores": None}
    exported = torch.export.export(
        model, (torch.randn(2, 3, 3 * patch, 4 * patch),), {"cores": 8}, dynamic_shapes=shapes
    ).module()
    images = torch.randn(3, 3, 5 * patch, 2 * patch)
    torch.testing.assert_close(exported(images, cores=8).patches, model(images, cores=8).patches, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("gradients", [False, True])
def test_intermediate_layers_keep_only_those_asked_for(gradients: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, kept, plain = small(), [], Veca.forward_layers

    def watched(self: Veca, *arguments: object, **options: object) -> object:
        kept.append(plain(self, *arguments, **options))  # type: ignore[arg-type]
        return kept[-1]

    monkeypatch.setattr(Veca, "forward_layers", watched)
    with torch.set_grad_enabled(gradients):
        for wanted, count in ((1, 1), ([1], 1), ([0, 2], 2), (3, 3)):
            model.get_intermediate_layers(torch.randn(1, 3, 32, 48), n=wanted)
            assert len(kept[-1].patches) == len(kept[-1].cores) == count


@pytest.mark.parametrize("variant", ["paper", "converted", "projected"])
def test_weights_on_disk(variant: str, tmp_path: Path) -> None:
    """accelerate loads the parameters of a module when its `forward` is called, and lets go of them after it."""
    accelerate = pytest.importorskip("accelerate")
    model = small(**VARIANTS[variant])
    names, images = list(model.state_dict()), torch.randn(2, 3, 2 * model.patch_size, 5 * model.patch_size)
    with torch.no_grad():
        expected = model(images, cores=7)
        accelerate.disk_offload(model, tmp_path)
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
        found = model(images, cores=7)
        assert list(model.state_dict()) == names
        named = model.forward_features(images, cores=7)
        (last,) = model.get_intermediate_layers(images, cores=7)
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
        projected = model.project(last)
    for name in ("cls", "patches", "cores", "coords"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), atol=1e-5, rtol=1e-5)
    for patches in (named["x_norm_patchtokens"], projected):
        torch.testing.assert_close(patches, expected.patches, atol=1e-5, rtol=1e-5)
    for verb in (model.stream, model.scan):
        with pytest.raises(InputError, match=r"^this model's weights are not in memory[^\n]*$"):
            verb(images[:1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_dino_names(variant: str) -> None:
    model = small(**VARIANTS[variant])
    patch = model.patch_size
    images = torch.randn(2, 3, 2 * patch, 5 * patch)
    out, features = model(images), model.forward_features(images)
    assert torch.equal(features["x_norm_clstoken"], out.cls)
    assert torch.equal(features["x_norm_patchtokens"], out.patches)
    assert torch.equal(features["x_storage_tokens"], out.cores[:, 1:])
    assert features["x_prenorm"].shape == (2, 16 + 10, 48)
    layers = model.get_intermediate_layers(images, n=[0, 2], return_class_token=True, return_extra_tokens=True)
    assert [tensor.shape for tensor in layers[0]] == [(2, 10, 48), (2, 48), (2, 15, 48)]
    (last,) = model.get_intermediate_layers(images)
    torch.testing.assert_close(model.project(last), out.patches)
    (raw,) = model.get_intermediate_layers(images, norm=False)
    assert torch.equal(raw, features["x_prenorm"][:, 16:])
    (grid,) = model.get_intermediate_layers(images, reshape=True)
    assert torch.equal(grid[:, :, 1, 3], last[:, 1 * 5 + 3])
    with pytest.raises(ValueError, match="between 0 and 2"):
        model.get_intermediate_layers(images, n=4)
    assert (model.embed_dim, model.patch_size, model.depth, model.num_prefix_tokens) == (48, patch, 3, 16)
    assert model.num_features == out.cls.shape[-1]


@pytest.mark.parametrize("attention", ["core", "dense"])
def test_attention_maps_explain_the_block(attention: str) -> None:
    """The maps times the values, projected, are what the attention layer adds."""
    model, images = small(attention=attention), torch.randn(2, 3, 32, 48)
    out = model(images, cores=4, return_attention=True)
    assert out.attention is not None
    assert len(out.attention) == 3
    assert model(images, cores=4).attention is None
    maps = out.attention[0]
    assert maps.cores.shape == (2, 2, 4, 4 + 6)
    assert maps.patches.shape == (2, 2, 6, 4 if attention == "core" else 4 + 6)
    torch.testing.assert_close(maps.cores.sum(-1), torch.ones(2, 2, 4))
    block = model.blocks[0]
    tokens = model.bank(4, 2)[0]
    x = torch.cat((tokens, model.embed(images)[0]), 1)
    v = block.attn.v_proj(block.norm_attn(x)).unflatten(-1, (2, -1)).transpose(1, 2)
    readable = v if attention == "dense" else v[:, :, :4]
    mixed = torch.cat((maps.cores @ v, maps.patches @ readable), 2).transpose(1, 2).flatten(2)
    x = x + block.attn.out_proj(mixed)
    expected = x + block.mlp(block.norm_mlp(x))
    torch.testing.assert_close(model.forward_layers(images, 4).tokens[0], expected, atol=1e-4, rtol=1e-4)


def test_forced_patches_enter_every_block() -> None:
    model, images = small(), torch.randn(1, 3, 32, 32)
    free = model.forward_layers(images, 4)
    inputs = [model.embed(images)[0], *(tokens[:, 4:] for tokens in free.tokens[:-1])]
    forced = model.forward_layers(images, 4, forced_patches=inputs)
    for a, b in zip(free.tokens, forced.tokens, strict=True):
        torch.testing.assert_close(a, b)
    inputs[1] = inputs[1] + 1
    other = model.forward_layers(images, 4, forced_patches=inputs)
    torch.testing.assert_close(other.tokens[0], free.tokens[0])
    assert not torch.allclose(other.tokens[1], free.tokens[1])


def test_dense_arm_has_the_same_parameters() -> None:
    core, dense = small(), small(attention="dense")
    assert {n: p.shape for n, p in core.named_parameters()} == {n: p.shape for n, p in dense.named_parameters()}


def test_initialisation() -> None:
    model = veca.create_model("veca_tiny")
    for name, parameter in model.named_parameters():
        if name.endswith("alpha"):
            assert (parameter == 0.01).all()
        elif name.endswith("bias"):
            assert (parameter == 0).all()
        elif "norm" in name:
            assert (parameter == 1).all()
        elif name == "bank.tokens":
            assert abs(parameter.std() * 192**0.5 - 1) < 0.05
        elif name != "bank.states" and parameter.numel() > 1000:
            assert abs(parameter.std() - 0.02) < 0.002
    points = model.bank.states.tanh()
    assert points.abs().max() <= 0.951
    assert points[0].norm() < 0.06
    # Farthest-point order: each new point is at least as far from the earlier ones as the next will be.
    gaps = [(points[:i] - points[i]).norm(dim=-1).min() for i in range(1, len(points))]
    assert all(a >= b - 1e-5 for a, b in pairwise(gaps))
    assert min(gaps) > 0.15


@pytest.mark.parametrize("name", MODELS)
def test_every_size_by_name(name: str) -> None:
    with torch.device("meta"):
        model = veca.create_model(name, bank=32)
    assert model.config.bank == 32
    assert name in veca.list_models()
    out = model(torch.empty(2, 3, 224, 160, device="meta"), cores=8)
    assert out.patches.shape == (2, 140, model.embed_dim)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"heads": 5}, "multiple of 4 × heads"),
        ({"depth": 0}, "depth must be a whole number"),
        ({"bank": 10**9}, "bank must be a whole number from 1 to 4096"),
        ({"mlp_ratio": "4"}, "mlp_ratio must be a number"),
        ({"attention": "sparse"}, "one of"),
        ({"positions": "none"}, "'rope' or 'table'"),
        ({"depht": 3}, "no setting depht"),
    ],
)
def test_wrong_settings_are_named(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        veca.create_model("veca_tiny", **overrides)


def test_unknown_size_is_named() -> None:
    with pytest.raises(ValueError, match=r"veca_huge.*veca_base"):
        veca.create_model("veca_huge")
