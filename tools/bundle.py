"""`python tools/bundle.py RUN NAME`: a run's model as weights that ship with the package, its records for the docs.

veca/bundled/NAME/   config.json, model.safetensors (float16), preprocessor_config.json, README.md (the model card)
docs/runs/NAME/      settings.json, metrics.jsonl (thinned), curves.png
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from veca.distill.curves import plot
from veca.errors import InputError
from veca.files import whole_folder, write_text
from veca.integrations.hub import model_card
from veca.model import Veca
from veca.training.records import METRICS, read_metrics
from veca.weights import BUNDLED, WEIGHTS, load, save

TRAIN_RECORDS = 200  # of training are kept in the thinned records; all of validation are


@dataclass
class Bundle:
    """Turn the model of a run into weights that come with the package: `veca.load("NAME")`.

    Examples:
      python tools/bundle.py runs/long veca-s14
      python tools/bundle.py runs/long/last veca-s14 --teacher "Depth-Anything-V2-Small encoder (Apache-2.0)" \\
          --data "6,144 photographs of PASCAL VOC 2012" --licence Apache-2.0
    """

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """the folder of a run (its best model is taken), or best/ or last/ in it"""
    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """what veca.load will know it by"""
    teacher: str | None = None
    """for the card: the teacher's proper name and licence, instead of its folder's name"""
    data: str | None = None
    """for the card: what the training images are, beside how many"""
    licence: str | None = None
    """for the card: the licence of these weights"""
    edition: int | None = None
    """for the card: how many weights have had this name, these included"""
    cores: int | None = None
    """keep only so many cores of the bank, its first; None: all"""
    bundled: Annotated[Path, tyro.conf.arg(metavar="DIR")] = BUNDLED
    """where the package keeps its weights"""
    records: Annotated[Path, tyro.conf.arg(metavar="DIR")] = BUNDLED.parents[1] / "docs" / "runs"
    """where the docs keep the records of runs"""


def bundle(settings: Bundle) -> tuple[Path, Path]:
    """Write both folders, each whole or not at all; returns them."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", settings.name):
        raise InputError(f"{settings.name!r} is no name for bundled weights: small letters, digits, - and . only")
    source = settings.run if (settings.run / WEIGHTS).is_file() else settings.run / "best"
    run = source.parent
    for needed in (source / WEIGHTS, run / "settings.json", run / METRICS):
        if not needed.is_file():
            raise InputError(f"{settings.run} is not the folder of a run: there is no {needed}")
    model = load(source)
    if settings.cores is not None:
        model = first_cores(model, settings.cores)
    model.card.pop("source")
    given = {"teacher": settings.teacher, "data": settings.data, "licence": settings.licence}
    for key, words in given.items():
        if words:
            known = model.card.get(key)
            model.card[key] = f"{words}; {known}" if known and key != "licence" else words
    if settings.edition is not None:
        model.card = {"edition": settings.edition, **model.card}
    if missing := [key for key in given if not model.card.get(key)]:
        raise InputError(f"the card would not say {' and '.join(missing)}: give --{' --'.join(missing)}")
    check_half(model.state_dict())
    weights, records = settings.bundled / settings.name, settings.records / settings.name
    with whole_folder(weights) as folder:
        save(model, folder, dtype=torch.float16)
        write_text(folder / "README.md", model_card(model, run, settings.name))
    with whole_folder(records) as folder:
        shutil.copyfile(run / "settings.json", folder / "settings.json")
        thinned = thin(read_metrics(run / METRICS))
        write_text(folder / METRICS, "".join(json.dumps(record) + "\n" for record in thinned))
        shutil.copyfile(plot(run), folder / "curves.png")
    return weights, records


def first_cores(model: Veca, count: int) -> Veca:
    """The same model with a smaller bank: every budget up to it gives what it gave."""
    if not 1 <= count <= model.config.bank:
        raise InputError(f"--cores {count}: the model has {model.config.bank}")
    kept = Veca(replace(model.config, bank=count))
    tensors = model.state_dict()
    tensors |= {name: tensors[name][:count] for name in ("bank.tokens", "bank.states")}
    kept.load_state_dict(tensors)
    kept.card = model.card
    return kept


def check_half(tensors: dict[str, torch.Tensor]) -> None:
    """float16 ends at 65504: refuse weights that would become infinite."""
    for name, tensor in tensors.items():
        if not tensor.half().isfinite().all():
            raise InputError(f"tensor {name} does not fit float16 (up to {float(tensor.abs().max()):.3g})")


def thin(records: list[dict[str, Any]], keep: int = TRAIN_RECORDS) -> list[dict[str, Any]]:
    """Every validation, and evenly chosen records of training with the last one; numbers to five digits."""
    train = [record for record in records if record["kind"] == "train"]
    stride = max(1, -(-len(train) // keep))
    kept = {id(record) for record in train[::-1][::stride]}
    return [rounded(record) for record in records if record["kind"] != "train" or id(record) in kept]


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main(arguments: list[str]) -> int:
    settings = tyro.cli(Bundle, args=arguments, prog="python tools/bundle.py")
    try:
        weights, records = bundle(settings)
    except InputError as error:
        print(f"bundle: {error}", file=sys.stderr)
        return 2
    size = (weights / WEIGHTS).stat().st_size
    print(f"{weights}: {size / 1e6:.1f} MB in float16; `veca info {settings.name}` shows its card")
    print(f"{records}: settings, thinned records, curves")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
