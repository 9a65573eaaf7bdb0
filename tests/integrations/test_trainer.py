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

pytest.importorskip("accelerate", reason="Trainer needs accelerate")

BREEDS = ("samoyed", "bombay")  # a white dog and a black cat: even a fresh model learns these in a few steps


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


def test_trainer_improves_held_out_accuracy(shared: Path, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments, set_seed

    data = shared / "data" / "pets"
    set_seed(0)
    processor = integration.VecaImageProcessor(size={"height": 64, "width": 64})
    train, test = Pets(data / "train", processor, 24), Pets(data / "test", processor, 12)
    model = integration.VecaForImageClassification.from_plain(
        veca.create_model("veca_tiny", depth=2), id2label=dict(enumerate(BREEDS)), cores=8
    )
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "run"), max_steps=60, per_device_train_batch_size=8, learning_rate=1e-3, seed=0,
        report_to=[], logging_steps=20, save_steps=60, use_cpu=True, gradient_checkpointing=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        model=model, args=arguments, train_dataset=train, eval_dataset=test, compute_metrics=accuracy,
        processing_class=processor,
    )  # fmt: skip
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < before["eval_loss"]
    assert after["eval_accuracy"] >= max(0.8, before["eval_accuracy"])
    saved = tmp_path / "run" / "checkpoint-60"
    again = integration.VecaForImageClassification.from_pretrained(saved)
    pixels = torch.stack([test[0]["pixel_values"], test[-1]["pixel_values"]])
    torch.testing.assert_close(again(pixels).logits, model.eval()(pixels).logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(veca.load(saved)(pixels, cores=8).cls, model.veca(pixels, cores=8).cls)
    assert (saved / "preprocessor_config.json").is_file()
