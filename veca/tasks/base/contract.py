"""The contract of a task: what `veca probe`, `veca finetune`, `veca probe predict` and `transformers` heads ask of it.

Data flows in one direction: an example → a view and its label (`load`) → a model's features (`Seen`) → a head → loss,
or decoding → score and drawing. A task never calls a model of its own: it is given `look`, one model at one budget,
which may be a frozen teacher, a VECA that is being trained, or anything else with a global feature and patches.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from veca.backbones import Backbone
from veca.progress import progress
from veca.tasks.base.features import CachedExtractor
from veca.tasks.base.heads import SavedHead
from veca.tasks.base.options import FineTuneOptions, ProbeOptions

Scores = dict[str, Any]  # metrics by name; `per_class` is a list


class Seen(NamedTuple):
    """What a model says about a batch of square images."""

    cls: Tensor  # B×D
    patches: Tensor  # B×N×D, row by row
    cores: Tensor  # B×C×D; the global feature alone where a model has none


Look = Callable[[Tensor], Seen]  # images B×S×S×3 uint8 → features, by one model at one budget


class Fitted(NamedTuple):
    """The heads of `veca probe` at one size and budget."""

    scores: list[Scores]  # on the test part, one for each seed
    head: SavedHead  # of the first seed, to be saved
    extra: dict[str, Any]  # what else results.json should tell


class Task(ABC):
    summary: ClassVar[str]  # one line for the help of both commands
    probe_options: ClassVar[type[ProbeOptions]]
    finetune_options: ClassVar[type[FineTuneOptions]]

    name: ClassVar[str]  # as on the command line, and in head.json
    main: str  # the metric that chooses, and that plots show
    better: str  # higher or lower
    classes: list[str]  # empty where there are none
    linear: ClassVar[bool] = True  # whether its saved heads are a `Head`; else each is a `ModuleHead`
    parts: dict[str, Sequence[Any]]  # examples: train, validation (perhaps empty) and test

    # Data.

    @classmethod
    @abstractmethod
    def open(cls, options: Any) -> Task:
        """The data set that the command line names, checked: what is wrong with it is said before the long work."""

    @abstractmethod
    def files(self, part: str) -> Iterator[Path]:
        """Every file of a part, to tell one data set from another."""

    @abstractmethod
    def load(self, number: int, side: int, rng: random.Random) -> tuple[Tensor, Tensor]:
        """A random view of a training example, S×S×3 uint8, and its label."""

    # Head and loss.

    @abstractmethod
    def new_head(self, width: int) -> nn.Module:
        """What is trained on features of width D."""

    @abstractmethod
    def loss(self, head: nn.Module, seen: Seen, labels: Sequence[Tensor]) -> Tensor: ...

    @abstractmethod
    def saved_head(self, head: nn.Module) -> SavedHead:
        """The head as `predict` reads it: its tensors, and in `about` its `feature` and what decoding needs."""

    # Decoding, score, drawing.

    @abstractmethod
    def score(self, head: nn.Module, look: Look, part: str, side: int) -> Scores:
        """The metrics over a part, `main` among them."""

    @classmethod
    @abstractmethod
    def answer(cls, head: Any, backbone: Backbone, path: Path, target: Path) -> dict[str, Any]:
        """What a saved head says about one photo; pictures are written beside `target`, which has no ending yet."""

    # What a task may do better for itself.

    @classmethod
    def module(cls, head: Any) -> nn.Module:
        """A saved head as something to train: what `--start-head` begins with."""
        linear = nn.Linear(head.weight.shape[1], head.weight.shape[0])
        linear.load_state_dict({"weight": head.weight, "bias": head.bias})
        return linear

    def fit(self, extractor: CachedExtractor, side: int, options: Any, seeds: int) -> Fitted:
        """Train and score heads on a frozen model, through it at every step: AdamW, `--steps` of 8 views."""
        device, scores, first = extractor.backbone.device, [], None
        steps = getattr(options, "steps", 500)

        def look(images: Tensor) -> Seen:
            found = extractor.compute(images)
            # made in inference mode, which gradients cannot pass
            return Seen(found.cls.clone(), found.patches.clone(), found.cores.clone())

        for seed in range(seeds):
            rng = random.Random(seed)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                head = self.new_head(extractor.backbone.width).to(device).train()
            optimiser = torch.optim.AdamW(head.parameters(), lr=1e-3)
            decay = torch.optim.lr_scheduler.PolynomialLR(optimiser, steps, power=0.9)
            for _ in progress(range(steps), f"training, seed {seed}", steps):
                chosen = [rng.randrange(len(self.parts["train"])) for _ in range(8)]
                views = [self.load(number, side, rng) for number in chosen]
                seen = look(torch.stack([image for image, _ in views]))
                optimiser.zero_grad()
                torch.autograd.backward(self.loss(head, seen, [label for _, label in views]))
                optimiser.step()
                decay.step()
            scores.append(self.score(head.eval(), look, "test", side))
            first = first or self.saved_head(head)
        assert first is not None
        return Fitted(scores, first, {})
