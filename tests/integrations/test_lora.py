"""Adapters and quantised layers in place of ours: LoRA by peft, PyTorch's dynamic quantisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import veca
import veca.integrations.transformers as integration

peft = pytest.importorskip("peft")

IMAGES = torch.randn(4, 3, 32, 48, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 0])
CONFIG: dict[str, Any] = {"depth": 2, "width": 64, "heads": 4, "bank": 8, "num_labels": 3}


TASKS = ("ImageClassification", "SemanticSegmentation", "DepthEstimation")


def first(out: Any) -> torch.Tensor:
    return out.feature_maps[-1] if "feature_maps" in out else out[0]


def shaken(model: Any) -> Any:
    """Adapters begin at zero: after this they do something."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"], ["out_proj", "fc1", "fc2"]])
def test_lora_learns_and_merges(targets: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = integration.VecaForImageClassification(integration.VecaConfig(**CONFIG)).eval()
    with torch.no_grad():
        base.veca.bank.alpha.fill_(0.5)  # so that the heads of the positions matter
        before = base(IMAGES).logits
    frozen = {name: value.clone() for name, value in base.veca.state_dict().items()}
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=targets, modules_to_save=["classifier"]))
    with torch.no_grad():
        torch.testing.assert_close(model(IMAGES).logits, before, atol=1e-5, rtol=1e-4)  # a fresh adapter adds nothing
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(IMAGES, labels=LABELS).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    adapters = [name for name, _ in model.named_parameters() if "lora_A" in name]
    layers = {"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2", "0"} if targets == "all-linear" else set(targets)
    assert {name.split(".lora_A")[0].rsplit(".", 1)[1] for name in adapters} == layers  # 0: of bank.heads
    shaken(model)
    slow = model(IMAGES).logits.detach()
    with torch.inference_mode():  # the fast pass must not forget the adapters
        torch.testing.assert_close(model(IMAGES).logits, slow, atol=1e-4, rtol=1e-4)
    model.save_pretrained(tmp_path / "adapter")
    merged = model.merge_and_unload()
    with torch.inference_mode():
        torch.testing.assert_close(merged(IMAGES).logits, slow, atol=1e-4, rtol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    plain = veca.load(tmp_path / "merged")
    changed = {name for name, value in plain.state_dict().items() if not torch.equal(value, frozen[name])}
    names = ["weight"] if targets == "all-linear" else [f"{target}.weight" for target in targets]
    assert changed
    assert all(any(name.endswith(end) for end in names) for name in changed)
    fresh = integration.VecaForImageClassification(integration.VecaConfig(**CONFIG)).eval()
    fresh.veca.load_state_dict(frozen)
    again = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter").eval()
    torch.testing.assert_close(again(IMAGES).logits, slow, atol=1e-5, rtol=1e-4)


def test_lora_on_the_plain_model() -> None:
    plain = veca.create_model("veca_tiny", depth=2, bank=8).eval()
    before = plain(IMAGES).cls.detach()
    model = shaken(peft.get_peft_model(plain, peft.LoraConfig(target_modules=["q_proj", "v_proj"])))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * 2  # two layers, two projections, two thin matrices
    assert all("lora_" in name for name in trained)
    assert not torch.allclose(model(IMAGES).cls, before, atol=1e-3)


@pytest.mark.parametrize("kind", ["Model", "Backbone", *(f"For{task}" for task in TASKS)])
def test_dynamic_quantisation(kind: str) -> None:
    torch.manual_seed(0)
    model = getattr(integration, f"Veca{kind}")(integration.VecaConfig(**CONFIG)).eval()
    with torch.no_grad():
        expected = first(model(IMAGES))
        small = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
        found = first(small(IMAGES))
    assert not any(type(layer) is nn.Linear for layer in small.modules())
    cosine = nn.functional.cosine_similarity(found.flatten(1), expected.flatten(1))
    assert (cosine > 0.99).all()
