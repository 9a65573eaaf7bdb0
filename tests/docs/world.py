"""A folder in which the commands of the docs find what they name: photos, data sets, a teacher and models, all tiny."""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import av
import numpy as np
import tifffile
import torch
from large.files import aperio, cog, ome_zarr
from PIL import Image
from transformers import (
    DepthAnythingConfig,
    DepthAnythingForDepthEstimation,
    Dinov2Config,
    Dinov2Model,
    DINOv3ViTConfig,
    DINOv3ViTModel,
)

import veca
from veca.auto import Calibration, Line

ROOT = Path(__file__).parents[2]
SIDE = 28  # pixels of the images that the commands look at: two by two patches of 14


def build(top: Path) -> Path:
    """`top/main` is where a reader types, `top/shared` is beside it."""
    main = top / "main"
    photos(main / "photos", 6)
    photos(main / "more-photos", 3)
    for name, seed in (("photo", 1), ("a", 2), ("b", 3)):
        picture(seed, 320, 240).save(main / f"{name}.jpg")
    for number in range(7):
        with tarfile.open(main / f"photos/photos-{number:03d}.tar", "w") as shard:
            for path in sorted((main / "photos").glob("*.jpg"))[:3]:
                shard.add(path, path.name)
        (main / f"photos-{number:03d}.tar").symlink_to(f"photos/photos-{number:03d}.tar")
    classes(main / "pets")
    pairs(main / "voc-seg", "masks", "val")
    pairs(main / "nyu-depth", "depth", "test")
    boxes(main / "boxes")
    pairs(main / "voc-instances", "instances", "val")
    video(main)
    scan = np.asarray(picture(4, 112, 98))
    np.save(main / "scan.npy", scan)
    tifffile.imwrite(main / "big.tif", np.asarray(picture(5, 560, 518)), tile=(128, 128), photometric="rgb")
    large = np.asarray(picture(6, 560, 448))
    aperio(main / "slide.svs", large)
    ome_zarr(main / "cells.zarr", large, 3)
    cog(main / "scene.tif", large[..., [0, 1, 2, 0]].astype(np.uint16) * 10 + 1)
    teacher(main / "teacher")
    teacher(main / "teacher/dav2-small-encoder")
    dinov3(main / "dinov3")
    bundled = converted(12)
    bundled.calibration = Calibration(
        (Line(SIDE, bundled.config.bank, 1.0, 1.0, 0.0), Line(SIDE, 8, 0.5, 0.99, 0.1)), 10
    )
    bundled.save(main / "veca-s14")
    (top / "bundled").mkdir()
    (top / "bundled/veca-s14").symlink_to(main / "veca-s14")
    converted(2).save(main / "models/mine")
    converted(2).save(main / "results/start/untrained")
    (top / "shared/data").mkdir(parents=True)
    for name in ("photos", "pets", "voc-seg", "nyu-depth"):
        (top / "shared/data" / name).symlink_to(main / name)
    (top / "shared/teacher").symlink_to(main / "teacher")
    (main / "docs").symlink_to(ROOT / "docs")
    (main / "tools").symlink_to(ROOT / "tools")
    (main / "path/to").mkdir(parents=True)
    (main / "path/to/clone").symlink_to(ROOT)
    (main / "Makefile").symlink_to(ROOT / "Makefile")
    (main / ".venv").symlink_to(sys.prefix)
    return main


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Smooth colours, and a bright square somewhere."""
    generator = np.random.default_rng(seed)
    small = Image.fromarray(generator.integers(0, 255, (4, 5, 3), dtype=np.uint8))
    image = small.resize((width, height), Image.Resampling.BICUBIC)
    x, y = generator.integers(0, height // 2, 2)
    image.paste((255, 255, 255), (int(x), int(y), int(x) + height // 3, int(y) + height // 3))
    return image


def photos(folder: Path, count: int) -> None:
    folder.mkdir(parents=True)
    for number in range(count):
        picture(number, 48, 40).save(folder / f"{number:03d}.jpg")


def classes(folder: Path) -> None:
    for part, count in (("train", 5), ("test", 2)):
        for number, breed in enumerate(("beagle", "siamese")):
            (folder / part / breed).mkdir(parents=True)
            for index in range(count):
                picture(100 * number + index, 40, 40).save(folder / part / breed / f"{part}{index}.jpg")


def boxes(folder: Path) -> None:
    """COCO's JSON: a white square in each photo."""
    for part, count in (("train", 4), ("test", 2)):
        (folder / part).mkdir(parents=True)
        images, things = [], []
        for number in range(count):
            picture(number, 48, 40).save(folder / part / f"{number}.jpg")
            images.append({"id": number, "file_name": f"{number}.jpg", "width": 48, "height": 40})
            things.append({"id": number, "image_id": number, "category_id": 1, "bbox": [8, 8, 13, 13]})
        table = {"images": images, "annotations": things, "categories": [{"id": 1, "name": "square"}]}
        (folder / f"{part}.json").write_text(json.dumps(table))


def video(main: Path) -> None:
    """`DAVIS/` with one sequence of three frames, and the same frames as `clip.mp4`."""
    with av.open(str(main / "clip.mp4"), "w") as file:
        stream = file.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number in range(3):
            image, mask = picture(7, 64, 48), Image.new("L", (64, 48))
            for canvas, colour in ((image, (200, 40, 40)), (mask, 255)):
                canvas.paste(colour, (8 + 6 * number, 8, 36 + 6 * number, 36))
            for kind, canvas in (("JPEGImages", image), ("Annotations", mask)):
                (main / f"DAVIS/{kind}/480p/square").mkdir(parents=True, exist_ok=True)
                canvas.save(main / f"DAVIS/{kind}/480p/square/{number:05d}.png")
            file.mux(stream.encode(av.VideoFrame.from_image(image)))
        file.mux(stream.encode(None))


def pairs(folder: Path, labels: str, test: str) -> None:
    for part, count in (("train", 4), (test, 2)):
        for index in range(count):
            for kind in ("images", labels):
                (folder / part / kind).mkdir(parents=True, exist_ok=True)
            size = (640, 480) if labels == "depth" else (48, 40)  # NYU's evaluation crop is in its own pixels
            picture(index, *size).save(folder / part / f"images/{index}.jpg")
            half = np.zeros((size[1], size[0]), dtype=np.uint8)
            half[:, size[0] // 2 :] = 1 + index % 2
            label = (half.astype(np.uint16) * 900 + 1000) if labels == "depth" else half
            Image.fromarray(label).save(folder / part / labels / f"{index}.png")


def teacher(folder: Path) -> None:
    torch.manual_seed(1)
    shape = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 28, "patch_size": 14}
    shaken(Dinov2Model(Dinov2Config(**shape))).save_pretrained(folder)


def depth_anything() -> DepthAnythingForDepthEstimation:
    """The shape of Depth-Anything-V2, at a hundredth of its size."""
    encoder = {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 3, "image_size": 28, "patch_size": 14}
    backbone = Dinov2Config(**encoder, out_indices=[1, 2, 3, 4], apply_layernorm=True, reshape_hidden_states=False)
    config = DepthAnythingConfig(backbone_config=backbone, reassemble_hidden_size=48, neck_hidden_sizes=[8, 8, 8, 8])
    return DepthAnythingForDepthEstimation(config)


def dinov3(folder: Path) -> None:
    torch.manual_seed(2)
    shape = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}
    shaken(DINOv3ViTModel(DINOv3ViTConfig(**shape, image_size=32, patch_size=16))).save_pretrained(folder)


def converted(depth: int, **changes: Any) -> veca.Veca:
    """The shape of the bundled model's settings, at a hundredth of its size."""
    torch.manual_seed(3)
    shape: dict[str, Any] = {"patch_size": 14, "mlp": "gelu", "mlp_ratio": 4.0, "positions": "table", "table_size": 4}
    return shaken(veca.create_model("veca_tiny", depth=depth, width=48, heads=3, **shape, **changes)).eval()


def shaken(model: torch.nn.Module) -> torch.nn.Module:
    """Larger random weights than a fresh model has, so that every part does something."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model
