"""Teachers of every family: the right tokens, the student's grid, and clear words when one cannot be had."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModel,
    DeiTConfig,
    DeiTModel,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    DINOv3ViTConfig,
    DINOv3ViTModel,
    ResNetConfig,
    ResNetModel,
    ViTConfig,
    ViTModel,
)

from veca.errors import InputError
from veca.teachers import Teacher, how_to_get, load_teacher

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}


def test_the_real_teacher(shared: Path) -> None:
    folder = shared / "teacher" / "dav2-small-encoder"
    teacher = load_teacher(folder)
    images = torch.randn(3, 3, 42, 56)
    with torch.no_grad():
        expected = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()(images).last_hidden_state
    out = teacher(images, (3, 4), layers=True, micro_batch=2)
    torch.testing.assert_close(out.cls, expected[:, 0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out.patches, expected[:, 1:], atol=1e-4, rtol=1e-4)
    assert out.layers is not None
    assert out.layers.shape == (12, 3, 12, 384)
    norm = teacher.model.layernorm
    torch.testing.assert_close(norm(out.layers[-1]), out.patches, atol=1e-4, rtol=1e-4)
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert not teacher.train().model.training


@pytest.mark.parametrize(
    ("model", "skipped"),
    [
        (lambda: DINOv3ViTModel(DINOv3ViTConfig(**SMALL, num_register_tokens=4)), 5),
        (lambda: DINOv3ViTModel(DINOv3ViTConfig(**SMALL)), 1),
        (lambda: Dinov2WithRegistersModel(Dinov2WithRegistersConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, mlp_ratio=2, patch_size=16, image_size=64)), 5),
        (lambda: ViTModel(ViTConfig(**SMALL, image_size=64), add_pooling_layer=False), 1),
        (lambda: DeiTModel(DeiTConfig(**SMALL, image_size=64), add_pooling_layer=False), 2),
    ],
    ids=["dinov3+registers", "dinov3", "dinov2+registers", "vit", "deit"],
)  # fmt: skip
def test_class_and_patch_tokens_are_told_apart(model: object, skipped: int) -> None:
    teacher = Teacher(model(), "random")  # type: ignore[operator]
    images = torch.randn(2, 3, 48, 32)
    options = {"interpolate_pos_encoding": True} if teacher.resizes else {}
    with torch.no_grad():
        tokens = teacher.model(pixel_values=images, **options).last_hidden_state
    out = teacher(images, (3, 2), layers=True)
    torch.testing.assert_close(out.cls, tokens[:, 0])
    torch.testing.assert_close(out.patches, tokens[:, skipped:])
    assert out.patches.shape == (2, 6, 32)
    assert out.layers is not None
    assert out.layers.shape == (2, 2, 6, 32)


def test_another_patch_size_sees_the_image_resized() -> None:
    teacher = Teacher(DINOv3ViTModel(DINOv3ViTConfig(**SMALL, patch_size=8)), "random")
    images = torch.randn(2, 3, 48, 64)  # a student of patch 16: 3×4
    small = torch.nn.functional.interpolate(images, (24, 32), mode="bicubic", antialias=True)
    torch.testing.assert_close(teacher(images, (3, 4)).patches, teacher(small, (3, 4)).patches)


def test_a_model_without_tokens_is_refused() -> None:
    with pytest.raises(InputError, match=r"resnet.*use a vision transformer"):
        Teacher(ResNetModel(ResNetConfig(depths=[1], hidden_sizes=[8])), "microsoft/resnet-18")


def test_tokens_that_contradict_the_config_are_refused() -> None:
    model = DINOv3ViTModel(DINOv3ViTConfig(**SMALL, num_register_tokens=4))
    teacher = Teacher(model, "odd")
    teacher.registers = 0
    with pytest.raises(InputError, match="gave 1×9×32 for 4 patches"):
        teacher(torch.randn(1, 3, 32, 32), (2, 2))


def test_a_teacher_that_cannot_be_had_gets_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a teacher: a folder with config"):
        load_teacher(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "dinov2"}')
    with pytest.raises(InputError, match="cannot be read") as caught:
        load_teacher(tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / "model.safetensors").write_bytes(b"half of a download")
    with pytest.raises(InputError, match="cannot be read"):
        load_teacher(tmp_path)
    name = "facebook/dinov3-vits16-pretrain-lvd1689m"
    line = how_to_get(name, OSError("You are trying to access a gated repo.\nMake sure to have access to it"))
    assert f"accept its licence at https://huggingface.co/{name}, then `hf auth login`" in line
    assert "hf download" in how_to_get("someone/nothing", OSError("404 Client Error"))
