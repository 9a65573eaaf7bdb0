"""Conversion: with dense attention the student must be its teacher, tensor for tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    DINOv3ViTConfig,
    DINOv3ViTModel,
    ViTConfig,
    ViTModel,
)

from veca.distill.convert import copy_patch_embedding, copy_teacher, student_config
from veca.distill.student import Student, estimate_standards
from veca.errors import InputError
from veca.model import Veca, create_model
from veca.recipes.convert import Convert
from veca.teachers import Teacher, load_teacher


def random_teacher(model: nn.Module) -> Teacher:
    """Weights large enough that every tensor matters."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2 if parameter.ndim > 1 else 0.5)
    return Teacher(model, "random")


def dinov3(**options: object) -> Teacher:
    config = DINOv3ViTConfig(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=96,
        num_register_tokens=4,
        **options,
    )
    return random_teacher(DINOv3ViTModel(config))


def twin(teacher: Teacher, rope_zero_fraction: float) -> Veca:
    student = Veca(student_config(teacher, attention="dense", rope_zero_fraction=rope_zero_fraction)).eval()
    copy_teacher(student, teacher)
    return student


@torch.no_grad()
def assert_same(student: Veca, teacher: Teacher, images: torch.Tensor, cores: int) -> None:
    out = student(images, cores=cores)
    expected = teacher(images, out.grid)
    torch.testing.assert_close(out.cls, expected.cls, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out.patches, expected.patches, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [(196, 140), (518, 518)], ids=["resized table", "own table"])
def test_the_dense_twin_reproduces_the_real_teacher(shared: Path, size: tuple[int, int]) -> None:
    teacher = load_teacher(shared / "teacher" / "dav2-small-encoder")
    student = twin(teacher, 1.0)
    assert sum(p.numel() for p in student.parameters()) > 22_000_000
    assert_same(student, teacher, torch.randn(1, 3, *size), cores=1)


@pytest.mark.parametrize("gated", [False, True])
def test_the_dense_twin_reproduces_dinov3(gated: bool) -> None:
    """Rotary, registers, no key bias; the class token and registers do not turn, so neither may those cores."""
    teacher = dinov3(use_gated_mlp=gated, hidden_act="silu" if gated else "gelu")
    student = twin(teacher, 0.0)
    with torch.no_grad():
        student.bank.alpha.zero_()  # positions stay where they start
    grey = teacher.model.embeddings.patch_embeddings.bias
    torch.testing.assert_close(student.bank.tokens[5:], grey.expand(59, -1))
    assert student_config(teacher).rope_zero_fraction == 0  # turns as the teacher does
    assert_same(student, teacher, torch.randn(2, 3, 64, 96), cores=5)


@pytest.mark.parametrize("swiglu", [False, True])
def test_the_dense_twin_reproduces_dinov2(swiglu: bool) -> None:
    config = Dinov2Config(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=56, patch_size=14,
                          use_swiglu_ffn=swiglu)  # fmt: skip
    teacher = random_teacher(Dinov2Model(config))
    assert_same(twin(teacher, 1.0), teacher, torch.randn(2, 3, 42, 70), cores=1)


def test_the_dense_twin_reproduces_dinov2_with_registers() -> None:
    config = Dinov2WithRegistersConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=56)
    teacher = random_teacher(Dinov2WithRegistersModel(config))
    side = 56 // config.patch_size * config.patch_size  # the table's own grid: that family antialiases when resizing
    assert_same(twin(teacher, 1.0), teacher, torch.randn(2, 3, side, side), cores=5)


def test_cores_are_grey_patches_on_the_position_table() -> None:
    config = Dinov2Config(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=56, patch_size=14)
    model = Dinov2Model(config)
    with torch.no_grad():  # channel 0 is x, channel 1 is y of each of the 4×4 patches
        centres = torch.tensor([-0.75, -0.25, 0.25, 0.75])
        model.embeddings.position_embeddings[0, 1:, 0] = centres.repeat(4)
        model.embeddings.position_embeddings[0, 1:, 1] = centres.repeat_interleave(4)
        model.embeddings.patch_embeddings.projection.bias.normal_()
    student = Veca(student_config(Teacher(model, "table")))
    report = copy_teacher(student, Teacher(model, "table"))
    positions = student.bank.states.tanh().detach()
    inside = positions.abs().amax(dim=-1) < 0.5
    inside[0] = False
    grey = model.embeddings.patch_embeddings(torch.zeros(1, 3, 14, 14))[0, 0]  # 0 is the mean after normalisation
    places = (student.bank.tokens[inside] - grey)[:, :2].detach()
    torch.testing.assert_close(places, positions[inside], atol=0.12, rtol=0)
    assert student.config.rope_zero_fraction == 1  # this teacher has no rotation
    with torch.no_grad():
        torch.testing.assert_close(student(torch.randn(1, 3, 28, 28)).coords[0], positions)  # so cores stay
    embeddings = model.embeddings
    torch.testing.assert_close(
        student.bank.tokens[0], (embeddings.cls_token + embeddings.position_embeddings[:, :1])[0, 0]
    )
    assert "core 0 from the class token, the others as grey patches at their coordinates" in report.text(student)
    assert report.new == [name for name, _ in student.named_parameters() if name.startswith("bank.")]


@pytest.mark.parametrize("attention", ["core", "dense"])
def test_of_forced_patches_a_share_looks_and_all_are_read(attention: str) -> None:
    teacher = dinov3()
    student = Veca(student_config(teacher, attention=attention)).eval()
    copy_teacher(student, teacher)
    images = torch.randn(2, 3, 32, 48)
    layers = teacher(images, (2, 3), layers=True).layers
    assert layers is not None
    fed = [None, *layers[:-1]]
    expected = student.forward_layers(images, 8, forced_patches=fed)
    chosen = torch.tensor([0, 2, 5])
    for checkpointing in (False, True):
        student.set_grad_checkpointing(checkpointing)
        part = student.forward_layers(images, 8, forced_patches=fed, looking=chosen)
        for index in range(len(fed)):
            torch.testing.assert_close(part.cores[index], expected.cores[index])
            torch.testing.assert_close(part.patches[index], expected.patches[index][:, chosen])


def test_forced_blocks_see_the_teachers_patches() -> None:
    """With the teacher's patches at every entry, changing what one block does must not reach the next one's patches."""
    teacher = dinov3()
    student = Student(Veca(student_config(teacher)).eval())
    copy_teacher(student.model, teacher)
    images = torch.randn(2, 3, 32, 48)
    target = teacher(images, (2, 3), layers=True)
    standards = estimate_standards(iter([target]))

    def layers(forced: bool) -> list[torch.Tensor]:
        assert target.layers is not None
        fed = [None, *target.layers[:-1]] if forced else None
        return student.model.forward_layers(images, 8, forced_patches=fed).patches

    before_forced, before_free = layers(True), layers(False)
    with torch.no_grad():
        student.model.blocks[0].fc2.bias += torch.randn(64)  # moves patches and cores after block 0
        student.model.blocks[1].attn.v_proj.weight.zero_()  # block 1 now reads nothing from its cores
        student.model.blocks[1].attn.v_proj.bias.zero_()
    assert not torch.allclose(before_free[1], layers(False)[1], atol=1e-2)
    first = layers(True)[1]
    with torch.no_grad():
        student.model.blocks[0].fc2.bias += torch.randn(64)
    torch.testing.assert_close(first, layers(True)[1])
    assert not torch.allclose(before_forced[0], layers(True)[0])
    for forced, share in ((1.0, 0.5), (0.5, 0.5), (0.5, 1.0), (0.0, 0.5), (0.0, 1.0)):
        student.zero_grad(set_to_none=True)
        student(images, 8, target, standards, 1.0, standards.layers, forced, share).total.backward()
        missing = [name for name, p in student.named_parameters() if p.grad is None]
        assert not missing  # DistributedDataParallel would wait for them


def test_fading_goes_from_the_teachers_patches_to_the_students_own() -> None:
    teacher = dinov3()
    student = Veca(student_config(teacher)).eval()
    images = torch.randn(2, 3, 32, 48)
    fed = [None, *teacher(images, (2, 3), layers=True).layers[:-1]]
    with torch.no_grad():
        free, forced = student.forward_layers(images, 8).tokens, student.forward_layers(images, 8, forced_patches=fed)
        none, half = (student.forward_layers(images, 8, forced_patches=fed, forcing=x).tokens for x in (0.0, 0.5))
    for ours, theirs in zip(none, free, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    cores, mixture = half[0][:, :8], 0.5 * half[0][:, 8:] + 0.5 * fed[1]  # what enters block 1
    _, state, pace = student.bank(8, 2)
    by = student.rotation(student.bank.move(state, pace, cores, 1).tanh())
    left = student.blocks[1](cores, mixture, by, student.patch_rotation((2, 3), images.device))
    torch.testing.assert_close(torch.cat(left, dim=1), half[1])
    assert not torch.allclose(half[1], forced.tokens[1], atol=1e-2)

    settings = Convert(train=("x",), teacher="t", out=Path("o"), forcing=0.2, fading=0.4)
    assert [round(settings.forced_at(step, 10), 6) for step in range(10)] == [1, 1, 1, 0.75, 0.5, 0.25, 0, 0, 0, 0]


def test_the_papers_start_copies_the_patch_embedding() -> None:
    teacher = dinov3()
    student = create_model("veca_tiny", width=64, heads=2, depth=2)
    report = copy_patch_embedding(student, teacher)
    assert torch.equal(student.patch_embed.proj.weight, teacher.model.embeddings.patch_embeddings.weight)
    assert report.copied == ["patch_embed.proj.weight", "patch_embed.proj.bias"]
    other = create_model("veca_tiny", depth=2)
    report = copy_patch_embedding(other, teacher)
    assert not report.copied
    assert "192×3×16×16" in report.notes[0]


def test_teachers_without_a_table_are_refused() -> None:
    vit = Teacher(ViTModel(ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)), "vit")
    with pytest.raises(InputError, match=r"cannot convert a teacher of type 'vit'.*--init patch-embedding"):
        student_config(vit)
    with pytest.raises(InputError, match="its MLP uses 'relu'"):
        student_config(dinov3(hidden_act="relu"))
    teacher = dinov3()
    with pytest.raises(InputError, match="leave --student at the teacher's own geometry"):
        copy_teacher(Veca(student_config(teacher, width=32)), teacher)
    with pytest.raises(InputError, match=r"it has no tensor for blocks\.\d\.\S+weight of the student"):
        copy_teacher(Veca(student_config(teacher, depth=teacher.depth + 1)), teacher)
