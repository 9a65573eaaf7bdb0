from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from veca.distill.losses import Moments, Standard, Standards, distillation_loss, gram_loss, hint_loss


def test_the_papers_loss(shared: Path) -> None:
    r = load_file(shared / "reference" / "losses.safetensors")
    loss = distillation_loss(r["sc"], r["s"], r["tc"], r["t"])
    torch.testing.assert_close(1 - loss.global_cosine, r["cls"][0])
    total, cosine, mse = r["dense"]
    torch.testing.assert_close(1 - loss.dense_cosine, cosine)
    torch.testing.assert_close(loss.mse, mse)
    torch.testing.assert_close(loss.total, r["cls"][0] + total)


def test_half_precision_is_computed_in_float32() -> None:
    features = [torch.randn(shape).bfloat16() for shape in ((2, 8), (2, 3, 8), (2, 8), (2, 3, 8))]
    loss, expected = distillation_loss(*features), distillation_loss(*(f.float() for f in features))
    assert loss.total.dtype == torch.float32
    assert torch.equal(loss.total, expected.total)


def test_standardised_loss_does_not_depend_on_the_teachers_scale() -> None:
    """A teacher stretched and shifted per channel, and a student that follows: the same loss."""
    student, teacher = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    scale, shift = torch.rand(8) * 5 + 0.1, torch.randn(8) * 3
    losses = []
    for stretch, move in ((torch.ones(8), torch.zeros(8)), (scale, shift)):
        standard = Moments()
        standard.add(teacher * stretch + move)
        standards = Standards(standard.standard(), standard.standard(), None)
        s, t = student * stretch + move, teacher * stretch + move
        losses.append(distillation_loss(s[:, 0], s, t[:, 0], t, standards).total)
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-4)


def test_moments_of_batches_are_those_of_the_whole() -> None:
    features = torch.randn(3, 40, 6) * 4 + 7
    features[..., 2] = 1.5  # a channel that never moves
    moments = Moments(keep=1)
    for part in features.split(16, dim=1):
        moments.add(part[:, :, None])
    standard = moments.standard()
    torch.testing.assert_close(standard.mean, features.mean(1))
    moving = [0, 1, 3, 4, 5]
    torch.testing.assert_close(standard.deviation[:, moving], features.std(1, correction=0)[:, moving])
    assert standard(features.transpose(0, 1)).isfinite().all()


def test_hints_average_over_layers() -> None:
    teacher, student = torch.randn(3, 2, 4, 6), torch.randn(3, 2, 4, 6)
    mean, deviation = torch.randn(3, 6), torch.rand(3, 6) + 0.5
    expected = 0.0
    for layer in range(3):
        s, t = ((x[layer] - mean[layer]) / deviation[layer] for x in (student, teacher))
        cosine = (s * t).sum(-1) / (s.norm(dim=-1) * t.norm(dim=-1))
        expected += float((1 - cosine).mean() + (s - t).square().mean()) / 3
    loss = hint_loss(list(student), teacher, Standard(mean, deviation))
    torch.testing.assert_close(loss, torch.tensor(expected))
    assert hint_loss(list(teacher), teacher, Standard(mean, deviation)) < 1e-5


def test_the_gram_loss_compares_pairs_of_patches() -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    pairs = [
        torch.cosine_similarity(student[b, i], student[b, j], dim=0)
        - torch.cosine_similarity(teacher[b, i], teacher[b, j], dim=0)
        for b in range(2) for i in range(5) for j in range(5)
    ]  # fmt: skip
    torch.testing.assert_close(gram_loss(student, teacher), torch.stack(pairs).square().mean())
    turned = torch.linalg.qr(torch.randn(8, 8)).Q  # another basis, the same pairs
    torch.testing.assert_close(gram_loss(teacher @ turned * 3, teacher), torch.zeros(()), atol=1e-6, rtol=0)
