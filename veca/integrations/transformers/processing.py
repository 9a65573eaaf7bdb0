"""The image processor: `veca.preprocess` as `transformers` wants it. Needs no torchvision."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers.image_processing_utils import BaseImageProcessor, BatchFeature
from transformers.image_utils import infer_channel_dimension_format, make_flat_list_of_images
from transformers.processing_utils import ImagesKwargs

from veca.errors import InputError
from veca.images import MEAN, SIZE, STD, grid_size, open_image, short_side_size
from veca.remote import PROCESSOR_MAP, write_code
from veca.tasks.detect.head import decode
from veca.tasks.masks.decode import Segment, instances, panoptic, semantic


class VecaImagesKwargs(ImagesKwargs, total=False):  # type: ignore[misc, call-arg]
    patch_size: int


class VecaImageProcessor(BaseImageProcessor):  # type: ignore[misc]
    """Resize (bicubic), perhaps crop, scale to 0…1, normalise.

    `size` is `{"shortest_edge": s}` (the aspect ratio is kept and both sides are rounded to whole patches, as
    `veca.preprocess` does) or `{"height": h, "width": w}`. With `do_center_crop` the short side is resized exactly and
    `crop_size` is cut from the middle, as the classification probe does.
    """

    model_input_names = ("pixel_values",)
    valid_kwargs = VecaImagesKwargs

    def __init__(
        self,
        do_resize: bool = True,
        size: dict[str, int] | int | None = None,
        do_center_crop: bool = False,
        crop_size: dict[str, int] | int | None = None,
        do_normalize: bool = True,
        image_mean: Sequence[float] = MEAN,
        image_std: Sequence[float] = STD,
        patch_size: int = 16,
        label_ids_to_fuse: Sequence[int] = (),
        **kwargs: Any,
    ) -> None:
        for stored in ("image_processor_type", "auto_map"):
            kwargs.pop(stored, None)
        super().__init__(**kwargs)
        self.do_resize = do_resize
        self.size = as_size(SIZE if size is None else size)
        self.do_center_crop = do_center_crop
        self.crop_size = None if crop_size is None else as_size(crop_size, square=True)
        self.do_normalize = do_normalize
        self.image_mean, self.image_std = list(image_mean), list(image_std)
        self.patch_size = patch_size
        self.label_ids_to_fuse = list(label_ids_to_fuse)  # stuff, where a call does not name it

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "auto_map": PROCESSOR_MAP}

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> Any:
        """As in `transformers`, with the file that lets the folder be loaded by `trust_remote_code=True`."""
        saved = super().save_pretrained(save_directory, **kwargs)
        write_code(save_directory)
        return saved

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoImageProcessor") -> None:
        """Nothing: it would make `save_pretrained` copy the package's files into each folder."""

    def preprocess(
        self,
        images: Any,  # one or a list of paths, PIL images, H×W×3 or 3×H×W arrays or tensors
        segmentation_maps: Any = None,  # likewise H×W class numbers; they become `labels`
        return_tensors: str | None = None,
        **changes: Any,  # any argument of __init__, for this call
    ) -> BatchFeature:
        unknown = set(changes) - {"do_resize", "size", "do_center_crop", "crop_size", "do_normalize", "image_mean",
                                  "image_std", "patch_size"}  # fmt: skip
        if unknown:
            raise InputError(f"VecaImageProcessor does not know {', '.join(sorted(unknown))}")
        if changes:
            same = {name: value for name, value in self.to_dict().items() if name not in changes}
            return type(self)(**{**same, **changes}).preprocess(images, segmentation_maps, return_tensors)
        pictures = [self.placed(as_image(image), Image.Resampling.BICUBIC) for image in listed(images)]
        data: dict[str, Any] = {"pixel_values": [self.values(picture) for picture in pictures]}
        if segmentation_maps is not None:
            maps = [self.placed(as_map(one), Image.Resampling.NEAREST) for one in listed(segmentation_maps, 2)]
            data["labels"] = [np.asarray(one).astype(np.int64) for one in maps]
        if return_tensors is not None and len({picture.size for picture in pictures}) > 1:
            raise InputError(
                "these images have different sizes after resizing: give one at a time, or "
                "size={'height': …, 'width': …}, or do_center_crop=True with a crop_size"
            )
        return BatchFeature(data=data, tensor_type=return_tensors)

    def placed(self, image: Image.Image, resample: Image.Resampling) -> Image.Image:
        """Resized and cropped."""
        if self.do_resize:
            image = image.resize(self.resized(*image.size), resample)
        if self.do_center_crop:
            if self.crop_size is None:
                raise InputError("do_center_crop needs a crop_size")
            height, width = self.crop_size["height"], self.crop_size["width"]
            left, top = (image.width - width) // 2, (image.height - height) // 2
            image = image.crop((left, top, left + width, top + height))
        return image

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) before cropping."""
        if "shortest_edge" not in self.size:
            return self.size["width"], self.size["height"]
        short = self.size["shortest_edge"]
        if self.do_center_crop:
            return short_side_size(width, height, short)
        h, w = grid_size(width, height, short, self.patch_size)
        return w * self.patch_size, h * self.patch_size

    def values(self, image: Image.Image) -> np.ndarray[Any, Any]:  # 3×H×W float32
        pixels = np.asarray(image, np.float32).transpose(2, 0, 1) / np.float32(255)
        if self.do_normalize:
            mean, std = (np.asarray(part, np.float32)[:, None, None] for part in (self.image_mean, self.image_std))
            pixels = (pixels - mean) / std
        return np.ascontiguousarray(pixels)

    def post_process_semantic_segmentation(
        self, outputs: Any, target_sizes: Sequence[tuple[int, int]] | None = None
    ) -> list[Tensor]:
        """Class numbers, H×W for each image; at the size of the patch grid without `target_sizes` (height, width)."""
        if "class_queries_logits" in outputs:
            return [semantic(*one) for one in queried(outputs, target_sizes)]
        return [maps.argmax(0) for maps in sized(outputs.logits, target_sizes)]

    def post_process_instance_segmentation(
        self,
        outputs: Any,  # of VecaForUniversalSegmentation
        threshold: float = 0.5,  # least score
        target_sizes: Sequence[tuple[int, int]] | None = None,
        **_: Any,  # what only panoptic segments have
    ) -> list[dict[str, Any]]:
        """`segmentation` (H×W, −1 where nothing is) and `segments_info` for each image; the surest on top."""
        return [
            told([segment for segment in instances(*one) if segment.score >= threshold][::-1], one[2], 0)
            for one in queried(outputs, target_sizes)
        ]

    def post_process_panoptic_segmentation(
        self,
        outputs: Any,
        threshold: float = 0.5,  # least score
        mask_threshold: float = 0.5,
        overlap_mask_area_threshold: float = 0.5,  # least share of its own mask that a segment must keep
        label_ids_to_fuse: Collection[int] | None = None,  # stuff: one segment a class; None: the processor's own
        target_sizes: Sequence[tuple[int, int]] | None = None,
    ) -> list[dict[str, Any]]:
        """`segmentation` (H×W, 0 where nothing is) and `segments_info` for each image.

        Of a semantic model each class is a segment, so that the pipeline, which asks for this first, serves both.
        """
        if "class_queries_logits" not in outputs:
            maps = self.post_process_semantic_segmentation(outputs, target_sizes)
            return [
                {
                    "segmentation": one + 1,
                    "segments_info": [
                        {"id": kind + 1, "label_id": kind, "was_fused": False, "score": None}
                        for kind in one.unique().tolist()
                    ],
                }
                for one in maps
            ]
        stuff = self.label_ids_to_fuse if label_ids_to_fuse is None else label_ids_to_fuse
        covered = overlap_mask_area_threshold
        return [
            told(panoptic(classes, masks, size, stuff, threshold, mask_threshold, covered), size, 1)
            for classes, masks, size in queried(outputs, target_sizes)
        ]

    def post_process_depth_estimation(
        self, outputs: Any, target_sizes: Sequence[tuple[int, int]] | None = None
    ) -> list[dict[str, Tensor]]:
        """Metres, H×W for each image; at the input's size without `target_sizes` (height, width)."""
        return [{"predicted_depth": maps[0]} for maps in sized(outputs.predicted_depth[:, None], target_sizes)]

    def post_process_object_detection(
        self, outputs: Any, threshold: float = 0.5, target_sizes: Any = None
    ) -> list[dict[str, Tensor]]:
        """scores, labels and boxes (left, top, right, bottom) of each image, best first; the boxes are in pixels of
        `target_sizes` (height, width), or shares without it.
        """
        found = decode(outputs.logits, outputs.pred_boxes)
        if target_sizes is not None and len(target_sizes) != len(found):
            raise InputError(f"there are {len(found)} images and {len(target_sizes)} target sizes")
        results = []
        for number, (scores, labels, boxes) in enumerate(found):
            if target_sizes is not None:
                height, width = (int(side) for side in target_sizes[number])
                boxes = boxes * boxes.new_tensor([width, height, width, height])
            kept = scores > threshold
            results.append({"scores": scores[kept], "labels": labels[kept], "boxes": boxes[kept]})
        return results


def queried(outputs: Any, sizes: Sequence[tuple[int, int]] | None) -> list[tuple[Tensor, Tensor, tuple[int, int]]]:
    """Classes, masks and size of the answer for each image."""
    classes, masks = (
        part.detach().float().cpu() for part in (outputs.class_queries_logits, outputs.masks_queries_logits)
    )
    if sizes is None:
        sizes = [(masks.shape[-2], masks.shape[-1])] * len(masks)
    if len(sizes) != len(masks):
        raise InputError(f"there are {len(masks)} images and {len(sizes)} target sizes")
    each = [(int(height), int(width)) for height, width in sizes]
    return list(zip(classes, masks, each, strict=True))


def told(segments: Sequence[Segment], size: tuple[int, int], first: int) -> dict[str, Any]:
    """Segments as `transformers` hands them on, numbered from `first`; later ones cover earlier ones."""
    numbers = torch.full(size, first - 1, dtype=torch.int32)
    rows = []
    for number, segment in enumerate(segments, first):
        numbers[segment.mask] = number
        rows.append(
            {"id": number, "label_id": segment.label, "was_fused": segment.fused, "score": round(segment.score, 6)}
        )
    return {"segmentation": numbers, "segments_info": rows}


def sized(maps: Tensor, sizes: Sequence[tuple[int, int]] | None) -> list[Tensor]:
    """B×K×h×w → K×H×W for each image, bilinear."""
    if sizes is None:
        return list(maps)
    if len(sizes) != len(maps):
        raise InputError(f"there are {len(maps)} images and {len(sizes)} target sizes")
    return [
        nn.functional.interpolate(one[None].float(), size=tuple(map(int, size)), mode="bilinear", align_corners=False)[
            0
        ]
        for one, size in zip(maps, sizes, strict=True)
    ]


def as_size(size: Any, square: bool = False) -> dict[str, int]:
    """A number is the short side (of a crop: both sides); a dictionary stays what it is."""
    if isinstance(size, int):
        return {"height": size, "width": size} if square else {"shortest_edge": size}
    given = {name: int(value) for name, value in dict(size).items() if value is not None}
    if set(given) not in ({"shortest_edge"}, {"height", "width"}) or min(given.values()) < 1:
        raise InputError(f"a size is {{'shortest_edge': s}} or {{'height': h, 'width': w}}, not {size!r}")
    return given


def listed(images: Any, ndim: int = 3) -> list[Any]:
    """A list of images from one or several; paths and bytes count as images too."""
    if isinstance(images, (str, Path, bytes)):
        return [images]
    if isinstance(images, (list, tuple)) and images and isinstance(images[0], (str, Path, bytes)):
        return list(images)
    return list(make_flat_list_of_images(images, expected_ndims=ndim))


def as_image(image: Any) -> Image.Image:
    """PIL RGB of whatever `transformers` users pass: channels first or last, tensors too."""
    if isinstance(image, torch.Tensor):
        image = image.detach().cpu().numpy()
    if isinstance(image, np.ndarray) and image.ndim == 3:
        layout = infer_channel_dimension_format(image, num_channels=(1, 3, 4))
        image = image.transpose(1, 2, 0) if str(layout.value) == "channels_first" else image
    return open_image(image)


def as_map(labels: Any) -> Image.Image:
    """A map of class numbers as an image that can be resized without mixing them."""
    values = labels.detach().cpu().numpy() if isinstance(labels, torch.Tensor) else np.asarray(labels)
    if values.ndim != 2:
        raise InputError(f"a segmentation map is H×W class numbers, not {'×'.join(map(str, values.shape))}")
    return Image.fromarray(values.astype(np.int32))
