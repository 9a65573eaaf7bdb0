"""The registered models in timm's own hands. CI has no timm: tools/timm_tests.py runs this where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

import veca

pytest.importorskip("timm", reason="timm needs torchvision, which does not fit beside PyTorch's CPU build")

import timm
import timm.data
import timm.optim

import veca.integrations.timm
from veca.integrations.timm_model import TimmVeca

SHAPE = {"depth": 2, "width": 64, "heads": 4, "bank": 8}


def test_every_size_and_every_bundled_model_is_registered() -> None:
    bundled = [name.replace("-", "_") for name in veca.bundled_models()]
    assert set(timm.list_models("veca_*")) == {*veca.list_models(), *bundled}
    assert set(timm.list_models("veca_*", pretrained=True)) == set(bundled)


def test_bundled_weights(photo: Image.Image) -> None:
    """timm's own preparation of an image, then the same numbers as `veca.load`."""
    model, plain = timm.create_model("veca_s14", pretrained=True, cores=16).eval(), veca.load("veca-s14")
    data = timm.data.resolve_model_data_config(model)
    assert (data["input_size"], data["interpolation"]) == ((3, 448, 448), "bicubic")
    images = timm.data.create_transform(**{**data, "input_size": (3, 112, 112)})(photo)[None]
    assert images.shape == (1, 3, 112, 112)
    with torch.inference_mode():
        torch.testing.assert_close(model(images), plain(images, cores=16).cls)
        grey = timm.create_model("veca_s14", pretrained=True, in_chans=1).eval()
        one = images[:, :1]  # timm sums the weights of the channels
        torch.testing.assert_close(grey(one), plain(one.expand(-1, 3, -1, -1)).cls, atol=1e-4, rtol=1e-4)
        six = timm.create_model("veca_s14", pretrained=True, in_chans=6, num_classes=3, img_size=100).eval()
        assert timm.models.get_model_input_config(six)["input_size"] == (6, 100, 100)
        assert six(torch.randn(1, 6, 100, 100)).shape == (1, 3)


def test_weights_of_a_folder(tmp_path: Path) -> None:
    plain = veca.create_model("veca_tiny").eval()
    plain.save(tmp_path)
    images = torch.randn(1, 3, 64, 64)
    overlay = {"file": str(tmp_path / "model.safetensors")}
    model = timm.create_model("veca_tiny", pretrained=True, pretrained_cfg_overlay=overlay, num_classes=0).eval()
    torch.testing.assert_close(model(images), plain(images).cls)
    model = timm.create_model("veca_tiny", checkpoint_path=str(tmp_path / "model.safetensors")).eval()
    torch.testing.assert_close(model(images), plain(images).cls)


def test_feature_maps() -> None:
    model = timm.create_model("veca_tiny", features_only=True, out_indices=(0, -1), **SHAPE).eval()
    assert (model.feature_info.channels(), model.feature_info.reduction()) == ([64, 64], [16, 16])
    assert [tuple(one.shape) for one in model(torch.randn(1, 3, 40, 64))] == [(1, 64, 3, 4)] * 2
    trained, images = (
        timm.create_model("veca_s14", pretrained=True, features_only=True).eval(),
        torch.randn(1, 3, 56, 70),
    )
    expected = veca.load("veca-s14").get_intermediate_layers(images, n=4, reshape=True, norm=False)
    torch.testing.assert_close(tuple(trained(images)), expected)


@pytest.mark.parametrize("pool", ["token", "avg", "max", "avgmax"])
def test_training(pool: str) -> None:
    """Layer-wise rates, checkpointing, head dropout: a few steps learn three images by heart."""
    model = timm.create_model("veca_tiny", num_classes=3, global_pool=pool, drop_rate=0.1, cores=4, **SHAPE)
    assert isinstance(model, TimmVeca)
    model.set_grad_checkpointing()
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=3e-3, weight_decay=0.05, layer_decay=0.7)
    scales = sorted({group["lr_scale"] for group in optimizer.param_groups})
    assert scales == pytest.approx([0.7**power for power in range(len(scales))][::-1])
    assert len(scales) >= 3  # the stem, the two blocks, the head
    images, labels = torch.randn(3, 3, 32, 32), torch.arange(3)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert (model.eval()(images).argmax(1) == labels).all()


def test_arguments_that_are_not_there() -> None:
    with pytest.raises(ValueError, match="VECA has no drop_path_rate"):
        timm.create_model("veca_tiny", drop_path_rate=0.1)
