"""transformers' decoders on a VECA encoder: Depth-Anything and DPT read tokens, a class token before the patches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForDepthEstimation,
    DepthAnythingConfig,
    DepthAnythingForDepthEstimation,
    Dinov2Config,
    DPTConfig,
    DPTForDepthEstimation,
)

import veca
import veca.integrations.transformers as integration

NECK = {"neck_hidden_sizes": [8, 8, 8, 8], "fusion_hidden_size": 8, "reassemble_factors": [4, 2, 1, 0.5]}
MAPS = {"out_indices": [0, 1, 2, 3], "reshape_hidden_states": False}
IMAGES = torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(0))


def depth_anything(encoder: object, width: int) -> DepthAnythingForDepthEstimation:
    config = DepthAnythingConfig(
        backbone_config=encoder, reassemble_hidden_size=width, patch_size=16, head_hidden_size=4, **NECK
    )
    return DepthAnythingForDepthEstimation(config).eval()


def learns(model: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
    """The depth of a forward pass, after a backward pass that reached the encoder through the decoder."""
    depth = model(images).predicted_depth
    depth.square().sum().backward()
    reached = model.backbone.veca.blocks[0].attn.v_proj.weight.grad  # type: ignore[union-attr, index]
    assert reached is not None
    assert reached.isfinite().all()
    return depth


def test_tokens_are_the_first_core_and_then_the_patches(plain: veca.Veca, images: torch.Tensor) -> None:
    backbone = integration.VecaBackbone.from_plain(plain, **MAPS, cores=4)
    expected = plain.get_intermediate_layers(images, n=[2], return_class_token=True, cores=4)[0]
    torch.testing.assert_close(backbone(images).feature_maps[-1], torch.cat((expected[1][:, None], expected[0]), 1))


def test_the_encoder_of_depth_anything_is_swapped(plain: veca.Veca, tmp_path: Path) -> None:
    theirs = Dinov2Config(hidden_size=192, num_hidden_layers=4, num_attention_heads=3, image_size=64, patch_size=16,
                          out_indices=[1, 2, 3, 4], apply_layernorm=True, reshape_hidden_states=False)  # fmt: skip
    whole = depth_anything(theirs, 192)
    before = whole(IMAGES).predicted_depth
    whole.backbone = integration.VecaBackbone.from_plain(plain, **MAPS)
    whole.config.backbone_config = whole.backbone.config
    depth = learns(whole, IMAGES)
    assert depth.shape == before.shape == (2, 64, 96)
    maps = plain.get_intermediate_layers(IMAGES, n=[0, 1, 2], return_class_token=True)
    tokens = [whole.backbone(IMAGES).feature_maps[0]] + [torch.cat((c[:, None], p), 1) for p, c in maps]  # type: ignore[misc]
    torch.testing.assert_close(depth, whole.head(whole.neck(tokens, 4, 6), 4, 6))
    whole.save_pretrained(tmp_path)
    again = AutoModelForDepthEstimation.from_pretrained(tmp_path)
    assert type(again.backbone) is integration.VecaBackbone
    torch.testing.assert_close(again(IMAGES).predicted_depth, depth, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["depth-anything", "dpt"])
def test_a_decoder_from_a_config(kind: str) -> None:
    encoder = integration.VecaConfig(depth=3, width=64, heads=4, bank=8, cores=4, **MAPS)
    if kind == "depth-anything":
        model = depth_anything(encoder, 64)
    else:
        model = DPTForDepthEstimation(DPTConfig(backbone_config=encoder, is_hybrid=False, **NECK)).eval()
    assert learns(model, IMAGES).shape == (2, 64, 96)
