"""Published data sets: where their files lie, what their labels mean, which pixels count.

A preset also fits a folder in our own plain layout, `{train,val}/{images,masks}` or `{train,test}/{images,depth}`: then
only its labels' meaning is used. Anything without a preset uses that layout and says what differs on the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from veca.errors import InputError


@dataclass(frozen=True)
class Layout:
    """Patterns below the data folder; `*` is what an image and its label share, `{split}` is `train` or `test`."""

    images: str
    labels: str
    train: str = "train"
    test: str = "val"
    names: str = ""  # a text file with one shared name a line; without it, every image that is there
    pairs: str = ""  # a text file with `image label …` a line, relative to the parts of the patterns before `*`


@dataclass(frozen=True)
class SegmentPreset:
    layout: Layout
    classes: int
    names: tuple[str, ...] = ()
    ignore: int = 255
    offset: int = 0  # added to every stored label but `ignore`; what falls below 0 is ignored too
    ids: Mapping[int, int] = field(default_factory=dict)  # stored label → class; others are ignored. Empty: as stored
    zoom: float = 1.0  # the image's short side, in crops


@dataclass(frozen=True)
class DepthPreset:
    layout: Layout
    scale: float  # stored value × scale = metres
    nearest: float  # metres; depth outside (nearest, farthest) is not counted
    farthest: float
    crop: tuple[float, float, float, float] = (0.0, 0.0, 1.0, 1.0)  # left, top, right, bottom of what counts, of 1
    trim: tuple[int, int] | None = None  # first of all cut image and label to (height, width): bottom, centred
    zoom: float = 1.0


VOC = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable",
    "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip
CITYSCAPES = (
    "road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign", "vegetation", "terrain",
    "sky", "person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle",
)  # fmt: skip
CITYSCAPES_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
# COCO-Stuff's maps store 0…181; eleven of these numbers were never used for an annotation.
COCO_UNUSED = frozenset((11, 25, 28, 29, 44, 65, 67, 68, 70, 82, 90))
COCO_THINGS, COCO_ALL = 91, 182
COCO_USED = tuple(value for value in range(COCO_ALL) if value not in COCO_UNUSED)
COCO = Layout("images/{split}/*.jpg", "annotations/{split}/*.png", "train2017", "val2017")

SEGMENT: dict[str, SegmentPreset] = {
    "voc2012": SegmentPreset(
        Layout("JPEGImages/*.jpg", "SegmentationClass/*.png", names="ImageSets/Segmentation/{split}.txt"), 21, VOC
    ),
    "context60": SegmentPreset(
        Layout("JPEGImages/*.jpg", "SegmentationClassContext/*.png", names="ImageSets/SegmentationContext/{split}.txt"),
        60,
    ),
    "ade20k": SegmentPreset(
        Layout("images/{split}/*.jpg", "annotations/{split}/*.png", "training", "validation"), 150, offset=-1
    ),
    "coco_stuff": SegmentPreset(COCO, 171, ids={value: index for index, value in enumerate(COCO_USED)}),
    # Things are classes 1…80, all stuff is background; pixels without any label stay ignored.
    "coco_object": SegmentPreset(
        COCO,
        81,
        ids={value: index + 1 if value < COCO_THINGS else 0 for index, value in enumerate(COCO_USED)},
    ),
    "cityscapes": SegmentPreset(
        Layout("leftImg8bit/{split}/*_leftImg8bit.png", "gtFine/{split}/*_gtFine_labelIds.png"),
        19,
        CITYSCAPES,
        ids={value: index for index, value in enumerate(CITYSCAPES_IDS)},
        zoom=2.0,
    ),
}

DEPTH: dict[str, DepthPreset] = {
    # Eigen's crop: rows 45…471 and columns 41…601 of 480×640. It also leaves out the white frame of the pictures.
    "nyu": DepthPreset(
        Layout("*", "*", test="test", pairs="nyu_{split}.txt"),
        scale=1e-3,
        nearest=1e-3,
        farthest=10.0,
        crop=(41 / 640, 45 / 480, 601 / 640, 471 / 480),
    ),
    # Garg's crop of the 352×1216 cut that every published KITTI number uses.
    "kitti": DepthPreset(
        Layout("input/*", "gt_depth/*", test="test", pairs="kitti_eigen_{split}.txt"),
        scale=1 / 256,
        nearest=1e-3,
        farthest=80.0,
        crop=(0.03594771, 0.40810811, 0.96405229, 0.99189189),
        trim=(352, 1216),
    ),
}


def segment_preset(name: str) -> SegmentPreset:
    if name not in SEGMENT:
        raise InputError(f"no segmentation preset is called {name!r}; there are {', '.join(SEGMENT)}")
    return SEGMENT[name]


def depth_preset(name: str) -> DepthPreset:
    if name not in DEPTH:
        raise InputError(f"no depth preset is called {name!r}; there are {', '.join(DEPTH)}")
    return DEPTH[name]
