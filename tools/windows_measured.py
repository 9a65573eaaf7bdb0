"""Whether windows help to find similar things in a picture much larger than the model was trained on, and whether the
whole picture's cores, joined to each window's own, help further (docs/huge.md).

    python tools/windows_measured.py ../shared/data/voc-seg/val --mosaics 6 --out DIR

Nine photographs of three kinds of object make one picture of 1344². For patches of an object: how many of the 20 most
similar patches in other photographs show the same kind? DIR gets windows.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import veca
from veca import table
from veca.block import CoreSide
from veca.files import write_json
from veca.images import to_tensor
from veca.large.picture import Strips
from veca.scan import Scan
from veca.windows import starts, tent, windowed

ACROSS = 3


def mosaics(folder: Path, count: int, cell: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pictures, and the kind of object of every pixel; three photographs of each of three kinds."""
    of_kind: dict[int, list[Path]] = {}
    for mask in sorted((folder / "masks").glob("*.png")):
        values = np.asarray(Image.open(mask))
        shown, sizes = np.unique(values[(values > 0) & (values < 255)], return_counts=True)
        if len(shown) and sizes.max() > 0.1 * values.size:
            of_kind.setdefault(int(shown[sizes.argmax()]), []).append(mask)
    generator = np.random.default_rng(0)
    kinds = [kind for kind, masks in of_kind.items() if len(masks) >= 3] or list(of_kind)
    for _ in range(count):
        chosen = []
        for kind in generator.choice(kinds, 3, replace=len(kinds) < 3).tolist():
            few = len(of_kind[kind]) < 3
            chosen += [of_kind[kind][place] for place in generator.choice(len(of_kind[kind]), 3, replace=few)]
        generator.shuffle(chosen)
        picture = np.zeros((ACROSS * cell, ACROSS * cell, 3), np.uint8)
        labels = np.zeros((ACROSS * cell, ACROSS * cell), np.uint8)
        for number, mask in enumerate(chosen):
            y, x = (part * cell for part in divmod(number, ACROSS))
            photo = Image.open(next((folder / "images").glob(f"{mask.stem}.*"))).convert("RGB")
            picture[y : y + cell, x : x + cell] = photo.resize((cell, cell), Image.Resampling.BICUBIC)
            labels[y : y + cell, x : x + cell] = Image.open(mask).resize((cell, cell), Image.Resampling.NEAREST)
        yield picture, labels


@torch.inference_mode()
def joined(model: veca.Veca, scan: Scan, images: Tensor) -> Tensor:
    """A forward pass in which the patches look along these cores and those of the whole picture."""
    x, grid = model.patch_embed(images)
    x = x + table.on_lattice(model.table, *(axis(n) for n in (grid[1], grid[0])))
    tokens, state, pace = model.bank(64, len(images))
    for index, (block, whole) in enumerate(zip(model.blocks, scan.path, strict=True)):
        if index:
            state = model.bank.move(state, pace, tokens, index)
        side, view = block.ask(tokens, None), block.norm_attn(x)
        seen = block.read(side, view, None)
        more = [
            torch.cat((own, far.expand(len(images), -1, -1, -1)), 2)
            for own, far in zip(side[1:], whole[1:], strict=True)
        ]
        x, tokens = block.look(x, view, None, CoreSide(side.query, *more)), block.settle(tokens, side, seen)
    return model.output(x).unflatten(1, grid)


def axis(count: int) -> Tensor:
    return (torch.arange(count) + 0.5) / count * 2 - 1


def join_windows(model: veca.Veca, picture: np.ndarray, cell: int) -> np.ndarray:
    scan, n = model.scan(picture), cell // model.patch_size
    whole = scan.grid[0]
    total, weights = np.zeros((whole, whole, model.config.feature_width)), np.zeros((whole, whole, 1))
    weight = (tent(n)[:, None] * tent(n))[..., None]
    for y in starts(whole, n):
        for x in starts(whole, n):
            p = model.patch_size
            part = to_tensor(Image.fromarray(picture[y * p : (y + n) * p, x * p : (x + n) * p]))[None]
            total[y : y + n, x : x + n] += joined(model, scan, part)[0].numpy() * weight
            weights[y : y + n, x : x + n] += weight
    return total / weights


def judge(features: np.ndarray, labels: np.ndarray, patch: int, cell: int) -> tuple[float, float]:
    """Precision at 20 in other photographs; mean cosine between patches."""
    side = len(features)
    cells = labels[: side * patch, : side * patch].reshape(side, patch, side, patch).transpose(0, 2, 1, 3)
    kind = cells[:, :, patch // 2, patch // 2].ravel()
    row, column = np.divmod(np.arange(side * side), side)
    photo = row * patch // cell * ACROSS + column * patch // cell
    rows = features.reshape(side * side, -1)
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    queries = np.random.default_rng(0).choice(np.flatnonzero((kind > 0) & (kind < 255)), 300)
    cosine = rows[queries] @ rows.T
    mean = float(cosine.mean())
    cosine[photo[queries][:, None] == photo] = -2
    best = np.argpartition(-cosine, 20, axis=1)[:, :20]
    return float((kind[best] == kind[queries][:, None]).mean()), mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--mosaics", type=int, default=6)
    parser.add_argument("--cell", type=int, default=448)
    parser.add_argument("--model", default="veca-s14")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    model = veca.load(given.model)
    found: dict[str, list[tuple[float, float]]] = {}
    for picture, labels in mosaics(given.data, given.mosaics, given.cell):
        strips = Strips(veca.open_source(picture), model.patch_size)
        whole = model.stream(picture).patches[0]
        arms = {
            "one pass over the whole": whole.unflatten(0, (-1, strips.width // model.patch_size)).numpy(),
            f"windows of {given.cell}": np.concatenate([rows for _, rows in windowed(model, strips, given.cell)]),
            "windows and the whole's cores": join_windows(model, picture, given.cell),
        }
        for name, features in arms.items():
            found.setdefault(name, []).append(
                judge(np.asarray(features, dtype=np.float32), labels, model.patch_size, given.cell)
            )
        print(" ".join(f"{scores[-1][0]:.3f}" for scores in found.values()), flush=True)
    rows = []
    for name, scores in found.items():
        precision, mean = (round(float(value), 4) for value in np.mean(scores, axis=0))
        rows.append({"model": Path(given.model).name, "way": name, "precision_20": precision, "mean_cosine": mean})
        print(f"| {name} | {precision:.3f} | {mean:.2f} |")
    write_json(given.out / "windows.json", rows)


if __name__ == "__main__":
    main()
