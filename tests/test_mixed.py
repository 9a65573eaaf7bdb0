"""Mixed scale: what the trees cover, and the pass over them against the ordinary one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_streaming import SLOW, VARIANTS, same, small
from torch import Tensor
from torch.nn.functional import avg_pool2d

from veca import fused
from veca.errors import InputError
from veca.analysis.contributions import contributions
from veca.mixed import Cells, choose_cells, detail, level_grids, tokens_of
from veca.model import Veca

pytestmark = pytest.mark.usefixtures("one_thread")
TENSORS = ("cls", "patches", "cores", "coords")
GRIDS = st.tuples(st.integers(1, 13), st.integers(1, 13))


def uniform(batch: int, grid: tuple[int, int], scale: int) -> Cells:
    """All cells of one scale."""
    counts = [h * w for h, w in level_grids(grid)]
    numbers = torch.arange(counts[scale]) + sum(counts[:scale])
    return Cells(numbers.expand(batch, -1), grid)


def images_of(model: Veca, batch: int, grid: tuple[int, int]) -> Tensor:
    """Smooth here and rough there, and not alike."""
    p = model.patch_size
    rough = torch.rand(batch, 1, *grid).repeat_interleave(p, 2).repeat_interleave(p, 3)
    return torch.randn(batch, 3, grid[0] * p, grid[1] * p) * rough


# Trees


@SLOW
@given(grid=GRIDS, share=st.floats(0.01, 1), batch=st.integers(1, 3), flat=st.booleans())
def test_cells_cover_every_patch_once(grid: tuple[int, int], share: float, batch: int, flat: bool) -> None:
    images = (
        torch.zeros(batch, 3, grid[0] * 4, grid[1] * 4) if flat else torch.randn(batch, 3, grid[0] * 4, grid[1] * 4)
    )
    cells = choose_cells(images, 4, share)
    for places in cells.places:
        covered = torch.zeros(grid, dtype=torch.int)
        for x, y, side in places.tolist():
            assert side in (1, 2, 4)
            assert x % side == y % side == 0
            assert x + side <= grid[1]
            assert y + side <= grid[0]
            covered[y : y + side, x : x + side] += 1
        assert (covered == 1).all()
    count, wanted = cells.numbers.shape[1], round(share * grid[0] * grid[1])
    (h, w), *coarser = level_grids(grid)
    fewest = h * w - 3 * sum(a * b for a, b in coarser)
    assert count == fewest if wanted <= fewest else wanted - 3 < count <= wanted
    assert count == tokens_of(grid, share)


def test_what_is_spent_is_said() -> None:
    """Where the least that a grid can do with is more than was asked for, the cells tell."""
    assert tokens_of((9, 5), 0.01) == 15
    assert choose_cells(torch.zeros(1, 3, 9 * 4, 5 * 4), 4, 0.01).numbers.shape == (1, 15)
    assert tokens_of((8, 8), 0.01) == 4


def test_detail_decides() -> None:
    """A rough corner is cut finely, the rest as coarsely as can be; no other cells would gain more."""
    images = torch.zeros(2, 3, 16 * 4, 16 * 4)
    images[0, :, :16, 16:32] = torch.randn(3, 16, 16)
    images[1, :, 40:44, 40:44] = torch.randn(3, 4, 4)
    places = choose_cells(images, 4, 31 / 256).places
    fine = [{tuple(place[:2]) for place in one.tolist() if place[2] == 1} for one in places]
    assert fine[0] == {(x, y) for x in range(4, 8) for y in range(4)}
    assert {(10, 10), (10, 11), (11, 10), (11, 11)} <= fine[1]
    small, large = detail(images, 4)
    assert small.shape == (2, 8, 8)
    assert large.shape == (2, 4, 4)
    assert ((large[0] > 0).nonzero() == torch.tensor([[0, 1]])).all()


def test_the_gain_of_a_large_cell_includes_its_parts() -> None:
    """Nothing is lost from 4 to 2 patches, much from 2 to 1: a check pattern must not hide behind its mean."""
    images = torch.zeros(1, 3, 32, 32)
    images[..., 16:, 16:] = (torch.arange(16) % 2 * 2.0 - 1) * (torch.arange(16)[:, None] % 2 * 2.0 - 1)
    places = choose_cells(images, 4, 19 / 64).places[0]
    assert {tuple(place) for place in places.tolist() if place[2] == 1} == {
        (x, y, 1) for x in range(4, 8) for y in range(4, 8)
    }


# The pass


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("scale", [0, 1, 2])
def test_a_uniform_tree_is_the_reduced_image(variant: str, scale: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, grid = small(**VARIANTS[variant]), (8, 12)
    images = images_of(model, 2, grid)
    expected = model(avg_pool2d(images, 2**scale), cores=6)
    cells = uniform(2, grid, scale)
    monkeypatch.setattr("veca.model.choose_cells", lambda *_: cells)
    found = model(images, cores=6, patches=0.5)
    for name in ("cls", "cores", "coords"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), atol=1e-4, rtol=0)
    layers = model.forward_layers(images, 6, cells=cells, last_only=True)
    torch.testing.assert_close(model.output(layers.patches[-1]), expected.patches, atol=1e-4, rtol=0)
    assert found.grid == layers.grid == grid
    assert found.patches.shape[1] == 96


@SLOW
@given(
    variant=st.sampled_from(sorted(VARIANTS)),
    grid=GRIDS,
    batch=st.integers(1, 3),
    share=st.floats(0.05, 0.99),
    piece=st.integers(1, 90),
)
def test_the_fast_pass_and_images_one_by_one(
    variant: str, grid: tuple[int, int], batch: int, share: float, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small(**VARIANTS[variant])
    images = images_of(model, batch, grid)
    expected = model(images, cores=7, patches=share)
    expected = expected._replace(**{n: getattr(expected, n).detach() for n in TENSORS})
    assert expected.grid == grid
    assert expected.patches.shape[:2] == (batch, grid[0] * grid[1])
    monkeypatch.setattr(fused, "piece_size", lambda block, dtype: piece)
    with torch.inference_mode():
        whole = model(images, cores=7, patches=share)
        same(whole, expected)
        for number, image in enumerate(images):
            one = model(image[None], cores=7, patches=share)
            same(one, expected._replace(**{name: getattr(expected, name)[number, None] for name in TENSORS}))
            if tokens_of(grid, share) < grid[0] * grid[1]:
                assert torch.equal(one.cells.numbers[0], whole.cells.numbers[number])


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_patches_are_the_ordinary_pass(variant: str) -> None:
    model = small(**VARIANTS[variant])
    images = images_of(model, 2, (5, 6))
    with torch.inference_mode():
        ordinary, all_of_them = model(images, cores=4), model(images, cores=4, patches=1)
    assert all_of_them.cells is None
    assert all(torch.equal(getattr(ordinary, name), getattr(all_of_them, name)) for name in TENSORS)


@pytest.mark.parametrize("grid", [(5, 6), (1, 1), (1, 9)])
def test_a_share_that_merges_nothing_is_the_ordinary_pass(grid: tuple[int, int]) -> None:
    model = small()
    images = images_of(model, 2, grid)
    with torch.inference_mode():
        ordinary, nearly = model(images, cores=4), model(images, cores=4, patches=0.999)
    assert nearly.cells is None
    assert all(torch.equal(getattr(ordinary, name), getattr(nearly, name)) for name in TENSORS)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("gradients", [False, True])
def test_every_image_its_own_share(variant: str, gradients: bool) -> None:
    model, shares = small(**VARIANTS[variant]), [0.5, 0.2, 1, 0.501, 0.2, 0.9]
    images = images_of(model, 6, (9, 8))
    with torch.inference_mode(not gradients):
        found = model(images, cores=5, patches=shares)
        assert isinstance(found.cells, list)
        assert found.cells[2] is None
        for number, share in enumerate(shares):
            one = model(images[number, None], cores=5, patches=share)
            same(found._replace(**{name: getattr(found, name)[number, None] for name in TENSORS}), one)
            assert one.grid == found.grid
            if one.cells is not None:
                assert torch.equal(found.cells[number].numbers, one.cells.numbers)  # type: ignore[union-attr]
    counts = [None if cells is None else cells.numbers.shape[1] for cells in found.cells]
    assert counts == [36, 12, None, 36, 12, 63]


@pytest.mark.parametrize("shares", [[], [0.5], [0.5, 0.5, 0.5]])
def test_shares_that_do_not_fit_the_images_are_refused(shares: list[float]) -> None:
    with pytest.raises(InputError, match=rf"^patches must be one share, .* 2 images, not {len(shares)}$"):
        small()(torch.zeros(2, 3, 32, 32), patches=shares)


@pytest.mark.parametrize("patches", [0.5, [0.5]])
def test_attention_over_cells_is_refused(patches: float | list[float]) -> None:
    model = small()
    with pytest.raises(InputError, match="^attention is shown over all patches of the grid"):
        model(images_of(model, 1, (8, 8)), patches=patches, return_attention=True)


def test_contributions_of_cells_turn_by_their_centres() -> None:
    """Of a uniform tree those of the reduced image."""
    model = small()
    assert model.config.turns
    images, cells = images_of(model, 1, (8, 12)), uniform(1, (8, 12), 1)
    half = avg_pool2d(images, 2)
    with torch.inference_mode():
        found = contributions(model, images, model.forward_layers(images, 5, cells=cells))
        expected = contributions(model, half, model.forward_layers(half, 5))
        for ours, theirs in zip(found, expected, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


def test_bfloat16() -> None:
    model = small()
    images = images_of(model, 2, (8, 9))
    with torch.inference_mode():
        expected, found = (
            one(images.to(one.norm.weight.dtype), cores=4, patches=0.5) for one in (model, small().bfloat16())
        )
    assert found.patches.dtype == torch.bfloat16
    assert (torch.cosine_similarity(found.patches.float(), expected.patches, dim=-1) > 0.9).float().mean() > 0.9


# The dense output


def test_spreading_keeps_what_was_chosen_and_what_is_constant_or_linear() -> None:
    torch.manual_seed(0)
    images = torch.randn(2, 3, 13 * 4, 15 * 4) * torch.rand(2, 1, 13, 15).repeat_interleave(4, 2).repeat_interleave(
        4, 3
    )
    cells = choose_cells(images, 4, 0.5)
    features = torch.randn(2, cells.numbers.shape[1], 6)
    dense = cells.spread(features).unflatten(1, (13, 15))
    for image in range(2):
        fine = [(number, place) for number, place in enumerate(cells.places[image].tolist()) if place[2] == 1]
        assert fine
        for number, (x, y, _) in fine:
            assert torch.equal(dense[image, y, x], features[image, number])
    torch.testing.assert_close(cells.spread(torch.ones_like(features)), torch.ones(2, 195, 6))
    assert cells.averaged(dense.flatten(1, 2)).shape == features.shape
    ramp = uniform(1, (16, 16), 1)
    column = ramp.places[..., :1].float()
    expected = (torch.arange(16) - 0.5).clamp(0, 14)
    torch.testing.assert_close(ramp.spread(column)[0, :, 0].view(16, 16), expected.expand(16, 16))


@pytest.mark.parametrize("share", [0, -0.5, 1.01, float("nan"), "half", True])
def test_wrong_shares_are_refused(share: object) -> None:
    with pytest.raises(
        InputError, match=r"^patches must be a share above 0 and at most 1 \(all\), or None, not [^\n]*$"
    ):
        small()(torch.zeros(1, 3, 32, 32), patches=share)  # type: ignore[arg-type]
