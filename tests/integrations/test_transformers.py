"""VECA as a transformers model: Auto classes, round trips with `veca.load`, outputs, heads, pipelines."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoBackbone,
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForDepthEstimation,
    AutoModelForImageClassification,
    AutoModelForSemanticSegmentation,
    pipeline,
)

import veca
import veca.integrations.transformers as integration
from veca.tasks.base.heads import Head
from veca.tasks.depth import metres
from veca.weights import weights_digest


@pytest.mark.end_to_end
def test_the_entry_in_veca_registers_and_import_veca_does_not_import_transformers() -> None:
    script = (
        "import sys, veca; assert 'transformers' not in sys.modules\n"
        "veca.transformers; from transformers import AutoConfig; print(type(AutoConfig.for_model('veca')).__module__)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "veca.integrations.transformers.configuration", done.stderr


def test_the_config_has_every_field_of_ours_with_our_defaults() -> None:
    ours, theirs = veca.VecaConfig(), integration.VecaConfig()
    assert {name: getattr(theirs, name) for name in dataclasses.asdict(ours)} == dataclasses.asdict(ours)
    assert theirs.plain() == ours
    named = integration.VecaConfig(hidden_size=192, num_hidden_layers=2, num_attention_heads=3)
    assert (named.width, named.depth, named.heads) == (192, 2, 3)
    with pytest.raises(ValueError, match="multiple of 4"):
        integration.VecaModel(integration.VecaConfig(width=190))


def test_round_trips(folder: Path, plain: veca.Veca, images: torch.Tensor, tmp_path: Path) -> None:
    model, report = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert type(model) is integration.VecaModel
    assert not any(report.values())
    ours = plain(images)
    out = model(images)
    torch.testing.assert_close(out.pooler_output, ours.cls, atol=1e-6, rtol=0)
    torch.testing.assert_close(out.last_hidden_state, torch.cat((ours.cores, ours.patches), 1), atol=1e-6, rtol=0)
    model.save_pretrained(tmp_path / "theirs")
    again = veca.load(tmp_path / "theirs")
    torch.testing.assert_close(again(images).patches, ours.patches, atol=1e-6, rtol=0)
    assert again.config == plain.config
    assert again.card["teacher"] == "nobody"
    third = AutoModel.from_pretrained(tmp_path / "theirs")
    torch.testing.assert_close(third(images).pooler_output, ours.cls, atol=1e-6, rtol=0)
    assert third.config.card == plain.card


def test_a_model_with_a_head_goes_back_to_a_backbone(
    folder: Path, plain: veca.Veca, images: torch.Tensor, tmp_path: Path
) -> None:
    model = AutoModelForImageClassification.from_pretrained(folder, num_labels=5)
    model.save_pretrained(tmp_path / "head")
    torch.testing.assert_close(veca.load(tmp_path / "head")(images).cls, plain(images).cls, atol=1e-6, rtol=0)
    backbone, report = AutoModel.from_pretrained(tmp_path / "head", output_loading_info=True)
    assert not report["missing_keys"]
    torch.testing.assert_close(backbone(images).pooler_output, plain(images).cls, atol=1e-6, rtol=0)
    again = AutoModelForImageClassification.from_pretrained(tmp_path / "head")
    torch.testing.assert_close(again(images).logits, model(images).logits, atol=1e-6, rtol=0)


def test_cores_as_a_default_and_as_an_argument(folder: Path, plain: veca.Veca, images: torch.Tensor) -> None:
    model = AutoModel.from_pretrained(folder, cores=4)
    torch.testing.assert_close(model(images).pooler_output, plain(images, cores=4).cls)
    torch.testing.assert_close(model(images, cores=9).pooler_output, plain(images, cores=9).cls)
    out = model(images).last_hidden_state  # how code for DINOv3 finds the patches
    torch.testing.assert_close(out[:, 1 + model.config.num_register_tokens :], plain(images, cores=4).patches)
    with pytest.raises(ValueError, match="between 1 and 16"):
        model(images, cores=17)
    with pytest.raises(ValueError, match="multiples of the patch size"):
        model(images[..., 1:])


def test_backbone(folder: Path, plain: veca.Veca, images: torch.Tensor) -> None:
    backbone = integration.VecaBackbone.from_pretrained(folder, out_indices=[1, 3], cores=4)
    assert backbone.channels == [192, 192]
    assert backbone.out_features == ["stage1", "stage3"]
    expected = plain.get_intermediate_layers(images, n=[0, 2], reshape=True, cores=4)
    for ours, theirs in zip(expected, backbone(images).feature_maps, strict=True):
        torch.testing.assert_close(theirs, ours, atol=1e-6, rtol=0)
    config = AutoConfig.from_pretrained(folder, out_features=["stem", "stage2"])
    fresh = AutoBackbone.from_config(config)
    assert type(fresh) is integration.VecaBackbone
    assert [tuple(one.shape) for one in fresh(images).feature_maps] == [(2, 192, 3, 4)] * 2
    other = AutoBackbone.from_config(config, out_indices=(1, 2, -1))
    assert other.out_features == ["stage1", "stage2", "stage3"]
    assert len(other(images).feature_maps) == 3
    assert AutoBackbone.from_config(config, out_features=["stage1"]).out_indices == [1]
    assert config.out_features == fresh.out_features == ["stem", "stage2"]  # the caller's own is left alone


def test_what_transformers_users_look_for(folder: Path) -> None:
    model = AutoModel.from_pretrained(folder)
    assert model.get_input_embeddings() is model.veca.patch_embed
    assert (model.config.image_size, model.config.num_channels) == (448, 3)
    assert integration.VecaImageProcessor().size == {"shortest_edge": model.config.image_size}
    with pytest.raises(ValueError, match="num_channels must be 3"):
        integration.VecaConfig(num_channels=1)


@pytest.mark.end_to_end
def test_trust_remote_code_needs_no_import_of_ours(
    folder: Path, plain: veca.Veca, photo: Image.Image, tmp_path: Path
) -> None:
    """In a process that never heard of veca, from a folder of `model.save`; then from what that process saved."""
    photo.save(tmp_path / "photo.png")
    script = (
        "import sys, torch\n"
        "from transformers import AutoImageProcessor, AutoModelForImageClassification\n"
        "folder, out, again = sys.argv[1:]\n"
        "processor = AutoImageProcessor.from_pretrained(folder, trust_remote_code=True)\n"
        "model = AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=True).eval()\n"
        "torch.save(model.veca(processor('photo.png', return_tensors='pt').pixel_values).cls, out)\n"
        "model.save_pretrained(again)\n"
    )
    settings = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": str(Path(veca.__file__).parents[1])}
    expected = plain(veca.preprocess(photo, 448, 16)).cls
    for source, target in ((folder, "once"), (tmp_path / "once", "twice")):
        command = [sys.executable, "-c", script, str(source), "out.pt", target]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=settings, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        torch.testing.assert_close(torch.load(tmp_path / "out.pt"), expected, atol=1e-5, rtol=1e-4)
        code = [path.name for path in (tmp_path / target).glob("*.py")]
        assert code == ["modeling_veca.py"]  # the package's own files are not copied


def test_processor_is_preprocess(folder: Path, photo: Image.Image) -> None:
    processor = AutoImageProcessor.from_pretrained(folder)
    assert type(processor) is integration.VecaImageProcessor
    for size in (64, 512):
        ours = veca.preprocess(photo, size, 16)
        theirs = processor(photo, size=size, return_tensors="pt").pixel_values
        torch.testing.assert_close(theirs, ours, atol=1e-6, rtol=0)
    array = np.asarray(photo)
    for same in (array, array.transpose(2, 0, 1), torch.from_numpy(array.copy())):
        torch.testing.assert_close(
            processor(same, size=64, return_tensors="pt").pixel_values, veca.preprocess(photo, 64, 16)
        )
    exact = processor([photo, photo], return_tensors="np", size={"height": 32, "width": 48})
    assert exact.pixel_values.shape == (2, 3, 32, 48)


def test_processor_keeps_its_settings_and_refuses_what_it_cannot_do(photo: Image.Image, tmp_path: Path) -> None:
    processor = integration.VecaImageProcessor(size=72, do_center_crop=True, crop_size=64, patch_size=14)
    processor.save_pretrained(tmp_path)
    again = AutoImageProcessor.from_pretrained(tmp_path)
    assert again.to_dict() == processor.to_dict()
    assert again(photo, return_tensors="pt").pixel_values.shape == (1, 3, 64, 64)
    assert AutoImageProcessor.from_pretrained(tmp_path, size=200).size == {"shortest_edge": 200}
    with pytest.raises(ValueError, match="different sizes"):
        integration.VecaImageProcessor()([photo, photo.rotate(90, expand=True)], return_tensors="pt")
    with pytest.raises(ValueError, match="does not know do_pad"):
        processor(photo, do_pad=True)
    with pytest.raises(ValueError, match="shortest_edge"):
        integration.VecaImageProcessor(size={"longest_edge": 3})
    with pytest.raises(ValueError, match="needs a crop_size"):
        integration.VecaImageProcessor(do_center_crop=True)(photo)


def test_processor_moves_masks_with_their_image(photo: Image.Image) -> None:
    mask = np.zeros((60, 80), np.uint8)
    mask[:, 40:] = 7
    inputs = integration.VecaImageProcessor(size=32)(photo, segmentation_maps=mask, return_tensors="pt")
    assert inputs.labels.shape[-2:] == inputs.pixel_values.shape[-2:]
    assert inputs.labels.unique().tolist() == [0, 7]
    assert (inputs.labels == 7).float().mean() == 0.5
    with pytest.raises(ValueError, match="H×W class numbers"):
        integration.VecaImageProcessor()(photo, segmentation_maps=photo)


def probe_head(folder: Path, model: Path, task: str, width: int, outputs: int, **about: object) -> Head:
    """A head as `veca probe` writes it, with random weights."""
    digest = weights_digest(veca.load(model))
    common = {"model": str(model), "weights": digest, "cores": 8, "size": 64, "feature": "as the task has it"}
    head = Head(task, torch.randn(outputs, width) * 0.1, torch.randn(outputs) * 0.1, {**common, **about})
    head.save(folder)
    return head


def test_classification_head_of_a_probe(folder: Path, plain: veca.Veca, photo: Image.Image, tmp_path: Path) -> None:
    names = ["cat", "dog", "cow"]
    head = probe_head(tmp_path / "head", folder, "classify", 192, 3, classes=names, several=False)
    model, processor = integration.from_probe(tmp_path / "head")
    pixels = processor(photo, return_tensors="pt").pixel_values
    assert pixels.shape == (1, 3, 64, 64)
    torch.testing.assert_close(model(pixels).logits, head(plain(pixels, cores=8).cls), atol=1e-5, rtol=0)
    answers = pipeline("image-classification", model=model, image_processor=processor)(photo)
    assert {answer["label"] for answer in answers} == set(names)
    assert sum(answer["score"] for answer in answers) == pytest.approx(1, abs=1e-5)


def test_segmentation_head_of_a_probe(folder: Path, plain: veca.Veca, photo: Image.Image, tmp_path: Path) -> None:
    names = ["sky", "road", "tree", "car"]
    head = probe_head(tmp_path / "head", folder, "segment", 384, 4, classes=names, zoom=1.0)
    model, processor = integration.from_probe(tmp_path / "head")
    square = photo.resize((64, 64))
    pixels = processor(square, return_tensors="pt").pixel_values
    seen = plain(pixels, cores=8)
    expected = head.on_grid(seen.cls[0], seen.patches[0])
    torch.testing.assert_close(model(pixels).logits[0], expected, atol=1e-5, rtol=0)
    labels = torch.full((1, 64, 64), 255)
    labels[:, :9, :] = 2
    resized = torch.nn.functional.interpolate(expected[None], size=(64, 64), mode="bilinear", align_corners=False)
    known = torch.nn.functional.cross_entropy(resized[:, :, :9], labels[:, :9])
    torch.testing.assert_close(model(pixels, labels=labels).loss, known, atol=1e-5, rtol=0)
    found = pipeline("image-segmentation", model=model, image_processor=processor)(photo)
    assert {part["label"] for part in found} <= set(names)
    total = np.sum([np.asarray(part["mask"]) > 0 for part in found], axis=0)
    assert total.shape == (60, 80)
    assert (total == 1).all()


def test_depth_head_of_a_probe(folder: Path, plain: veca.Veca, photo: Image.Image, tmp_path: Path) -> None:
    about = {"kind": "bins", "nearest": 0.5, "farthest": 8.0, "zoom": 1.0, "trim": None}
    head = probe_head(tmp_path / "head", folder, "depth", 384, 32, **about)
    model, processor = integration.from_probe(tmp_path / "head")
    square = photo.resize((64, 64))
    pixels = processor(square, return_tensors="pt").pixel_values
    seen = plain(pixels, cores=8)
    expected = metres(head.on_grid(seen.cls[0], seen.patches[0]), "bins", 0.5, 8.0)
    resized = torch.nn.functional.interpolate(expected[None], size=(64, 64), mode="bilinear", align_corners=False)[:, 0]
    torch.testing.assert_close(model(pixels).predicted_depth, resized, atol=1e-5, rtol=0)
    truth = resized.detach() * 2
    truth[:, 30:] = 0  # unknown
    out = model(pixels, labels=truth)
    assert float(out.loss.detach()) == pytest.approx(
        (0.15**0.5) * float(np.log(2)), rel=1e-4
    )  # a factor of 2 everywhere
    answer = pipeline("depth-estimation", model=model, image_processor=processor)(photo)
    assert answer["predicted_depth"].shape == (60, 80)
    assert answer["depth"].size == (80, 60)
    model.save_pretrained(tmp_path / "depth")
    again = AutoModelForDepthEstimation.from_pretrained(tmp_path / "depth")
    torch.testing.assert_close(again(pixels).predicted_depth, resized, atol=1e-5, rtol=0)


def test_a_head_of_other_weights_is_refused(folder: Path, tmp_path: Path) -> None:
    probe_head(tmp_path / "head", folder, "classify", 192, 2, classes=["a", "b"], several=False)
    about = json.loads((tmp_path / "head/head.json").read_text())
    (tmp_path / "head/head.json").write_text(json.dumps({**about, "weights": "0"}))
    with pytest.raises(ValueError, match="not the weights this head was trained on"):
        integration.from_probe(tmp_path / "head")


def test_feature_extraction_pipeline_on_a_folder_that_veca_wrote(
    folder: Path, plain: veca.Veca, photo: Image.Image, tmp_path: Path
) -> None:
    photo.save(tmp_path / "photo.png")
    extract = pipeline("image-feature-extraction", model=str(folder))
    ours = plain(veca.preprocess(photo, 448, 16))
    whole = extract(str(tmp_path / "photo.png"), pool=True, return_tensors=True)
    torch.testing.assert_close(whole, ours.cls, atol=1e-5, rtol=0)
    tokens = torch.tensor(extract(photo))
    torch.testing.assert_close(tokens[:, 16:], ours.patches, atol=1e-5, rtol=0)


def test_half_precision_weights(plain: veca.Veca, images: torch.Tensor, tmp_path: Path) -> None:
    from veca.weights import save

    save(plain, tmp_path, torch.float16)
    assert AutoModel.from_pretrained(tmp_path).dtype == torch.float16
    model = AutoModel.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(model(images).pooler_output, veca.load(tmp_path)(images).cls, atol=1e-6, rtol=0)
    low = AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16)(images).pooler_output
    cosine = torch.nn.functional.cosine_similarity(low.float(), plain(images).cls).min()
    assert cosine > 0.99


def test_semantic_auto_class(folder: Path, images: torch.Tensor) -> None:
    model = AutoModelForSemanticSegmentation.from_pretrained(folder, num_labels=6)
    assert model(images).logits.shape == (2, 6, 3, 4)
