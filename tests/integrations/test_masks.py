"""The mask head in transformers: from a saved head, through Auto classes and the pipeline, to planted segments."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForUniversalSegmentation, pipeline

import veca
import veca.integrations.transformers as integration
from veca.backbones import load_backbone
from veca.integrations.transformers.masks import UniversalSegmentationOutput
from veca.tasks.base.heads import load_head
from veca.tasks.masks.labels import MaskData
from veca.tasks.masks.task import Masks, last, seen_by


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """A fresh head on a tiny model, saved as the commands save it."""
    veca.create_model("veca_tiny", depth=2).save(tmp_path / "tiny")
    backbone = load_backbone(str(tmp_path / "tiny"))
    torch.manual_seed(0)
    saved = Masks(MaskData(("cat", "dog"), (), {}), queries=6, layers=2).saved_head(
        Masks(MaskData(("cat", "dog"), (), {}), queries=6, layers=2).new_head(backbone.width)
    )
    saved.about |= {"model": str(tmp_path / "tiny"), "weights": backbone.digest, "cores": 4, "size": 64}
    saved.save(tmp_path / "head")
    return tmp_path / "head"


def test_from_a_saved_head_to_the_pipeline(head: Path, tmp_path: Path) -> None:
    model, processor = integration.from_probe(head)
    assert model.config.id2label == {0: "cat", 1: "dog", 2: "nothing"}
    model.save_pretrained(tmp_path / "saved")
    processor.save_pretrained(tmp_path / "saved")
    again = AutoModelForUniversalSegmentation.from_pretrained(tmp_path / "saved")
    assert isinstance(again, integration.VecaForUniversalSegmentation)
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 255, (50, 70, 3), dtype=np.uint8))
    inputs = AutoImageProcessor.from_pretrained(tmp_path / "saved")(photo, return_tensors="pt")
    assert inputs["pixel_values"].shape == (1, 3, 64, 64)
    out, before = again(**inputs), model(**inputs)
    torch.testing.assert_close(out.masks_queries_logits, before.masks_queries_logits)
    torch.testing.assert_close(out.class_queries_logits, before.class_queries_logits)
    with torch.no_grad():
        again.head.kind.bias[0] += 20  # so that there is something to see
    run = pipeline("image-segmentation", model=again, image_processor=processor)
    for task in ("panoptic", "instance", "semantic"):
        for one in run(photo, subtask=task, threshold=0.1):
            assert one["label"] in ("cat", "nothing")
            assert one["mask"].size == (70, 50)
    assert run(photo, threshold=0.1)


def test_finer_masks_of_a_saved_head(head: Path) -> None:
    about = json.loads((head / "head.json").read_text())
    (head / "head.json").write_text(json.dumps({**about, "fine": 8}))
    model, processor = integration.from_probe(head)
    pixels = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    out = model(**processor(Image.fromarray(pixels), return_tensors="pt"))
    assert out.masks_queries_logits.shape == (1, 6, 8, 8)  # the grid has 4×4 patches
    saved = load_head(head)
    backbone = saved.backbone(None, torch.device("cpu"))
    one = torch.from_numpy(pixels)[None]
    seen, finer = seen_by(backbone, 4, one), seen_by(replace(backbone).reading(1.0, 8), 4, one)
    expected = last(Masks.module(saved).eval(), seen, finer)
    torch.testing.assert_close(out.masks_queries_logits.detach(), expected.masks, atol=1e-4, rtol=1e-3)


def test_stuff_of_a_saved_head_is_one_segment_a_class(head: Path, tmp_path: Path) -> None:
    about = json.loads((head / "head.json").read_text())
    (head / "head.json").write_text(json.dumps({**about, "stuff": [1]}))
    integration.from_probe(head)[1].save_pretrained(tmp_path / "saved")
    processor = AutoImageProcessor.from_pretrained(tmp_path / "saved")
    masks = torch.full((1, 4, 4, 4), -9.0)
    for query in range(4):  # two dogs, two cats
        masks[0, query, query] = 9
    classes = torch.tensor([[[0.0, 9, 0], [0, 9, 0], [9, 0, 0], [9, 0, 0]]])
    outputs = UniversalSegmentationOutput(class_queries_logits=classes, masks_queries_logits=masks)

    def labels(**words: object) -> list[int]:
        (found,) = processor.post_process_panoptic_segmentation(outputs, **words)
        return sorted(row["label_id"] for row in found["segments_info"])

    assert labels() == [0, 0, 1]
    assert labels(label_ids_to_fuse=[]) == [0, 0, 1, 1]
    assert labels(label_ids_to_fuse={0}) == [0, 1, 1]


def test_planted_segments_come_back_at_any_size() -> None:
    masks = torch.full((1, 2, 4, 4), -9.0)
    masks[0, 0, :, :2] = masks[0, 1, :, 2:] = 9
    outputs = UniversalSegmentationOutput(
        class_queries_logits=torch.tensor([[[9.0, 0, 0], [0, 9, 0]]]), masks_queries_logits=masks
    )
    processor = integration.VecaImageProcessor()
    sizes = [(8, 16)]
    whole = processor.post_process_panoptic_segmentation(outputs, target_sizes=sizes)[0]
    assert whole["segmentation"].tolist() == [[1] * 8 + [2] * 8] * 8
    assert [(row["id"], row["label_id"]) for row in whole["segments_info"]] == [(1, 0), (2, 1)]
    single = processor.post_process_instance_segmentation(outputs, target_sizes=sizes)[0]
    kinds = {row["id"]: row["label_id"] for row in single["segments_info"]}
    assert {kinds[int(single["segmentation"][0, 0])], kinds[int(single["segmentation"][0, -1])]} == {0, 1}
    (meaning,) = processor.post_process_semantic_segmentation(outputs, target_sizes=sizes)
    assert meaning.tolist() == [[0] * 8 + [1] * 8] * 8
    with pytest.raises(veca.InputError, match="1 images and 2 target sizes"):
        processor.post_process_panoptic_segmentation(outputs, target_sizes=sizes * 2)


def test_a_semantic_model_still_answers_the_pipeline() -> None:
    """It asks for panoptic segments first: each class is one."""
    torch.manual_seed(0)
    config = integration.VecaConfig(depth=2, width=64, heads=4, bank=8, num_labels=3)
    model = integration.VecaForSemanticSegmentation(config).eval()
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 255, (48, 64, 3), dtype=np.uint8))
    run = pipeline("image-segmentation", model=model, image_processor=integration.VecaImageProcessor(size=32))
    plain, asked = run(photo), run(photo, subtask="semantic")
    assert [(one["label"], one["score"]) for one in plain] == [(one["label"], one["score"]) for one in asked]
    for one, other in zip(plain, asked, strict=True):
        assert np.array_equal(one["mask"], other["mask"])
