"""RF-DETR on VECA: built, trained a step, saved and loaded, used by the pipeline, and made from a trained head."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForObjectDetection, RfDetrForObjectDetection, pipeline

import veca
from veca.errors import InputError
from veca.integrations.transformers import VecaImageProcessor, build_detector, from_probe
from veca.probes.predict import predict
from veca.tasks.base.coco import CocoData
from veca.tasks.base.heads import load_head
from veca.tasks.detect.head import loss, new_head
from veca.tasks.detect.task import Detect
from veca.weights import weights_digest

SHAPE = {"queries": 8, "groups": 1, "layers": 1}


@pytest.fixture
def plain() -> veca.Veca:
    torch.manual_seed(0)
    return veca.create_model("veca_tiny", depth=3, width=48, heads=3, patch_size=8, bank=8).eval()


def labels() -> list[dict[str, torch.Tensor]]:
    some = {"class_labels": torch.tensor([0, 1]), "boxes": torch.tensor([[0.5, 0.5, 0.4, 0.2], [0.2, 0.3, 0.1, 0.2]])}
    return [some, {"class_labels": torch.zeros(0, dtype=torch.long), "boxes": torch.zeros(0, 4)}]


def test_a_step_reaches_the_backbone_unless_it_is_frozen(plain: veca.Veca) -> None:
    model = build_detector(plain, ["cat", "dog"], size=64, out_indices=[1, 3], **SHAPE).train()
    assert isinstance(model, RfDetrForObjectDetection)
    images = torch.randn(2, 3, 64, 48)
    model(images, labels=labels()).loss.backward()
    assert plain.patch_embed.proj.weight.grad is not None
    model.zero_grad()
    before = weights_digest(plain)
    model.backbone.requires_grad_(False)
    optimiser = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    found = model(images, labels=labels())
    found.loss.backward()
    optimiser.step()
    assert weights_digest(plain) == before
    assert not torch.equal(model(images).pred_boxes, found.pred_boxes)


def test_the_loss_is_that_of_our_head_on_the_same_features(plain: veca.Veca) -> None:
    """Two ways to the same numbers: pixels through the whole model, and maps through the head alone."""
    model = build_detector(plain, ["cat", "dog"], size=64, **SHAPE).eval()
    head = new_head(48, ["cat", "dog"], **SHAPE).eval()
    own = {name: tensor for name, tensor in model.state_dict().items() if name in head.state_dict()}
    head.load_state_dict(own)
    images = torch.randn(2, 3, 64, 64)
    maps = plain(images).patches.transpose(1, 2).unflatten(-1, (8, 8))
    rows = [torch.cat((one["class_labels"][:, None].float(), one["boxes"]), dim=1) for one in labels()]
    torch.testing.assert_close(loss(head, maps, rows), model(images, labels=labels()).loss, rtol=1e-4, atol=1e-4)


def test_saved_loaded_and_used(plain: veca.Veca, tmp_path: Path) -> None:
    model = build_detector(plain, ["cat", "dog"], cores=4, size=64, **SHAPE).eval()
    model.save_pretrained(tmp_path)
    again = AutoModelForObjectDetection.from_pretrained(tmp_path)
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(again(images).pred_boxes, model(images).pred_boxes, rtol=0, atol=0)
        other = again(images, cores=8).pred_boxes
        assert not torch.equal(other, again(images).pred_boxes)  # the budget is the call's, then the config's again
    assert again.config.backbone_config.cores == 4
    assert again.config.id2label == {0: "cat", 1: "dog"}
    processor = AutoImageProcessor.from_pretrained(tmp_path)
    assert isinstance(processor, VecaImageProcessor)
    assert processor.size == {"height": 64, "width": 64}
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 90, 3), dtype=np.uint8))
    found = pipeline("object-detection", model=again, image_processor=processor)(photo, threshold=0.0)
    assert found[0]["label"] in ("cat", "dog")
    assert 0 <= found[0]["box"]["xmin"] <= found[0]["box"]["xmax"] <= 90


@pytest.mark.end_to_end
def test_trust_remote_code_needs_no_import_of_ours(plain: veca.Veca, tmp_path: Path) -> None:
    """In a process that never heard of veca; then from what that process saved."""
    model = build_detector(plain, ["cat", "dog"], cores=4, size=64, **SHAPE).eval()
    model.save_pretrained(tmp_path / "mine")
    images = torch.randn(1, 3, 64, 64)
    torch.save(images, tmp_path / "images.pt")
    script = (
        "import sys, torch\n"
        "from transformers import AutoImageProcessor, AutoModelForObjectDetection\n"
        "assert AutoImageProcessor.from_pretrained(sys.argv[1], trust_remote_code=True).size['height'] == 64\n"
        "model = AutoModelForObjectDetection.from_pretrained(sys.argv[1], trust_remote_code=True).eval()\n"
        "torch.save(model(torch.load('images.pt')).pred_boxes.detach(), 'out.pt')\n"
        "model.save_pretrained(sys.argv[2])\n"
    )
    settings = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": str(Path(veca.__file__).parents[1])}
    for source, target in (("mine", "once"), ("once", "twice")):
        command = [sys.executable, "-c", script, source, target]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=settings, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        torch.testing.assert_close(torch.load(tmp_path / "out.pt"), model(images).pred_boxes.detach())
        assert [path.name for path in (tmp_path / target).glob("*.py")] == ["modeling_veca.py"]


def test_post_processing_against_plain_arithmetic() -> None:
    class Outputs:
        logits = torch.tensor([[[2.0, -5.0], [-5.0, 1.0]]])
        pred_boxes = torch.tensor([[[0.5, 0.5, 0.2, 0.4], [0.25, 0.25, 0.5, 0.5]]])

    processor = VecaImageProcessor(patch_size=14)
    found = processor.post_process_object_detection(Outputs(), 0.5, torch.tensor([[100, 200]]))[0]
    assert found["labels"].tolist() == [0, 1]
    torch.testing.assert_close(found["scores"], torch.tensor([2.0, 1.0]).sigmoid())
    torch.testing.assert_close(found["boxes"], torch.tensor([[80.0, 30, 120, 70], [0, 0, 100, 50]]))
    with pytest.raises(InputError, match="1 images and 2 target sizes"):
        processor.post_process_object_detection(Outputs(), 0.5, [(1, 1), (2, 2)])


def test_a_trained_head_becomes_a_whole_detector(plain: veca.Veca, tmp_path: Path) -> None:
    plain.save(tmp_path / "model")
    task = Detect(CocoData(("cat", "dog"), (), (), ()))
    task.shape = dict(SHAPE)
    head = new_head(48, task.classes, **SHAPE).eval()
    with torch.no_grad():
        head.class_embed.bias.fill_(1.0)  # sure of everything, so that all is answered
    saved = task.saved_head(head)
    saved.about.update(model=str(tmp_path / "model"), weights=weights_digest(plain), cores=4, size=64)
    saved.save(tmp_path / "head")
    photo = tmp_path / "photo.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 90, 3), dtype=np.uint8)).save(photo)

    loaded = load_head(tmp_path / "head")
    said = predict(loaded, loaded.backbone(None, torch.device("cpu")), [photo], tmp_path / "seen")[0]["boxes"]
    model, processor = from_probe(tmp_path / "head")
    with torch.no_grad():
        out = model(**processor(str(photo), return_tensors="pt"))
    found = processor.post_process_object_detection(out, 0.3, [(60, 90)])[0]
    assert len(said) == len(found["scores"]) > 0
    np.testing.assert_allclose([row["score"] for row in said], found["scores"], atol=1e-3)
    best = said[0]["box"]
    np.testing.assert_allclose(best, found["boxes"][0], atol=0.2)
    assert json.loads((tmp_path / "seen/results.json").read_text())[0]["boxes"] == said


def test_mistakes_are_named(plain: veca.Veca) -> None:
    with pytest.raises(InputError, match="name the classes"):
        build_detector(plain, [])
    with pytest.raises(InputError, match="8 queries need as many patches"):
        build_detector(plain, ["cat"], **SHAPE).eval()(torch.randn(1, 3, 16, 16))
    projecting = veca.create_model("veca_tiny", depth=1, width=48, heads=3, patch_size=8, bank=8, out_width=32)
    with pytest.raises(InputError, match="ends with a projection"):
        build_detector(projecting, ["cat"])
