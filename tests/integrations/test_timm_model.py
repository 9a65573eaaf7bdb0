"""timm's methods, without timm."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

import veca
from veca.config import MODELS, VecaConfig
from veca.integrations.timm_model import TimmVeca, backbone_tensors, pretrained_cfg

CONFIG = VecaConfig(depth=3, width=64, heads=4, bank=8)


@pytest.fixture
def model() -> TimmVeca:
    return TimmVeca(CONFIG, num_classes=5, cores=4).eval()


@pytest.fixture
def same(model: TimmVeca) -> veca.Veca:
    """The plain model with the same weights."""
    plain = veca.Veca(CONFIG).eval()
    plain.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if not name.startswith("head.")})
    return plain


def test_features_and_head(model: TimmVeca, same: veca.Veca, images: torch.Tensor) -> None:
    out = same(images, cores=4)
    tokens = model.forward_features(images)
    torch.testing.assert_close(tokens, torch.cat((out.cores, out.patches), 1))
    torch.testing.assert_close(model.forward_head(tokens, pre_logits=True), out.cls)
    torch.testing.assert_close(model(images), model.get_classifier()(out.cls))
    model.reset_classifier(7, "avg")
    assert model(images).shape == (2, 7)
    torch.testing.assert_close(model.forward_head(tokens, pre_logits=True), out.patches.mean(1))
    model.reset_classifier(0)
    torch.testing.assert_close(model(images), out.patches.mean(1))
    model.reset_classifier(0, "")
    torch.testing.assert_close(model(images), tokens)
    assert model.num_classes == 0
    model.reset_classifier(0, "max")
    torch.testing.assert_close(model(images), out.patches.max(1).values)
    model.reset_classifier(0, "avgmax")
    torch.testing.assert_close(model(images), (out.patches.mean(1) + out.patches.max(1).values) / 2)
    with pytest.raises(ValueError, match="global_pool"):
        model.reset_classifier(0, "map")


@pytest.mark.parametrize(("indices", "blocks"), [(None, [0, 1, 2]), (2, [1, 2]), ([0, 2], [0, 2]), ((-1,), [2])])
def test_intermediates(
    model: TimmVeca, same: veca.Veca, images: torch.Tensor, indices: object, blocks: list[int]
) -> None:
    expected = same.get_intermediate_layers(images, n=blocks, reshape=True, norm=True, cores=4)
    final, found = model.forward_intermediates(images, indices, norm=True)  # type: ignore[arg-type]
    torch.testing.assert_close(tuple(found), expected)
    torch.testing.assert_close(final, model.forward_features(images))
    raw = same.forward_layers(images, 4).tokens[blocks[-1]]
    pair = model.forward_intermediates(
        images,
        indices,
        return_prefix_tokens=True,
        output_fmt="NLC",
        intermediates_only=True,  # type: ignore[arg-type]
    )[-1]
    torch.testing.assert_close(torch.cat((pair[1], pair[0]), 1), raw)
    named = model.forward_intermediates(images, indices, return_prefix_tokens=True, norm=True, output_dict=True)  # type: ignore[arg-type]
    assert set(named) == {"image_features", "image_intermediates", "image_intermediates_prefix"}
    torch.testing.assert_close(named["image_features"], final)
    torch.testing.assert_close(named["image_intermediates"], found)
    torch.testing.assert_close(named["image_intermediates_prefix"][-1], same.norm(raw)[:, :4])
    alone = model.forward_intermediates(images, indices, intermediates_only=True, output_dict=True)  # type: ignore[arg-type]
    assert set(alone) == {"image_intermediates"}


def test_intermediates_refuse_what_is_not_there(model: TimmVeca, images: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="between 0 and 2"):
        model.forward_intermediates(images, [3])
    with pytest.raises(ValueError, match="NCHW or NLC"):
        model.forward_intermediates(images, output_fmt="NHWC")


def test_feature_info_and_pruning(model: TimmVeca, images: torch.Tensor) -> None:
    assert [info["module"] for info in model.feature_info] == ["blocks.0", "blocks.1", "blocks.2"]
    assert {(info["num_chs"], info["reduction"]) for info in model.feature_info} == {(64, 16)}
    assert all(dict(model.named_modules())[info["module"]] is not None for info in model.feature_info)
    before = model.forward_intermediates(images, [0, 1], intermediates_only=True)
    assert model.prune_intermediate_layers([0, 1], prune_norm=True) == [0, 1]
    assert len(model.blocks) == 2
    torch.testing.assert_close(model.forward_intermediates(images, [0, 1], intermediates_only=True), before)
    with torch.inference_mode():  # the fast pass
        torch.testing.assert_close(
            model.forward_intermediates(images, [0, 1], intermediates_only=True), before, atol=1e-4, rtol=1e-4
        )


def test_every_parameter_is_in_a_group(model: TimmVeca) -> None:
    groups = model.group_matcher()
    patterns = [groups["stem"], *(pattern for pattern, _ in groups["blocks"])]
    for name, _ in model.named_parameters():
        matches = sum(bool(re.match(pattern, name)) for pattern in patterns)
        assert matches == (0 if name.startswith("head.") else 1), name
    assert re.match(groups["blocks"][0][0], "blocks.2.fc1.weight")[1] == "2"  # type: ignore[index]
    known = {name for name, _ in TimmVeca(VecaConfig(depth=2, positions="table")).named_parameters()}
    assert model.no_weight_decay() <= known


def test_grad_checkpointing_gives_the_same_gradients(model: TimmVeca, images: torch.Tensor) -> None:
    gradients = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        model(images).square().sum().backward()
        gradients.append([one.grad.clone() for one in model.parameters() if one.grad is not None])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_construction(images: torch.Tensor) -> None:
    model = TimmVeca(CONFIG, num_classes=2, img_size=224, drop_rate=0.5, depth=1, in_chans=3)
    assert (model.config.depth, model.num_prefix_tokens, model.head_hidden_size) == (1, 8, 64)
    assert model.training
    assert not torch.equal(model(images), model(images))  # dropout, and the jitter of positions
    with pytest.raises(ValueError, match="VECA has no drop_path_rate"):
        TimmVeca(CONFIG, drop_path_rate=0.1)
    half = TimmVeca(CONFIG, drop_path_rate=0.0, dtype=torch.bfloat16)
    half.reset_classifier(3)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    model.set_input_size((64, 80))  # any size is served
    assert model(torch.zeros(1, 3, 64, 80)).shape == (1, 2)
    with pytest.raises(ValueError, match="16 pixels wide"):
        model.set_input_size(patch_size=8)


@pytest.mark.parametrize("channels", [1, 5])
def test_any_number_of_channels(channels: int) -> None:
    """One channel that counts three times is a grey RGB image."""
    model, plain = TimmVeca(CONFIG, in_chans=channels).eval(), veca.Veca(CONFIG).eval()
    assert model.in_chans == channels
    weight = model.patch_embed.proj.weight
    assert weight.shape == (64, channels, 16, 16)
    assert 0.01 < float(weight.std()) < 0.03
    tensors = plain.state_dict()
    summed = tensors["patch_embed.proj.weight"].sum(1, keepdim=True)
    tensors["patch_embed.proj.weight"] = torch.cat((summed, torch.zeros(64, channels - 1, 16, 16)), 1)
    model.load_state_dict(tensors)
    grey = torch.randn(2, channels, 32, 48)
    for context in (torch.enable_grad, torch.inference_mode):  # both paths of the forward pass
        with context():
            torch.testing.assert_close(model(grey), plain(grey[:, :1].expand(-1, 3, -1, -1)).cls, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match=f"B×{channels}×H×W"):
        model(torch.randn(2, 3, 32, 48))


@pytest.mark.parametrize("size", [(17, 33), (48, 50), (1, 1)])
def test_any_size_is_padded_to_whole_patches(model: TimmVeca, size: tuple[int, int]) -> None:
    images = torch.randn(2, 3, *size)
    height, width = (-(-side // 16) * 16 for side in size)
    padded = torch.zeros(2, 3, height, width)
    padded[:, :, : size[0], : size[1]] = images
    torch.testing.assert_close(model.forward_features(images), model.forward_features(padded))
    final, maps = model.forward_intermediates(images)
    assert {tuple(one.shape) for one in maps} == {(2, 64, height // 16, width // 16)}
    torch.testing.assert_close(final, model.forward_features(padded))
    strict = TimmVeca(CONFIG, dynamic_img_pad=False, dynamic_img_size=True, img_size=448)
    with pytest.raises(ValueError, match="multiples of the patch size"):
        strict(images)
    assert strict(padded).shape == (2, 64)


def test_tracing(model: TimmVeca, images: torch.Tensor) -> None:
    """What stands in for TorchScript's compiler and fx, which read the Python source."""
    expected = model(images)
    with torch.no_grad():
        traced = torch.jit.trace(model, images)
    torch.testing.assert_close(traced(images), expected, atol=1e-5, rtol=1e-4)
    exported = torch.export.export(model, (images,)).module()
    torch.testing.assert_close(exported(images), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_pretrained_cfg(name: str) -> None:
    cfg = pretrained_cfg(MODELS[name], "weights.safetensors")
    assert cfg["input_size"] == (3, 448, 448)
    assert cfg["pool_size"] == (28, 28)
    assert cfg["crop_pct"] == pytest.approx(256 / 288)
    assert cfg["first_conv"] == "patch_embed.proj"
    assert cfg["file"] == "weights.safetensors"


def test_weights_of_a_model_folder_fit(model: TimmVeca, same: veca.Veca, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    same.save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for given in (tensors, {f"veca.{name}": tensor.half() for name, tensor in tensors.items()}):
        bare = TimmVeca(CONFIG)
        bare.load_state_dict(backbone_tensors(given, bare), strict=True)


def test_registering_needs_timm() -> None:
    if importlib.util.find_spec("timm") is not None:
        pytest.skip("timm is installed here")
    with pytest.raises(ImportError, match="pip install timm"):
        importlib.import_module("veca.integrations.timm")
