from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from shutil import copy

import numpy as np
import pytest
import torch
from PIL import Image

from veca import InputError
from veca.analysis import core_metrics as measure
from veca.analysis.metrics import find_examples, mean_of, measure_models, patch_labels, summary
from veca.analysis.photos import Photo
from veca.backbones import Backbone

from .conftest import SMALL, lively


def test_effective_rank_counts_directions() -> None:
    assert measure.effective_rank(torch.eye(6)) == pytest.approx(6)
    assert measure.effective_rank(torch.ones(6, 4)) == pytest.approx(1)
    pairs = torch.eye(8)[:3].repeat(2, 1)  # six rows, three directions
    assert measure.effective_rank(pairs) == pytest.approx(3)


def test_mean_cosine_of_planted_rows() -> None:
    assert measure.mean_cosine(torch.eye(5)) == pytest.approx(0)
    assert measure.mean_cosine(torch.tensor([[1.0, 0], [3, 0], [0, 2]])) == pytest.approx(1 / 3)
    assert measure.mean_cosine(torch.ones(1, 3)) == 1


def test_agreement_is_correlation() -> None:
    maps, others = torch.rand(2, 3, 40)
    expected = np.mean([np.corrcoef(a, b)[0, 1] for a, b in zip(maps.numpy(), others.numpy(), strict=True)])
    assert measure.agreement(maps, others) == pytest.approx(expected, abs=1e-6)
    assert measure.agreement(maps, 3 * maps + 1) == pytest.approx(1)
    assert measure.agreement(torch.ones(2, 9), torch.rand(2, 9)) == pytest.approx(0)


def test_flip_and_window_move_patches() -> None:
    maps = torch.arange(12.0)[None]  # a 3×4 grid
    assert measure.flipped(maps, (3, 4))[0, :4].tolist() == [3, 2, 1, 0]
    assert measure.window(maps, (3, 4), (1, 1, 3, 3)).tolist() == [[5, 6, 9, 10]]
    assert measure.resized(maps, (3, 4), (3, 2))[0].tolist() == [0.5, 2.5, 4.5, 6.5, 8.5, 10.5]
    assert measure.resized(torch.ones(2, 12), (3, 4), (6, 8)).tolist() == torch.ones(2, 48).tolist()


def test_a_core_on_a_region_has_iou_one() -> None:
    regions = torch.zeros(2, 16, dtype=torch.bool)
    regions[0, :4], regions[1, 8:14] = True, True
    maps = torch.rand(3, 16) * 0.1
    maps[1, :4] += 1  # matches the first region
    maps[2, 11:16] += 1  # 11, 12, 13 of the second; its sixth patch lies anywhere
    found = measure.best_iou(maps, regions)
    assert found[0] == 1
    assert 3 / 9 <= found[1] <= 4 / 8


def test_purity_of_a_perfect_and_a_single_group() -> None:
    labels = torch.tensor([0, 0, 0, 1, 1, 2, -1])
    perfect = torch.nn.functional.one_hot(labels.clamp_min(0), 3).T.float()
    assert measure.purity(perfect, labels) == 1
    assert measure.purity(torch.ones(1, 7), labels) == pytest.approx(3 / 6)
    assert math.isnan(measure.purity(torch.ones(1, 2), torch.tensor([-1, -1])))


def bump(grid: tuple[int, int], x: float, y: float, wide: float, high: float) -> torch.Tensor:
    plane = measure.patch_plane(grid)
    return torch.exp(-0.5 * (((plane[:, 0] - x) / wide) ** 2 + ((plane[:, 1] - y) / high) ** 2))


def test_round_maps_are_isotropic_and_long_ones_are_not() -> None:
    grid = (40, 60)
    isotropy, spread = measure.shape_of_maps(bump(grid, 0.7, 0.5, 0.08, 0.08)[None], grid)
    assert isotropy == pytest.approx(1, abs=0.02)
    assert 0.08 < spread < 0.08 * 2**0.5  # the part above the mean is a little narrower than the whole
    flat, _ = measure.shape_of_maps(bump(grid, 0.7, 0.5, 0.16, 0.04)[None], grid)
    assert flat == pytest.approx(0.25, abs=0.05)


def test_locality_finds_a_planted_decay() -> None:
    """Random Fourier features of a Gaussian kernel: cosine falls as exp(−d²/2s²), to half at 1.177 s."""
    grid, scale = (32, 32), 0.15
    plane = measure.patch_plane(grid)
    angles = plane @ (torch.randn(2, 600) / scale)
    patches = torch.cat((angles.cos(), angles.sin()), dim=-1)
    total, count = measure.similarity_by_distance(patches, grid)
    assert measure.half_distance(total / count) == pytest.approx(1.1774 * scale, abs=0.03)


def test_half_distance_of_what_does_not_fall() -> None:
    assert math.isnan(measure.half_distance(torch.ones(measure.BINS)))
    assert math.isnan(measure.half_distance(torch.linspace(0, 1, measure.BINS)))


def test_a_path_is_measured_in_image_sides() -> None:
    still, walk = torch.zeros(3, 2), torch.tensor([[0.0, 0.0], [0.6, 0.8], [0.6, -0.8]])  # L×2: 1, then 1.6 of 2 a side
    assert measure.path_length(torch.stack((still, walk), dim=1)) == pytest.approx((0 + 2.6 / 2) / 2)


def test_cores_part_by_their_distance_from_the_mean_place() -> None:
    same, apart = torch.tensor([[0.5, 0.5], [0.5, 0.5]]), torch.tensor([[-0.3, 0.0], [0.3, 0.0]])  # P×2
    assert measure.parting(torch.stack((same, apart), dim=1)) == pytest.approx((0 + 0.3 / 2) / 2)


def test_labels_of_patches_are_the_commonest() -> None:
    mask = np.zeros((40, 40), np.uint8)
    mask[:20, :20], mask[20:, 22:] = 7, 255
    assert patch_labels(Image.fromarray(mask), (2, 2)).tolist() == [7, 0, 0, -1]


def test_means_skip_what_is_missing() -> None:
    rows = [{"a": [1.0, 2.0], "b": math.nan}, {"a": [3.0, math.nan]}, {"a": [5.0, 4.0], "c": 1.0}]
    assert mean_of(rows) == {"a": [3, 3], "b": None, "c": 1}


@pytest.fixture
def labelled(tmp_path: Path, photo: Photo) -> Path:
    for folder in ("images", "masks"):
        (tmp_path / "val" / folder).mkdir(parents=True)
    for index in range(3):
        photo.image.rotate(90 * index, expand=True).save(tmp_path / f"val/images/{index}.png")
        mask = np.zeros((64, 96), np.uint8)
        mask[16:48, 64:88] = 5
        Image.fromarray(mask).rotate(90 * index, expand=True).save(tmp_path / f"val/masks/{index}.png")
    return tmp_path


def test_all_numbers_of_a_model_and_its_dense_control(labelled: Path, backbone: Backbone) -> None:
    control = Backbone("control", lively(dataclasses.replace(SMALL, attention="dense")))
    core, dense = measure_models([backbone, control], labelled, size=96, limit=3)
    json.dumps([core, dense], allow_nan=False)
    assert (core["attention"], dense["attention"]) == ("core", "dense")
    assert core["photos"] == 3
    assert list(core["redundancy"]["by_budget"]) == ["8", "16"]
    for row in core["redundancy"]["by_budget"].values():
        assert -1 <= row["mean_cosine"] <= 1
    assert 1 <= core["redundancy"]["by_budget"]["8"]["effective_rank"] <= 8
    assert set(core["stability"]) == {"flip", "crop", "scale", "other_photo"}
    for kind in ("reads", "read_by"):
        assert len(core["isotropy"][kind]) == SMALL.depth
        for values in core["stability"].values():
            assert len(values[kind]) == SMALL.depth
            assert all(-1 <= value <= 1.0001 for value in values[kind])
        regions = core["regions"][kind]
        assert all(0 < value <= 1 for value in regions["best_iou"] + regions["purity"])
        assert min(regions["purity"]) >= core["regions"]["one_region_purity"] - 1e-6  # cores only refine one region
    assert core["movement"]["path_length"] > 0
    assert core["movement"]["parting"] > 0
    assert core["locality"]["cosine"] != dense["locality"]["cosine"]
    assert any("regions" in name for name, _ in summary(core))


def test_equal_photos_have_equal_maps(labelled: Path, backbone: Backbone) -> None:
    """The stability under another photo is 1 where that photo is the same one."""
    for name in ("images", "masks"):
        copy(labelled / f"val/{name}/0.png", labelled / f"val/{name}/1.png")
    (result,) = measure_models([backbone], labelled, size=96, limit=2)
    assert result["stability"]["other_photo"]["reads"] == pytest.approx([1, 1, 1])
    assert result["movement"]["parting"] == 0


def test_photos_without_masks_have_no_regions(tmp_path: Path, photo: Photo, backbone: Backbone) -> None:
    photo.image.save(tmp_path / "a.png")
    (result,) = measure_models([backbone], tmp_path, size=64, limit=5)
    assert "regions" not in result
    assert "other_photo" not in result["stability"]


def test_examples_are_spread_and_missing_folders_named(labelled: Path) -> None:
    assert [path.stem for path, _ in find_examples(labelled, 2)] == ["0", "1"]
    assert all(mask is not None for _, mask in find_examples(labelled, 9))
    with pytest.raises(InputError, match="not a folder"):
        find_examples(labelled / "nowhere", 2)
