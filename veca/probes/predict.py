"""A trained head at work on photos: what its task says and draws."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from veca.backbones import Backbone
from veca.errors import InputError
from veca.files import write_json
from veca.tasks import find_task
from veca.tasks.base.heads import SavedHead


def predict(head: SavedHead, backbone: Backbone, images: Sequence[Path], out: Path) -> list[dict[str, Any]]:
    """One result for each image, pictures and results.json in `out`."""
    task, results = find_task(head.task), []
    for path, name in zip(images, unique_names(images), strict=True):
        results.append({"image": str(path), **task.answer(head, backbone, path, out / name)})
        print(json.dumps(results[-1], ensure_ascii=False), flush=True)
    write_json(out / "results.json", results)
    return results


def unique_names(images: Sequence[Path]) -> list[str]:
    """File stems for the pictures; equal ones get a number."""
    names: list[str] = []
    for path in images:
        number, name = 1, path.stem
        while name in names:
            number += 1
            name = f"{path.stem}-{number}"
        names.append(name)
    return names


def check_images(images: Sequence[Path]) -> None:
    """Name every image that is not there before any model is loaded."""
    if not images:
        raise InputError("give at least one image")
    for path in images:
        if not path.is_file():
            raise InputError(f"{path}: no such file")
