"""`Trainer` fine-tunes a VECA model on real photographs, and held-out accuracy rises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

import veca
import veca.integrations.transformers as integration
from veca.distill.convert import copy_teacher, student_config
from veca.teachers import load_teacher

pytest.importorskip("accelerate", reason="Trainer needs accelerate")

BREEDS = ("samoyed", "bombay")  # a white dog and a black cat


class Pets(Dataset[dict[str, Any]]):
    def __init__(self, folder: Path, processor: integration.VecaImageProcessor, limit: int) -> None:
        classes = [(sorted((folder / name).iterdir())[:limit], label) for label, name in enumerate(BREEDS)]
        paths = [(path, label) for found, label in classes for path in found]
        self.items = []
        for path, label in paths:
            with Image.open(path) as image:
                pixels = processor(image.convert("RGB"), return_tensors="pt").pixel_values[0]
            self.items.append({"pixel_values": pixels, "labels": label})

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.items[index]


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((np.argmax(prediction.predictions, -1) == prediction.label_ids).mean())}


@pytest.mark.end_to_end
def test_trainer_improves_held_out_accuracy(shared: Path, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments, set_seed

    data, teacher = shared / "data" / "pets", load_teacher(shared / "teacher" / "dav2-small-encoder")
    set_seed(0)
    processor = integration.VecaImageProcessor(size={"height": 84, "width": 84}, patch_size=14)
    train, test = Pets(data / "train", processor, 16), Pets(data / "test", processor, 12)
    plain = veca.Veca(student_config(teacher, attention="dense", rope_zero_fraction=1.0, bank=1))
    copy_teacher(plain, teacher)
    model = integration.VecaForImageClassification.from_plain(plain, id2label=dict(enumerate(BREEDS)))
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "run"), max_steps=16, per_device_train_batch_size=8, learning_rate=2e-4, seed=0,
        report_to=[], logging_steps=8, save_steps=16, use_cpu=True, gradient_checkpointing=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        model=model, args=arguments, train_dataset=train, eval_dataset=test, compute_metrics=accuracy,
        processing_class=processor,
    )  # fmt: skip
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < before["eval_loss"]
    assert after["eval_accuracy"] > before["eval_accuracy"]
    saved = tmp_path / "run" / "checkpoint-16"
    again = integration.VecaForImageClassification.from_pretrained(saved)
    pixels = torch.stack([test[0]["pixel_values"], test[-1]["pixel_values"]])
    torch.testing.assert_close(again(pixels).logits, model.eval()(pixels).logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(veca.load(saved)(pixels).cls, model.veca(pixels).cls)
    assert (saved / "preprocessor_config.json").is_file()
