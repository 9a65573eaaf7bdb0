"""The checks that transformers publishes for every vision model, as far as they apply to a backbone and its heads."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import veca.integrations.transformers as integration

HEADLESS = (integration.VecaModel, integration.VecaBackbone)
HEADED = (
    integration.VecaForImageClassification,
    integration.VecaForSemanticSegmentation,
    integration.VecaForDepthEstimation,
    integration.VecaForUniversalSegmentation,
)
every = pytest.mark.parametrize("kind", HEADLESS + HEADED, ids=lambda kind: kind.__name__)
headed = pytest.mark.parametrize("kind", HEADED, ids=lambda kind: kind.__name__)


def config(**more: Any) -> integration.VecaConfig:
    shape = {"depth": 2, "width": 64, "heads": 4, "bank": 8, "cores": 4, "num_labels": 3, "depth_bins": 5}
    return integration.VecaConfig(**{**shape, **more})


def labels_for(kind: type, batch: int = 2) -> dict[str, Any]:
    if kind is integration.VecaForImageClassification:
        return {"labels": torch.arange(batch) % 3}
    maps = torch.randint(1, 3, (batch, 32, 48)).float()
    if kind is integration.VecaForUniversalSegmentation:
        return {"mask_labels": [one == torch.tensor([1, 2])[:, None, None] for one in maps],
                "class_labels": [torch.tensor([0, 1])] * batch}  # fmt: skip
    return {"labels": maps}


def first(out: Any) -> torch.Tensor:
    """The main output of any of them."""
    for name in ("logits", "predicted_depth", "last_hidden_state", "masks_queries_logits"):
        if name in out:
            return out[name]
    return out.feature_maps[-1]


@pytest.fixture
def pixels() -> torch.Tensor:
    return torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(0))


@every
@pytest.mark.parametrize("positions", ["rope", "table"])
def test_initialisation(kind: type, positions: str) -> None:
    model = kind(config(positions=positions))
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad
        parameter = parameter.detach()
        assert parameter.isfinite().all()
        if name.endswith(".bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        elif name.endswith("alpha"):
            assert (parameter == 0.01).all()
        elif name.endswith("bank.tokens"):
            assert float(parameter.std()) == pytest.approx(64**-0.5, rel=0.2)
        elif name == "head.queries":
            assert float(parameter.std()) == pytest.approx(256**-0.5, rel=0.2)
        elif name.endswith("bank.states"):
            assert parameter.tanh().abs().max() <= 0.95
        else:
            assert float(parameter.mean()) == pytest.approx(0, abs=0.01), name
            assert float(parameter.std()) == pytest.approx(0.02, rel=0.5), name


@every
def test_missing_weights_are_initialised_and_present_ones_kept(kind: type, tmp_path: Path) -> None:
    integration.VecaModel(config(positions="table")).save_pretrained(tmp_path)
    reference = integration.VecaModel.from_pretrained(tmp_path)
    model = kind.from_pretrained(tmp_path)
    for name, tensor in reference.veca.state_dict().items():
        torch.testing.assert_close(model.veca.state_dict()[name], tensor, atol=0, rtol=0)
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
        assert name.startswith("veca.") or name.endswith("bias") or "norm" in name or 0.01 < parameter.std() < 0.07


@every
def test_determinism(kind: type, pixels: torch.Tensor) -> None:
    model = kind(config()).eval()
    torch.testing.assert_close(first(model(pixels)), first(model(pixels)), atol=0, rtol=0)


@every
def test_save_and_load(kind: type, pixels: torch.Tensor, tmp_path: Path) -> None:
    model = kind(config()).eval()
    model.save_pretrained(tmp_path)
    again, report = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert not again.training
    torch.testing.assert_close(first(again(pixels)), first(model(pixels)), atol=1e-6, rtol=0)
    assert again.config.architectures == [kind.__name__]


@every
def test_state_dict_loads_strictly(kind: type, pixels: torch.Tensor) -> None:
    model, other = kind(config()).eval(), kind(config()).eval()
    other.load_state_dict(model.state_dict(), strict=True)
    torch.testing.assert_close(first(other(pixels)), first(model(pixels)), atol=0, rtol=0)
    torch.testing.assert_close(first(copy.deepcopy(model)(pixels)), first(model(pixels)), atol=0, rtol=0)


@every
def test_hidden_states(kind: type, pixels: torch.Tensor) -> None:
    model = kind(config()).eval()
    assert model(pixels).hidden_states is None
    states = model(pixels, output_hidden_states=True).hidden_states
    assert [tuple(state.shape) for state in states] == [(2, 4 + 6, 64)] * 3  # the embedding and two blocks
    assert model(pixels, output_hidden_states=True, cores=8).hidden_states[0].shape == (2, 8 + 6, 64)
    model.config.output_hidden_states = True
    torch.testing.assert_close(model(pixels).hidden_states[-1], states[-1])


@every
def test_attentions(kind: type, pixels: torch.Tensor) -> None:
    model = kind(config()).eval()
    plain = first(model(pixels))
    out = model(pixels, output_attentions=True)
    assert [tuple(one.shape) for one in out.attentions] == [(2, 4, 10, 10)] * 2
    for one in out.attentions:
        torch.testing.assert_close(one.sum(-1), torch.ones(2, 4, 10))
        assert not one[:, :, 4:, 4:].any()  # no patch reads a patch
        assert (one[:, :, :4] > 0).all()
    torch.testing.assert_close(first(out), plain)
    assert model(pixels).attentions is None
    dense = kind(config(attention="dense")).eval()(pixels, output_attentions=True)
    assert (dense.attentions[0] > 0).all()
    eager = kind._from_config(config(output_attentions=True), attn_implementation="eager").eval()
    assert len(eager(pixels).attentions) == 2


@every
def test_hidden_states_and_attentions_keep_gradients(kind: type, pixels: torch.Tensor) -> None:
    model = kind(config())
    out = model(pixels, output_hidden_states=True)
    out.hidden_states[0].retain_grad()
    for state in out.hidden_states[1:]:
        state.retain_grad()
    first(out).square().sum().backward()
    assert all(state.grad is not None and state.grad.any() for state in out.hidden_states[1:])


@every
def test_tuples_equal_dictionaries(kind: type, pixels: torch.Tensor) -> None:
    model = kind(config()).eval()
    named = model(pixels, output_hidden_states=True).to_tuple()
    plain = model(pixels, output_hidden_states=True, return_dict=False)
    assert isinstance(plain, tuple)
    torch.testing.assert_close(plain[0], named[0])
    assert len(plain) == len(named)


@headed
def test_training_reaches_what_a_framework_unfroze(kind: type, pixels: torch.Tensor, tmp_path: Path) -> None:
    """transformers loads into parameters of its own: positions that nothing turns with get zeros, not nothing."""
    kind(config(cores=8, rope_zero_fraction=1.0)).save_pretrained(tmp_path)
    model = kind.from_pretrained(tmp_path).train()  # type: ignore[attr-defined]
    model.requires_grad_(True)
    model(pixels, **labels_for(kind)).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not model.veca.bank.states.grad.any()


@headed
def test_training_reaches_every_parameter(kind: type, pixels: torch.Tensor) -> None:
    model = kind(config(cores=8)).train()
    loss = model(pixels, **labels_for(kind)).loss
    assert loss.ndim == 0
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all()


@headed
def test_gradient_checkpointing_gives_the_same_gradients(kind: type, pixels: torch.Tensor) -> None:
    model, labels = kind(config()).eval(), labels_for(kind)  # eval: no random shift of positions
    gradients = []
    for enable in (False, True):
        if enable:
            model.gradient_checkpointing_enable()
        assert model.is_gradient_checkpointing is enable
        assert model.veca.grad_checkpointing is enable
        model.zero_grad()
        model(pixels, **labels).loss.backward()
        gradients.append({name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None})
    torch.testing.assert_close(gradients[0], gradients[1])
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


@pytest.mark.parametrize("kind", HEADED[:2], ids=lambda kind: kind.__name__)
def test_heads_of_another_size(kind: type, pixels: torch.Tensor, tmp_path: Path) -> None:
    kind(config()).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        kind.from_pretrained(tmp_path, num_labels=7)
    model = kind.from_pretrained(tmp_path, num_labels=7, ignore_mismatched_sizes=True)
    assert model(pixels).logits.shape[1] == 7
    assert model.config.num_labels == len(model.config.id2label) == 7


@pytest.mark.parametrize(
    ("problem", "labels"),
    [
        ("single_label_classification", torch.tensor([0, 2])),
        ("multi_label_classification", torch.tensor([[1.0, 0, 1], [0, 0, 1]])),
    ],
)
def test_problem_types(problem: str, labels: torch.Tensor, pixels: torch.Tensor) -> None:
    model = integration.VecaForImageClassification(config(problem_type=problem)).eval()
    out = model(pixels, labels=labels)
    if problem.startswith("single"):
        expected = torch.nn.functional.cross_entropy(out.logits, labels)
    else:
        expected = torch.nn.functional.binary_cross_entropy_with_logits(out.logits, labels)
    torch.testing.assert_close(out.loss, expected)


def test_depth_loss_without_any_known_depth_is_zero(pixels: torch.Tensor) -> None:
    model = integration.VecaForDepthEstimation(config())
    loss = model(pixels, labels=torch.zeros(2, 32, 48)).loss
    loss.backward()
    assert float(loss.detach()) == 0


def test_segmentation_loss_without_any_counted_pixel_is_zero(pixels: torch.Tensor) -> None:
    """As in `veca finetune segment`: a crop of nothing but ignored pixels must not make the weights NaN."""
    model = integration.VecaForSemanticSegmentation(config())
    loss = model(pixels, labels=torch.full((2, 32, 48), 255)).loss
    loss.backward()
    assert float(loss.detach()) == 0
