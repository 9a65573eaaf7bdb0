"""The card that a run gives its model: whose features it learned, from which images, how, and under which licence.

Only what the run knows is written. Files rarely state licences in a form that a program can trust, so
`tools/bundle.py` takes a person's words for those.
"""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path
from typing import Any

from veca.distill.settings import Distillation
from veca.distill.sources import TrainingImages
from veca.teachers import Teacher


def run_card(
    settings: Distillation, teacher: Teacher, images: TrainingImages, weights: str, before: dict[str, Any] | None = None
) -> dict[str, Any]:
    """`weights` is the digest of the teacher's; steps and views are added with every save.

    `before` is the card of the model that the run goes on with.
    """
    licence = stated_licence(Path(settings.teacher))
    name = Path(settings.teacher).name if Path(settings.teacher).exists() else settings.teacher
    sources = [Path(part.root).name for part in images.parts]
    shown = sources if len(sources) < 4 else [sources[0], "…", sources[-1]]
    card: dict[str, Any] = {
        "teacher": f"{name} ({teacher.kind}, {teacher.depth} layers of {teacher.width}, patch {teacher.patch_size})",
        "teacher_weights": weights,
        "data": f"{len(images):,} images ({', '.join(shown)})",
        "recipe": recipe_words(settings),
        "date": date.today().isoformat(),
    }
    if before and "recipe" in before:
        earlier = f"{before['views']:,} views, {before['recipe']}" if "views" in before else before["recipe"]
        card["before"] = "; then ".join(part for part in (before.get("before"), earlier) if part)
        card["views_before"] = before.get("views", 0) + before.get("views_before", 0)
    if licence:
        card |= {"teacher_licence": licence, "licence": licence}  # what was learned from it is under its terms
    return card


def recipe_words(settings: Distillation) -> str:
    """The recipe and what a reader wants to know of it first; settings.json has the rest."""
    resolutions = "/".join(f"{size}²" for size in settings.all_resolutions)
    words = [
        f"{type(settings).__name__.lower()} from {Path(settings.init).name}",
        f"{resolutions} crops",
        f"budgets {settings.budgets[0]} to {settings.budgets[-1]}",
        f"rate {settings.lr:g} → {settings.min_lr:g}",
        "NorMuon and AdamW" if settings.matrices == "normuon" else "AdamW",
    ]
    if not settings.trivial_augment:
        words.append("crop and flip only")
    if settings.views:
        words.append(f"{settings.views} fixed views of each image")
    if settings.forcing or settings.fading:
        words.append(f"forced for {settings.forcing:.0%}, fading for {settings.fading:.0%}")
    if settings.hints:
        words.append(f"hints {settings.hints:g} until {settings.hints_until:.0%}")
    if settings.rotate:
        words.append("rotation woken")
    if settings.read_share < 1:
        words.append(f"shares read from {settings.read_share:g}")
    if settings.mixed < 1:
        words.append(f"mixed scale from {settings.mixed:g}")
    if settings.gram:
        words.append(f"Gram {settings.gram:g}")
    if settings.average:
        words.append(f"average {settings.average:g}")
    return ", ".join(words)


def stated_licence(teacher: Path) -> str | None:
    """The `license:` in the header of the teacher's README.md, as the hub writes it."""
    readme = teacher / "README.md"
    if not readme.is_file():
        return None
    header = re.match(r"---\n(.*?)\n---\n", readme.read_text(encoding="utf-8", errors="replace"), flags=re.DOTALL)
    found = re.search(r"^license:\s*([\w.+-]+)\s*$", header[1], flags=re.MULTILINE) if header else None
    return found[1] if found else None
