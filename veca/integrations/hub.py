"""Publishing: a folder with weights, configuration and a model card made from the run's own records, and its upload.

    from veca.integrations.hub import push_to_hub, write_folder
    write_folder(veca.load("runs/x/best"), "to-publish", run="runs/x")       # look at it first
    push_to_hub(veca.load("runs/x/best"), "you/veca-s14", run="runs/x")

The card says only what the records say: `model.card`, and of a run `settings.json`, `metrics.jsonl` and every
`results.json` of a probe below it. What nobody recorded is listed as not recorded.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from veca import tabulate
from veca.config import VecaConfig
from veca.errors import InputError
from veca.files import write_text
from veca.model import Veca
from veca.training.records import read_metrics

LICENCES = {"apache-2.0", "mit", "bsd-3-clause", "cc-by-4.0", "cc-by-nc-4.0"}  # others are "other" to the hub
RECIPE = (
    "student", "init", "epochs", "steps", "batch", "accumulate", "lr", "min_lr", "weight_decay", "relative_rates",
    "matrices", "budgets",
    "budget_weights", "resolutions", "patch_share", "views", "late_from", "late_resolutions", "standardise", "hints",
    "hints_until", "forcing", "fading", "layer_decay", "seed",
)  # fmt: skip


def push_to_hub(
    model: Any, repo_id: str, run: str | Path | None = None, private: bool | None = None, token: str | None = None
) -> str:
    """Write the folder somewhere temporary and upload it; returns the commit's address."""
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    with tempfile.TemporaryDirectory() as folder:
        write_folder(model, folder, run, repo_id)
        repository = api.create_repo(repo_id, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=repository.repo_id, folder_path=folder, commit_message="Upload VECA"))


def write_folder(model: Any, folder: str | Path, run: str | Path | None = None, name: str | None = None) -> Path:
    """What `push_to_hub` uploads: the model's own files and README.md. `model`: Veca, or a transformers VECA model."""
    folder = Path(folder)
    plain = model if isinstance(model, Veca) else getattr(model, "veca", None)
    if not isinstance(plain, Veca):
        raise InputError(f"cannot publish a {type(model).__name__}: give a veca.Veca or a transformers VECA model")
    if isinstance(model, Veca):
        model.save(folder)
    else:
        model.save_pretrained(folder)
    text = model_card(plain, None if run is None else Path(run), name or folder.name, type(model).__name__)
    write_text(folder / "README.md", text)
    return folder


def model_card(model: Veca, run: Path | None, name: str, kind: str = "Veca") -> str:
    """The card as Markdown with the hub's YAML header."""
    if run is not None and not run.is_dir():
        raise InputError(f"{run}: no such run folder")
    card = {key: value for key, value in model.card.items() if key != "source"}
    settings = _read(run / "settings.json") if run is not None else {}
    facts = {**{key: settings[key] for key in ("teacher", "train", "data", "model") if settings.get(key)}, **card}
    licence = str(facts.get("licence") or facts.get("license") or "")
    header = ["---", "library_name: veca", "pipeline_tag: image-feature-extraction", "tags:", "- veca", "- vision"]
    if licence:
        header.append(f"license: {licence.lower() if licence.lower() in LICENCES else 'other'}")
    lines = [*header, "---", "", f"# {name}", "", *_what(model, kind), "", "## Use", "", "```python", *_use(name, kind),
             "```", "", "## Where it comes from", ""]  # fmt: skip
    lines += [f"- **{label}**: {_words(facts[key])}" if key in facts else f"- **{label}**: not recorded"
              for key, label in (("teacher", "Teacher"), ("train", "Training images"))
              if "data" not in facts or (key == "teacher" and key in facts)]  # fmt: skip
    lines += [f"- **{key.replace('_', ' ').capitalize()}**: {_words(value)}" for key, value in facts.items()
              if key not in ("teacher", "train")]  # fmt: skip
    if not licence:
        lines.append("- **Licence**: not recorded; the teacher's licence applies to what was learned from it")
    recipe = [f"| {key} | {_words(settings[key])} |" for key in RECIPE if key in settings]
    if recipe:
        lines += ["", "## Recipe", "", "| setting | value |", "| --- | --- |", *recipe]
    results = list(_results(run, model.card.get("steps"))) if run is not None else []
    return "\n".join([*lines, "", "## Results", "", *(results or ["None recorded."]), ""])


def _what(model: Veca, kind: str) -> list[str]:
    config: VecaConfig = model.config
    count = sum(parameter.numel() for parameter in model.parameters())
    how = "patches that exchange information only through cores" if config.attention == "core" else "dense attention"
    head = "" if kind in ("Veca", "VecaModel") else f" With a linear head (`{kind}`)."
    return [
        f"A VECA vision backbone (arXiv 2605.12491): {config.depth} layers, {config.width} wide, {config.heads} heads, "
        f"{config.patch_size}×{config.patch_size} patches, {how}, budgets from 1 to {config.bank} cores, "
        f"{count:,} parameters.{head}"
    ]


def _use(name: str, kind: str) -> list[str]:
    if kind == "Veca":
        return [
            "import veca",
            "",
            f'model = veca.load("{name}")',
            'images = model.preprocess("photo.jpg")',
            "out = model(images, cores=16)  # out.cls, out.patches",
        ]
    return [
        "import veca.integrations.transformers as veca",
        "from transformers import AutoImageProcessor",
        "",
        f'model = veca.{kind}.from_pretrained("{name}")',
        f'inputs = AutoImageProcessor.from_pretrained("{name}")(photo, return_tensors="pt")',
        "out = model(**inputs, cores=16)",
    ]


def _results(run: Path, step: int | None) -> Iterator[str]:
    """What was measured: the validation of these weights, the run's test scores, and tables of probes below its folder.

    `step` is the weights' own; unknown, they are taken as the best of the run.
    """
    metrics = run / "metrics.jsonl"
    records = read_metrics(metrics) if metrics.is_file() else []
    validations = [record for record in records if record.get("kind") == "validation"]
    if own := [record for record in validations if record["step"] == step]:
        validations = own
    if validations:
        last = min(validations, key=lambda record: record["loss"]) if "loss" in validations[-1] else validations[-1]
        yield f"Validation at step {last['step']}:"
        yield ""
        grid = last.get("grid")
        if grid:
            names = list(next(iter(next(iter(grid.values())).values())))
            yield tabulate.markdown(
                [["resolution", "cores", *names]]
                + [
                    [str(size), str(budget), *(f"{values[name]:.4f}" for name in names)]
                    for size, row in grid.items()
                    for budget, values in row.items()
                ]
            )
        else:
            yield from (f"- {key}: {_words(value)}" for key, value in last.items() if key not in ("kind", "step"))
        yield ""
    for path in sorted(run.rglob("results.json")):
        found = _read(path)
        if "rows" not in found:
            continue
        task = found["task"] if found["task"].startswith("finetune") else f"probe {found['task']}"
        yield f"`veca {task}` on {found['data']}:"
        yield ""
        yield tabulate.markdown(
            [["model", "cores", "size", "metric", "value"]]
            + [
                [row["model"], str(row["cores"] or "–"), str(row["pixels"]), metric,
                 f"{value['mean']:.4f} ± {value['deviation']:.4f}"]
                for row in found["rows"]
                for metric, value in row["metrics"].items()
            ]
        )  # fmt: skip
        yield ""


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not readable as JSON ({error})") from None
    return value if isinstance(value, dict) else {}


def _words(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, dict):
        return "; ".join(f"{key} {_words(part)}" for key, part in value.items())
    return f"{value:.4f}" if isinstance(value, float) and abs(value) > 1e-2 else str(value)
