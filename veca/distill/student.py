"""The student: what it starts from, what it is asked for in a step, and how the teacher's features are distributed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from veca.config import VecaConfig, model_config
from veca.distill.convert import Report, copy_patch_embedding, copy_teacher, student_config
from veca.distill.growing import grow_bank, wake_rotation
from veca.distill.losses import Loss, Moments, Standard, Standards, distillation_loss, gram_loss, hint_loss
from veca.distill.settings import Distillation
from veca.errors import InputError
from veca.mixed import choose_cells
from veca.model import Veca
from veca.scan import spread
from veca.teachers import Teacher, TeacherOutput
from veca.weights import load

GRAM_PATCHES = 256  # of an image, drawn each step: pairs grow with the square


def build_student(
    settings: Distillation, teacher: Teacher, views: Callable[[int], Iterable[Tensor]] = lambda _: ()
) -> tuple[Veca, Report]:
    """A model with the weights it starts from, and what came from where.

    `views` gives some of the images to train on, B×3×S×S, for a patch size: rotation needs them.
    """
    chosen: dict[str, Any] = {"attention": settings.attention}
    if settings.bank:
        chosen["bank"] = settings.bank
    if settings.rope_zero_fraction is not None and not settings.rotate:
        chosen["rope_zero_fraction"] = settings.rope_zero_fraction
    if settings.init not in ("patch-embedding", "teacher", "fresh"):
        model = load(_model_folder(settings.init))
        model.calibration = None  # of weights that will be others
        report = Report(copied=[name for name, _ in model.named_parameters()], notes=[f"all from {settings.init}"])
        if model.config.feature_width != teacher.width:
            raise InputError(
                f"{settings.init} gives features {model.config.feature_width} wide, the teacher {teacher.width}: "
                "continue with the teacher it was trained with"
            )
        if settings.attention == "dense" and model.config.attention != "dense":
            raise InputError(f"--attention dense: {settings.init} has core attention, and goes on with it")
        if not settings.rotate and settings.rope_zero_fraction not in (None, model.config.rope_zero_fraction):
            raise InputError(
                f"--rope-zero-fraction {settings.rope_zero_fraction}: {settings.init} has "
                f"{model.config.rope_zero_fraction}, and goes on with it "
                "(--rotate lets a model without rotation turn)"
            )
        if settings.bank not in (0, model.config.bank):
            model = grow_bank(model, settings.bank)
            report.notes.append(f"bank: {settings.bank} cores, the new ones as grey patches where none sat")
    elif settings.student == "teacher":
        model = Veca(student_config(teacher, **chosen))
        report = copy_teacher(model, teacher)
    else:
        if teacher.width != model_config(settings.student).width:
            chosen["out_width"] = teacher.width
        model = Veca(model_config(settings.student, **chosen))
        starts = {"patch-embedding": copy_patch_embedding, "teacher": copy_teacher}
        fresh = Report(new=[name for name, _ in model.named_parameters()])
        report = starts[settings.init](model, teacher) if settings.init in starts else fresh
    if settings.rotate and not model.config.turns:
        fraction = VecaConfig.rope_zero_fraction if settings.rope_zero_fraction is None else settings.rope_zero_fraction
        model = wake_rotation(model, fraction, torch.cat(list(views(model.config.patch_size))))
        report.notes.append("rotation: turns what mattered least; the cores may move")
    if settings.wants_layers and (teacher.depth, teacher.width) != (model.config.depth, model.config.width):
        raise InputError(
            f"hints and forcing need a student as deep and wide as the teacher ({teacher.depth} layers, "
            f"{teacher.width} wide), not {model.config.depth} and {model.config.width}: "
            "use --hints 0 --forcing 0 --fading 0"
        )
    too_many = [budget for budget in (*settings.budgets, *settings.val_budgets) if not 1 <= budget <= model.config.bank]
    if too_many:
        raise InputError(f"budgets must lie between 1 and {model.config.bank}, not {too_many[0]}")
    return model, report


def _model_folder(source: str) -> str:
    """A model folder as it is, and of a run's folder its best model."""
    return str(Path(source) / "best") if (Path(source) / "best" / "model.safetensors").is_file() else source


class Student(nn.Module):
    """The model as a training step calls it, in one forward pass that DistributedDataParallel can watch."""

    def __init__(self, model: Veca) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        images: Tensor,  # B×3×H×W
        cores: int,
        target: TeacherOutput,
        standards: Standards | None,
        hint_weight: float,
        hint_standard: Standard | None,
        forced: float,  # how much of the patches that enter a block is the teacher's; 0: the student runs freely
        share: float = 1.0,  # of the patches that are computed where forced is 1; the cores still read all
        read: float = 1.0,  # of the patches that the cores read
        gram_weight: float = 0.0,
        mixed: float = 1.0,  # share of the patches that is spent at mixed scale, where the student runs freely
    ) -> Loss:
        """The loss against the teacher's features; with `forced`, each block is fed the teacher's patches.

        At mixed scale all patches are read. The dense output is compared with all of the teacher's patches, and what
        leaves a block with the teacher's averaged over each cell.
        """
        hints, given = hint_weight > 0, target.layers
        assert given is not None or not forced
        fed, looking = None, None
        if forced:
            assert given is not None
            fed = [
                None,
                *given[:-1],
            ]  # the first block gets the student's own: every parameter takes part
            if forced == 1:  # only then is what leaves a block not needed by the next
                looking = choose_patches(target.patches.shape[1], share, images.device)
            if looking is not None:
                target = TeacherOutput(target.cls, target.patches[:, looking], given[:, :, looking])
        patch, cells, reading = self.model.patch_size, None, None
        if mixed < 1 and not forced:
            cells = choose_cells(images, patch, mixed)
        else:
            reading = even_share(images.shape[-2:], patch, read, images.device)
        layers = self.model.forward_layers(
            images, cores, forced_patches=fed, forcing=forced, looking=looking, reading=reading,
            cells=cells, last_only=not hints,
        )  # fmt: skip
        cls, patches = self.model.output(layers.cores[-1][:, 0]), self.model.output(layers.patches[-1])
        if cells is not None:
            patches = cells.spread(patches)
        loss = distillation_loss(cls, patches, target.cls, target.patches, standards)
        if hints:
            assert target.layers is not None
            assert hint_standard is not None
            theirs = map(cells.averaged, target.layers) if cells is not None else target.layers
            hint = hint_weight * hint_loss(layers.patches, theirs, hint_standard)
            loss = loss._replace(total=loss.total + hint, hints=hint)
        if gram_weight:
            some = choose_patches(patches.shape[1], GRAM_PATCHES / patches.shape[1], images.device)
            both = [side if some is None else side[:, some] for side in (patches, target.patches)]
            if standards is not None:
                both = [standards.patches(side.float()) for side in both]
            loss = loss._replace(total=loss.total + gram_weight * gram_loss(*both))
        return loss


def choose_patches(count: int, share: float, device: torch.device) -> Tensor | None:
    """A random share of the patches, drawn from PyTorch's generator, which the engine seeds for every step."""
    if share >= 1:
        return None
    return torch.randperm(count)[: max(1, round(share * count))].sort().values.to(device)


def even_share(size: Sequence[int], patch: int, share: float, device: torch.device) -> Tensor | None:
    """As many patches as a scan with this `share` reads, as evenly spread, but others in every step."""
    if share >= 1:
        return None
    grid = (size[0] // patch, size[1] // patch)
    patches = spread(torch.arange(grid[0] * grid[1]), grid)
    first = int(torch.randint(len(patches), ()))
    return patches.roll(-first)[: max(1, round(share * len(patches)))].sort().values.to(device)


@torch.no_grad()
def estimate_standards(outputs: Iterator[TeacherOutput]) -> Standards:
    """How the teacher's features are distributed over a sample of images."""
    cls, patches, layers = Moments(), Moments(), Moments(keep=1)
    for out in outputs:
        cls.add(out.cls)
        patches.add(out.patches)
        if out.layers is not None:
            layers.add(out.layers)
    return Standards(cls.standard(), patches.standard(), layers.standard() if layers.count else None)


def standards_to_dict(standards: Standards) -> dict[str, Tensor]:
    """As a checkpoint holds them."""
    named = {name: standard for name, standard in standards._asdict().items() if standard is not None}
    return {f"{name}.{key}": value for name, std in named.items() for key, value in std._asdict().items()}


def standards_from_dict(values: dict[str, Tensor], device: torch.device) -> Standards:
    def standard(name: str) -> Standard:
        return Standard(values[f"{name}.mean"].to(device), values[f"{name}.deviation"].to(device))

    return Standards(standard("cls"), standard("patches"), standard("layers") if "layers.mean" in values else None)
