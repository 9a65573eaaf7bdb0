"""Small real runs for the tests: a tiny teacher, a few generated photographs, and processes that can be killed."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import Dinov2Config, Dinov2Model

from veca.distill.settings import Distillation
from veca.recipes.convert import Convert

# Processes are forked from a server that has imported everything but never run a thread: they start in milliseconds.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["distill.runs", "veca.distill.engine", "transformers.models.dinov2.modeling_dinov2", "torch.utils.tensorboard"]
)


PATIENCE = 120  # seconds that a run may take


def make_teacher(folder: Path, depth: int = 2) -> Path:
    """A DINOv2 of two small layers with random weights; large enough weights that blocks do something."""
    torch.manual_seed(1)
    config = Dinov2Config(
        hidden_size=32, num_hidden_layers=depth, num_attention_heads=2, mlp_ratio=2, image_size=28, patch_size=7
    )
    model = Dinov2Model(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3 if parameter.ndim > 1 else 0.5)
    model.save_pretrained(folder)
    return folder


def make_photos(folder: Path, count: int, side: int = 40) -> Path:
    """Smooth colours with a bright square somewhere: no two alike."""
    folder.mkdir(parents=True)
    for number in range(count):
        generator = np.random.default_rng(number)
        small = Image.fromarray(generator.integers(0, 255, (4, 5, 3), dtype=np.uint8))
        image = small.resize((side + 8, side), Image.Resampling.BICUBIC)
        x, y = generator.integers(0, side - 12, 2)
        image.paste((255, 255, 255), (int(x), int(y), int(x) + 10, int(y) + 10))
        image.save(folder / f"{number:03d}.png")
    return folder


def tiny_settings(root: Path, out: Path, **changes: Any) -> Distillation:
    """A run of seconds that uses everything `convert` uses: hints, forcing, clipping, two resolutions."""
    values: dict[str, Any] = {
        "train": (str(root / "photos"),),
        "teacher": str(root / "teacher"),
        "out": out,
        "steps": 12,
        "warmup_steps": 2,
        "batch": 4,
        "budgets": (2, 4, 8),
        "budget_weights": (1, 1, 1),
        "resolutions": (28,),
        "late_from": 0.7,
        "late_resolutions": (28, 35),
        "late_resolution_weights": (1, 1),
        "trivial_augment": True,
        "standardise_images": 8,
        "workers": 0,
        "log_every": 1,
        "checkpoint_minutes": 0,
        "val_budgets": (2, 8),
        "val_resolutions": (),
        "device": "cpu",
        "autocast": "off",  # the same numbers on every machine
        **changes,
    }
    return Convert(**values)


def _train(settings: Distillation, environment: dict[str, str], delay: float) -> None:
    faulthandler.dump_traceback_later(PATIENCE - 20)  # where a run that does not end is
    os.environ.update(environment)
    os.chdir(environment.get("PWD", "."))
    torch.set_num_threads(1)
    from veca.cli import main
    from veca.distill import engine
    from veca.distill.distiller import Distiller
    from veca.recipes import command

    if delay:  # time for the test to strike between two steps
        rate = Distiller.rate

        def slow(job: Distiller, step: int) -> float:
            time.sleep(delay)
            return rate(job, step)

        Distiller.rate = slow  # type: ignore[method-assign]
    command.main = lambda _: engine.train(settings) and None  # type: ignore[assignment]
    raise SystemExit(main(["distill"]))  # as the command does: a user's mistake is one line and status 2


def start(settings: Distillation, environment: dict[str, str] | None = None, delay: float = 0.0) -> BaseProcess:
    """The run in a process of its own."""
    process = SERVER.Process(target=_train, args=(settings, environment or {}, delay))
    process.start()
    return process


def wait(process: BaseProcess, timeout: float = PATIENCE) -> int:
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError("the run did not end")
    return process.exitcode


def kill(process: BaseProcess) -> None:
    """SIGKILL, and until it is gone. Its data workers outlive it for a few seconds, and a join would wait for them."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(process.pid, 0)
            time.sleep(0.005)


def wait_for_step(out: Path, step: int, process: BaseProcess, timeout: float = 120) -> None:
    """Until the run has recorded a step."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        metrics = out / "metrics.jsonl"
        if metrics.is_file() and f'"step": {step},' in metrics.read_text():
            return
        if process.exitcode is not None:
            raise RuntimeError(f"the run ended with {process.exitcode} before step {step}")
        time.sleep(0.005)
    raise TimeoutError(f"no step {step}")


def weights(out: Path, folder: str = "last") -> dict[str, bytes]:
    """The bits of every tensor."""
    tensors = load_file(out / folder / "model.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
