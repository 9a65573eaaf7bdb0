"""The paper's own numbers (paper_tables/*.csv: its tables as they stand there), for `--against paper`."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from veca.errors import InputError

FOLDER = Path(__file__).with_name("paper_tables")
ATTENTION = "s14_attention_cost_l40s"
# Where two tables have the same row the first of this order gives it.
TABLES = {
    "table1_dense_base": "Table 1",
    "s13_classification_base": "Table S13",
    "s15_classification_budget": "Table S15",
    "s16_dense_budget": "Table S16",
    "s10_classification_resolution": "Table S10",
    "s11_segmentation_resolution": "Table S11",
    "s12_depth_resolution": "Table S12",
    ATTENTION: "Table S14",
}
# Column → task, data set and metric as our own tables call them.
COLUMNS = {
    "IN1K": ("classify", "imagenet", "top1"),
    "V2": ("classify", "imagenet", "top1 imagenetv2"),
    "ReaL": ("classify", "imagenet", "top1 real"),
    "Places": ("classify", "places365", "top1"),
    "Food": ("classify", "food101", "top1"),
    "C10": ("classify", "cifar10", "top1"),
    "C100": ("classify", "cifar100", "top1"),
    "SUN": ("classify", "sun397", "top1"),
    "Cars": ("classify", "cars", "top1"),
    "Aircraft": ("classify", "aircraft", "top1"),
    "VOC": ("classify", "voc2007", "mAP"),
    "DTD": ("classify", "dtd", "top1"),
    "Caltech": ("classify", "caltech101", "top1"),
    "Pets": ("classify", "pets", "top1"),
    "CUB": ("classify", "cub", "top1"),
    "Flowers": ("classify", "flowers", "top1"),
    "VOC_mIoU": ("segment", "voc2012", "mIoU"),
    "Context_mIoU": ("segment", "context60", "mIoU"),
    "ADE_mIoU": ("segment", "ade20k", "mIoU"),
    "Stuff_mIoU": ("segment", "coco_stuff", "mIoU"),
    "Object_mIoU": ("segment", "coco_object", "mIoU"),
    "City_mIoU": ("segment", "cityscapes", "mIoU"),
    "NYUv2_RMSE": ("depth", "nyu", "RMSE"),
    "KITTI_RMSE": ("depth", "kitti", "RMSE"),
}
SIZES = {"classify": 256, "segment": 512, "depth": 512}  # of the tables that name none
CORES = 64  # of the rows of a VECA that name none


@dataclass(frozen=True)
class PaperRow:
    table: str  # of the paper
    model: str
    cores: int | None  # None: a model without budgets
    size: int
    values: dict[str, float]  # by metric, as our tables print it: a share of 1, or metres


@dataclass(frozen=True)
class AttentionCost:
    """One attention layer with its projections on a 1024² image; VECA with 64 cores (Table S14, on an L40S)."""

    model: str  # veca_small, …
    gflops: float
    dinov3_gflops: float
    milliseconds: float
    dinov3_milliseconds: float


def paper_rows(task: str, dataset: str) -> list[PaperRow]:
    """What the paper reports for a data set, at every size and budget; an unknown one lists those that are known."""
    known = sorted({name for of, name, _ in COLUMNS.values() if of == task})
    if not known:
        raise InputError(f"--against paper: the paper has no numbers of {task}")
    if dataset not in known:
        raise InputError(
            f"--against paper: no numbers for {dataset!r}; known for {task}: {', '.join(known)} "
            f"(name one: --against paper:{known[0]})"
        )
    rows: list[PaperRow] = []
    for row in _rows(task, dataset):
        same = (other for other in rows if _key(other) == _key(row))
        if not any(row.values.items() <= other.values.items() for other in same):
            rows.append(row)
    return rows


def comparable(
    rows: Sequence[PaperRow], task: str, sizes: Iterable[int], budgets: Iterable[int | None]
) -> list[PaperRow]:
    """The rows at a run's sizes and budgets; where the paper has none of these, at the paper's own."""
    size = {row.size for row in rows} & set(sizes) or {SIZES[task]}
    cores = {row.cores for row in rows if row.cores} & set(budgets) or {CORES}
    return [row for row in rows if row.size in size and row.cores in (None, *cores)]


def attention_costs() -> list[AttentionCost]:
    """Table S14, a row for each size of the paper."""
    return [
        AttentionCost(
            f"veca_{line['model'].lower()}",
            *(float(line[name]) for name in ("VECA_GFLOPs", "DINOv3_GFLOPs", "VECA_ms", "DINOv3_ms")),
        )
        for line in _lines(ATTENTION)
    ]


def _rows(task: str, dataset: str) -> Iterator[PaperRow]:
    wanted = {column: metric for column, (of, name, metric) in COLUMNS.items() if (of, name) == (task, dataset)}
    for name, title in TABLES.items():
        for line in _lines(name):
            unit = 1 if task == "depth" else 100
            values = {
                metric: round(float(line[column]) / unit, 6) for column, metric in wanted.items() if column in line
            }
            if values:
                model, _, budget = line["model"].partition(", ")  # "VECA-B, 64 cores"
                cores = line.get("cores") or budget.removesuffix(" cores") or CORES
                size = int(line.get("size", SIZES[task]))
                yield PaperRow(title, model, int(cores) if model.startswith("VECA") else None, size, values)


def _key(row: PaperRow) -> tuple[str, int | None, int]:
    return row.model.removesuffix("/16"), row.cores, row.size  # Table 1 writes DINOv3-B/16, the others DINOv3-B


def _lines(name: str) -> list[dict[str, str]]:
    with open(FOLDER / f"{name}.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
