"""The paper's tables: the same as in ../shared, read whole, and consistent with our own counts."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from veca.errors import InputError
from veca.paper import COLUMNS, FOLDER, SIZES, comparable, paper_rows


def test_the_packaged_tables_are_those_of_the_paper(shared: Path) -> None:
    files = sorted(path.name for path in (shared / "paper").glob("*.csv"))
    assert sorted(path.name for path in FOLDER.iterdir()) == files
    for name in files:
        assert (FOLDER / name).read_bytes() == (shared / "paper" / name).read_bytes()


def test_every_number_of_every_table_is_found() -> None:
    """Each cell of the files, looked up by what its row and column say."""
    found = {
        (of, name, row.model.removesuffix("/16"), row.cores, row.size, metric, round(value, 6))
        for of, name in {(of, name) for of, name, _ in COLUMNS.values()}
        for row in paper_rows(of, name)
        for metric, value in row.values.items()
    }
    cells = 0
    for path in FOLDER.glob("*.csv"):
        for line in csv.DictReader(path.open()):
            model, cores = line["model"], line.get("cores")
            if model.endswith(" cores"):
                model, cores = model.split(", ")[0], model.split()[-2]
            for column in line.keys() & COLUMNS.keys():
                of, name, metric = COLUMNS[column]
                budget = int(cores or 64) if model.startswith("VECA") else None
                value = round(float(line[column]) / (1 if of == "depth" else 100), 6)
                size = int(line.get("size", SIZES[of]))
                assert (of, name, model.removesuffix("/16"), budget, size, metric, value) in found, (path, line)
                cells += 1
    assert cells == 44 * 3 + 32 * 4 + 32 * 2 + 10 * 16 + 32 * 3 + 32 * 3 + 10 * 8


def test_one_row_a_model_budget_and_size_unless_the_paper_disagrees_with_itself() -> None:
    rows = paper_rows("segment", "ade20k")
    keys = [(row.model.removesuffix("/16"), row.cores, row.size) for row in rows]
    assert len(keys) == len(set(keys))
    twice = [row for row in paper_rows("segment", "coco_object") if (row.model, row.size) == ("VECA-B", 512)]
    assert [(row.table, row.cores, row.values["mIoU"]) for row in twice] == [
        ("Table 1", 8, 0.5827), ("Table 1", 64, 0.6358), ("Table S11", 64, 0.6258)
    ]  # fmt: skip


def test_rows_to_compare_with_are_at_the_runs_sizes_and_budgets() -> None:
    def base(sizes: set[int], cores: set[int | None]) -> list[tuple[int | None, int, float]]:
        rows = comparable(paper_rows("depth", "nyu"), "depth", sizes, cores)
        return [(row.cores, row.size, row.values["RMSE"]) for row in rows if row.model == "VECA-B"]

    assert base({448}, {12}) == [(64, 512, 0.3705)]  # the paper's own where it has none of these
    assert base({512}, {None, 8, 64}) == [(8, 512, 0.4330), (64, 512, 0.3705)]
    assert base({256, 768}, {64}) == [(64, 256, 0.3920), (64, 768, 0.3704)]


def test_what_the_paper_does_not_have() -> None:
    with pytest.raises(InputError, match=r"known for classify: aircraft, caltech101, .*--against paper:aircraft"):
        paper_rows("classify", "mine")
    with pytest.raises(InputError, match="the paper has no numbers of knn"):
        paper_rows("knn", "imagenet")
