"""Any backbone behind one face: VECA weights, fresh VECA weights, or a `transformers` vision model.

load_backbone("veca-s14")                     what `veca.load` takes: a bundled name, a folder, a file, a hub id
load_backbone("random:veca_small")            a named size with fresh weights, always the same ones
load_backbone("facebook/dinov2-small")        a transformers vision model: a hub id or a folder
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from veca.errors import InputError, check_share
from veca.model import Veca, create_model
from veca.teachers import Teacher, load_teacher
from veca.weights import bundled_models, load, weights_digest

RANDOM = "random:"
AUTO = "auto"  # patches, chosen by the model


Model = Veca | Teacher


@dataclass(eq=False)
class Backbone:
    """A model that gives a global feature and one feature a patch (`veca.Extractor` computes them)."""

    name: str  # what tables and pictures call it
    model: Model
    source: str = ""  # what it was loaded from
    share: float = 1.0  # of the patches that its cores read
    stride: float | None = None  # pixels from one feature to the next; None: the patch size
    patches: float | str = 1.0  # share of the grid's that is spent, at mixed scale; what `Veca.forward` takes

    @property
    def veca(self) -> Veca:
        """The model, where a figure is about cores."""
        if isinstance(self.model, Veca):
            return self.model
        raise InputError(f"{self.name} has no cores: give this figure a VECA model (--model)")

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def patch_size(self) -> int:
        return self.model.patch_size

    @property
    def width(self) -> int:
        return self.model.config.feature_width if isinstance(self.model, Veca) else self.model.width

    @property
    def bank(self) -> int:
        """How many cores there are to choose from; 0 for a model without budgets."""
        model = self.model
        return model.config.bank if isinstance(model, Veca) and model.config.attention == "core" else 0

    @cached_property
    def digest(self) -> str:
        return weights_digest(self.model)

    def budgets(self, cores: tuple[int, ...]) -> tuple[int | None, ...]:
        """Which of the budgets asked for apply; None stands for a model that has no choice of budget."""
        if not self.bank:
            return (None,)
        for budget in cores:
            if not 1 <= budget <= self.bank:
                raise InputError(f"--cores {budget}: {self.source} has budgets from 1 to {self.bank}")
        return cores or (self.bank,)

    def shares(self, patches: tuple[float | str, ...]) -> tuple[float | str, ...]:
        """Which of the shares asked for apply: a model that is no VECA spends all its patches."""
        return patches if isinstance(self.model, Veca) else (1.0,)

    def reading(self, share: float, stride: float | None, patches: float | str = 1.0) -> Backbone:
        """The same model with a share of its patches read or spent, or with features at another stride."""
        if share < 1 or stride is not None or patches != 1:
            self.veca  # noqa: B018  (refuses other models)
        check_share(share, "--share")
        if stride is not None and not (1 <= stride <= self.patch_size and self.patch_size % stride == 0):
            raise InputError(f"--stride must divide the patch size {self.patch_size} of {self.source}, not {stride}")
        if patches != AUTO:
            check_share(patches, "--patches")
        if patches != 1 and share < 1:
            raise InputError("--patches and --share do not go together: one spends fewer patches, one reads fewer")
        self.share, self.stride, self.patches = share, stride, patches
        return self

    def pixels(self, size: int) -> int:
        """The side nearest to `size` that holds whole patches."""
        return max(1, round(size / self.patch_size)) * self.patch_size


def load_backbone(source: str, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> Backbone:
    """A frozen model in evaluation mode, by any of the names at the top of this file."""
    if source.startswith(RANDOM):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model: Model = create_model(source.removeprefix(RANDOM))
    else:
        model = load(source) if is_veca(source) else load_teacher(source)
    return Backbone(Path(source).name or source, model.to(device, dtype).eval().requires_grad_(False), source)


def is_veca(source: str) -> bool:
    """Whether `veca.load` should read it: everything that does not say it is another kind of model."""
    path = Path(source).expanduser()
    if source in bundled_models() or path.is_file() or not (path.exists() or "/" in source):
        return True  # the last is a name that nobody knows: `veca.load` lists those it knows
    config = path / "config.json" if path.is_dir() else _hub_config(source)
    if config is None or not config.is_file():
        return path.is_dir()  # weights without a config can only be ours; an unknown hub id is left to transformers
    try:
        kind = json.loads(config.read_text(encoding="utf-8")).get("model_type", "veca")
    except (ValueError, AttributeError, RecursionError) as error:
        raise InputError(f"{config}: not a model's config ({error})") from None
    return bool(kind == "veca")


def _hub_config(source: str) -> Path | None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

    try:
        return Path(hf_hub_download(source, "config.json"))
    except (EntryNotFoundError, HfHubHTTPError, HFValidationError, OSError):
        return None


def short_names(sources: Sequence[str]) -> list[str]:
    """How a table calls its models: as few of the last parts of their paths as tell them apart."""
    paths = [Path(source).with_suffix("") if Path(source).is_file() else Path(source) for source in sources]
    names = []
    for source, path in zip(sources, paths, strict=True):
        others = {other for other in paths if other != path}
        parts = 1
        while parts < len(path.parts) and any(other.parts[-parts:] == path.parts[-parts:] for other in others):
            parts += 1
        names.append(source if source.startswith(RANDOM) else "/".join(path.parts[-parts:]))
    return names
