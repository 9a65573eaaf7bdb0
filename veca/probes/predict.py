"""A trained head at work: class names and scores, a coloured mask over the photo, or a depth map as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from veca.backbones import Backbone
from veca.errors import InputError
from veca.files import whole_file, write_json
from veca.images import short_side_size
from veca.probes.dense import stitch
from veca.probes.depth import metres
from veca.probes.heads import Head
from veca.probes.pairs import open_trimmed
from veca.probes.segment import palette
from veca.probes.views import View, centre_view, label_box, windows

BEST = 5
OPACITY = 0.6
LEAST = 0.001  # classes that take less of the picture are not listed


def predict(head: Head, backbone: Backbone, images: Sequence[Path], out: Path) -> list[dict[str, Any]]:
    """One result for each image, pictures and results.json in `out`."""
    act = {"classify": classify_one, "segment": segment_one, "depth": depth_one}[head.task]
    names = unique_names(images)
    results = []
    for path, name in zip(images, names, strict=True):
        results.append({"image": str(path), **act(head, backbone, path, out / name)})
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


def classify_one(head: Head, backbone: Backbone, path: Path, _: Path) -> dict[str, Any]:
    """The five best classes; scores add up to 1 over all classes, or are each in 0…1 where several may hold."""
    whole, _patches = backbone(centre_view(path, head.about["size"]).pixels()[None], head.about["cores"])
    logits = head(whole.cpu())[0]
    scores = logits.sigmoid() if head.about["several"] else logits.softmax(0)
    best = scores.topk(min(BEST, len(scores)))
    names = head.about["classes"]
    return {
        "classes": [
            {"class": names[index], "score": round(score, 4)}
            for score, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]
    }


def segment_one(head: Head, backbone: Backbone, path: Path, target: Path) -> dict[str, Any]:
    """`<name>.mask.png` (palette indices) and `<name>.overlay.png`; the share of the picture each class takes."""
    image, logits = whole_image(head, backbone, path)
    colours = palette(len(head.about["classes"])).numpy()
    mask = logits.argmax(0).numpy().astype(np.uint8 if len(colours) <= 256 else np.uint16)
    indexed = Image.fromarray(mask)
    if len(colours) <= 256:
        indexed.putpalette(colours.tobytes())
    names = head.about["classes"]
    shares = {int(value): float((mask == value).mean()) for value in np.unique(mask)}
    largest = sorted((item for item in shares.items() if item[1] >= LEAST), key=lambda item: -item[1])
    seen = [value for value, _ in largest if names[value] != "background"]  # the photo itself shows the background
    covered = Image.fromarray((np.isin(mask, seen) * round(255 * OPACITY)).astype(np.uint8))
    overlay = Image.composite(Image.fromarray(colours[mask]), image, covered)
    legend = [(names[value], tuple(colours[value].tolist())) for value in seen]
    save(indexed, target.with_name(target.name + ".mask.png"))
    save(with_legend(overlay, legend), target.with_name(target.name + ".overlay.png"))
    return {
        "mask": target.name + ".mask.png",
        "overlay": target.name + ".overlay.png",
        "classes": [{"class": names[value], "share": round(share, 4)} for value, share in largest],
    }


def depth_one(head: Head, backbone: Backbone, path: Path, target: Path) -> dict[str, Any]:
    """`<name>.depth.png` (16-bit, millimetres) and `<name>.depth.colour.png`, photo beside map with its scale."""
    image, guess = whole_image(head, backbone, path)
    values = guess[0].numpy()
    stored = np.clip(np.rint(values * 1000), 0, 65535).astype(np.uint16)
    save(Image.fromarray(stored), target.with_name(target.name + ".depth.png"))
    draw_depth(image, values, target.with_name(target.name + ".depth.colour.png"))
    return {
        "depth": target.name + ".depth.png",
        "picture": target.name + ".depth.colour.png",
        "metres": {"nearest": round(float(values.min()), 3), "farthest": round(float(values.max()), 3)},
    }


def whole_image(head: Head, backbone: Backbone, path: Path) -> tuple[Image.Image, Tensor]:
    """The upright image and the head's answer at its size (K′×H×W), windows averaged where they overlap."""
    about = head.about
    trim = tuple(about["trim"]) if about.get("trim") else None
    image = open_trimmed(path, trim)
    side, short = about["size"], round(about["size"] * about["zoom"])
    resized = short_side_size(*image.size, short, str(path))
    parts = []
    for at in windows(*resized, side):
        whole, patches = backbone(View(path, short, side, at, trim=trim).pixels()[None], about["cores"])
        maps = head.on_grid(whole[0].cpu(), patches[0].cpu())
        if head.task == "depth":
            maps = metres(maps, about["kind"], about["nearest"], about["farthest"])
        parts.append((label_box(at, side, resized, image.size), maps))
    with torch.inference_mode():
        return image, stitch(parts, (image.height, image.width))


def with_legend(image: Image.Image, entries: Sequence[tuple[str, tuple[int, ...]]]) -> Image.Image:
    """The picture with a strip of named colours below it."""
    row, pad = 18, 6
    place, x, y = [], pad, pad
    probe = ImageDraw.Draw(image)
    for name, colour in entries:
        width = row + round(probe.textlength(name)) + 2 * pad
        if x + width > image.width and x > pad:
            x, y = pad, y + row
        place.append((x, y, name, colour))
        x += width
    canvas = Image.new("RGB", (image.width, image.height + y + row + pad), "white")
    canvas.paste(image)
    draw = ImageDraw.Draw(canvas)
    for x, y, name, colour in place:
        top = image.height + y
        draw.rectangle((x, top, x + 12, top + 12), fill=colour, outline="black")
        draw.text((x + row, top), name, fill="black")
    return canvas


def draw_depth(image: Image.Image, values: np.ndarray[Any, Any], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = 4.0
    figure = Figure(figsize=(2.3 * height * image.width / image.height, height + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    photo, shown = figure.subplots(1, 2)
    photo.imshow(image)
    drawn = shown.imshow(values, cmap="turbo_r")
    figure.colorbar(drawn, ax=shown, label="metres", shrink=0.8)
    for axes in (photo, shown):
        axes.set_axis_off()
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=110)


def save(image: Image.Image, path: Path) -> None:
    with whole_file(path) as temporary:
        image.save(temporary)


def check_images(images: Sequence[Path]) -> None:
    """Name every image that is not there before any model is loaded."""
    if not images:
        raise InputError("give at least one image")
    for path in images:
        if not path.is_file():
            raise InputError(f"{path}: no such file")
