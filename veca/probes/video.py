"""`veca probe video`: every model at every size and budget on every sequence, one row each; `veca.tasks.video` does it.

What a sequence scored is written as soon as it is known, with what it was made with, so that a killed run goes on.
"""

from __future__ import annotations

import csv
import io
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from veca.backbones import Backbone, load_backbone, short_names
from veca.devices import pick_device, pick_dtype
from veca.errors import InputError
from veca.extract.extractor import Extractor
from veca.files import lock_folder, read_json, write_json, write_text
from veca.images import open_image
from veca.probes.settings import Video
from veca.progress import progress
from veca.tasks.base.tables import Row, Table
from veca.tasks.video.data import Sequence, find_sequences, objects, read_mask
from veca.tasks.video.drawing import Drawing
from veca.tasks.video.propagate import Propagation
from veca.tasks.video.scores import contour, region
from veca.video import Frames

See = Callable[[Image.Image], Tensor]  # a frame → its features, h×w×D; frames come in order


def probe(settings: Video, done: Callable[[Table], None]) -> Table:
    """The table, written after every sequence."""
    if not settings.model:
        raise InputError("give at least one --model")
    if settings.frames < 0:
        raise InputError(f"--frames must not be negative, not {settings.frames}")
    data = find_sequences(settings.data, settings.frames)
    check(settings)
    table = Table("video", settings.data.name, "J&F", "higher", [one.name for one in data])
    table.note(settings)
    with lock_folder(settings.out):
        for backbone, size, cores in cells(settings):
            about = made_with(settings, backbone, size, cores)
            folder = row_name(settings, backbone, size, cores)
            row = Row(backbone.name, backbone.source, backbone.digest, size, backbone.pixels(size), cores, {})
            table.rows.append(row)
            found: dict[str, Any] = {}
            for one in progress(data, f"{folder}: sequences", len(data)):
                found[one.name] = score(one, backbone, about, settings, folder)
                summarise(row, found)
                done(table)
                write_text(settings.out / "sequences.csv", by_sequence(table))
    return table


def check(settings: Video) -> None:
    """Refuse what cannot work before the long work: each model is loaded once and let go again."""
    if any(size < 1 for size in settings.size):
        raise InputError("--size must be at least 1")
    for source in settings.model:
        backbone = load_backbone(source).reading(settings.share, None)
        backbone.budgets(settings.cores)
        if settings.carry:
            Frames(backbone.veca, share=settings.share, carry=True)


def cells(settings: Video) -> Iterator[tuple[Backbone, int, int | None]]:
    """Every model at every size and budget; one model is in memory at a time."""
    device = pick_device(settings.device)
    dtype = pick_dtype(settings.dtype, device)
    for source, name in zip(settings.model, short_names(settings.model), strict=True):
        backbone = load_backbone(source, device, dtype).reading(settings.share, None)
        backbone.name = name
        for size in settings.size:
            for cores in backbone.budgets(settings.cores):
                yield backbone, size, cores


def made_with(settings: Video, backbone: Backbone, size: int, cores: int | None) -> dict[str, Any]:
    """What decides a sequence's score, besides its files."""
    chosen = {name: getattr(settings, name) for name in ("share", "carry", "frames", "dtype")}
    return {"weights": backbone.digest, "size": size, "cores": cores, **chosen}


def row_name(settings: Video, backbone: Backbone, size: int, cores: int | None) -> str:
    budget = "" if cores is None else f"-{cores}cores"
    read = "" if settings.share == 1 else f"-{settings.share:g}{'carried' if settings.carry else 'read'}"
    return re.sub(r"[^\w.+-]+", "_", backbone.name) + f"-{backbone.pixels(size)}px{budget}{read}"


def score(one: Sequence, backbone: Backbone, about: dict[str, Any], settings: Video, folder: str) -> dict[str, Any]:
    """What one sequence scores: from an earlier run, or now."""
    file = settings.out / "sequences" / folder / f"{one.name}.json"
    about = {**about, "files": [stamp(path) for path in (*one.frames, *one.masks) if path is not None]}
    drawing = Drawing(settings.out / "drawn" / folder, one.name, objects(read_mask(one.masks[0])))
    if file.is_file() and (not settings.draw or drawing.clip.is_file()):
        try:
            known = read_json(file)
        except InputError:  # damaged: once more
            known = {}
        # The pictures of other weights have the same names: a clip is of this score only if they were made together.
        if known.get("made_with") == about and (known.get("drawn") or not settings.draw):
            return known
    found = follow(one, eyes(backbone, about), drawing if settings.draw else None)
    write_json(file, {**found, "made_with": about, "drawn": settings.draw})
    return found


def stamp(path: Path) -> list[Any]:
    """What changes when a file does."""
    status = path.stat()
    return [path.name, status.st_size, status.st_mtime_ns]


def eyes(backbone: Backbone, about: dict[str, Any]) -> See:
    """The model as one sequence is shown to it."""
    if about["carry"]:
        frames = Frames(backbone.veca, about["cores"], about["share"], carry=True)

        def see(image: Image.Image) -> Tensor:
            found = frames(backbone.veca.preprocess(image, about["size"]))
            return found.patches[0].float().reshape(*found.grid, -1)

        return see
    extractor = Extractor(backbone, cores=about["cores"], size=about["size"])

    def look(image: Image.Image) -> Tensor:
        found = extractor.compute(extractor.prepare(image)[None])
        return found.patches[0].reshape(*found.grid, -1)

    return look


def follow(one: Sequence, see: See, drawing: Drawing | None) -> dict[str, Any]:
    """J and F of every object of one sequence, means over its frames."""
    first = read_mask(one.masks[0])
    known = objects(first)
    scores: dict[int, list[tuple[float, float]]] = {value: [] for value in known}
    propagation: Propagation | None = None
    for number, path in enumerate(one.frames):
        image = open_image(path)
        features = see(image)
        if propagation is None:
            propagation, mask = Propagation(features, first, known), first
        elif image.size[::-1] != first.shape:
            raise InputError(f"{path}: {image.size[0]}×{image.size[1]}, not the size of the frames before it")
        else:
            mask = propagation(features)
        if number in one.scored:
            truth = read_mask(one.masks[number])
            for value in known:
                found, right = mask == value, truth == value
                scores[value].append((region(found, right), contour(found, right)))
        if drawing is not None:
            drawing.add(path.stem, image, mask)
    if drawing is not None:
        drawing.finish()
    means = [[statistics.fmean(column) for column in zip(*scores[value], strict=True)] for value in known]
    return {
        "frames": len(one.scored),
        "objects": [{"object": value, "J": j, "F": f} for value, (j, f) in zip(known, means, strict=True)],
    }


def summarise(row: Row, found: dict[str, Any]) -> None:
    """The row's numbers from the sequences so far: means over all objects, and J&F of each sequence."""
    j, f = ([each[name] for one in found.values() for each in one["objects"]] for name in ("J", "F"))
    row.values = {"J&F": [(statistics.fmean(j) + statistics.fmean(f)) / 2], "J": [statistics.fmean(j)]}
    row.values["F"] = [statistics.fmean(f)]
    each = {
        name: [statistics.fmean(part[kind] for part in one["objects"]) for kind in ("J", "F")]
        for name, one in found.items()
    }
    row.per_class = [(j + f) / 2 for j, f in each.values()]
    row.extra = {
        "sequences": {name: {"J": j, "F": f, "J&F": (j + f) / 2} for name, (j, f) in each.items()},
        "frames": sum(one["frames"] for one in found.values()),
    }


def by_sequence(table: Table) -> str:
    """Every row's J, F and J&F of each sequence, and their mean, as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["model", "cores", "pixels", "sequence", "J&F", "J", "F"])
    for row in table.rows:
        mean = {name: row.mean(name) for name in row.values}
        for name, scores in {**row.extra["sequences"], "mean": mean}.items():
            numbers = [f"{scores[metric]:.6f}" for metric in ("J&F", "J", "F")]
            writer.writerow([row.model, row.cores or "", row.pixels, name, *numbers])
    return text.getvalue()
