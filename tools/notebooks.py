"""Run the notebooks and keep what they show, so that a web page shows it too; pictures are made small.

    python tools/notebooks.py                       # all of them
    python tools/notebooks.py --only 1-first        # those whose names begin so

Notebook 2 needs photographs that may be shown and a teacher: without VECA_PHOTOS it gets squares of scikit-image's
photographs, and VECA_TEACHER names the teacher.
"""

from __future__ import annotations

import base64
import io
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import skimage.data
import tyro
from nbclient import NotebookClient
from PIL import Image

from veca.files import write_text

ROOT = Path(__file__).parents[1]
COLOURED = ("astronaut.png", "chelsea.png", "coffee.png", "hubble_deep_field.jpg", "motorcycle_left.png", "rocket.jpg")
WIDEST = 1000  # pixels of a kept picture


@dataclass
class Settings:
    """Run the notebooks and store them with their outputs."""

    only: str = ""
    """how the names of those begin that are run"""


def main() -> None:
    settings = tyro.cli(Settings)
    for path in sorted((ROOT / "notebooks").glob(f"{settings.only}*.ipynb")):
        book = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory() as folder:
            if "VECA_PHOTOS" not in os.environ:
                os.environ["VECA_PHOTOS"] = str(cut_photos(Path(folder) / "photos"))
            client = NotebookClient(book, timeout=3600, resources={"metadata": {"path": folder}})
            client.create_kernel_manager()
            client.km.kernel_spec.argv[0] = sys.executable
            client.execute()
            keep(book, folder)
        write_text(path, nbformat.writes(book) + "\n")
        print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")


def cut_photos(folder: Path, count: int = 60, side: int = 256) -> Path:
    """Squares of scikit-image's coloured photographs; the first of each is the whole photo."""
    import numpy as np

    generator = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for number in range(count):
        for name in COLOURED:
            photo = Image.open(Path(skimage.data.__file__).parent / name).convert("RGB")
            if number:
                x, y = (int(generator.integers(0, length - side + 1)) for length in photo.size)
                photo = photo.crop((x, y, x + side, y + side))
            photo.save(folder / f"{number:03d}-{Path(name).stem}.jpg", quality=92)
    return folder


def keep(book: Any, folder: str) -> None:
    """Of the outputs what a reader wants: no progress bars, no times of cells, no folders of this machine."""
    book.metadata = {name: book.metadata[name] for name in ("kernelspec", "language_info") if name in book.metadata}
    book.metadata.get("language_info", {}).pop("version", None)
    for cell in book.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        for output in cell.outputs:
            if "text" in output:
                output.text = re.sub(rf"{re.escape(folder)}/?", "", output.text)
            data = output.get("data", {})
            if "image/png" in data:
                data["image/png"] = smaller(data["image/png"])
                output.metadata = {}


def smaller(picture: str) -> str:
    """The PNG with at most 256 colours and no wider than a page."""
    image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    if image.width > WIDEST:
        image = image.resize((WIDEST, round(image.height * WIDEST / image.width)), Image.Resampling.LANCZOS)
    small = io.BytesIO()
    image.quantize(256, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


if __name__ == "__main__":
    main()
