"""Starting points: a teacher's patch embedding, or a student made of the whole teacher.

Which tensor goes where is a table per family of teachers. Layer scale has no place in a VECA block, so it is multiplied
into the projection before it. DINOv3 turns channel i with channel i + d/2 and takes y before x; VECA turns neighbours
and takes x before y: the same rotation after reordering the rows of the query and key projections within each head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from veca import table
from veca.config import VecaConfig
from veca.errors import InputError
from veca.model import Veca
from veca.optim import kinds
from veca.teachers import Teacher


class Source(NamedTuple):
    """Where a tensor of a block comes from in the teacher's block."""

    names: tuple[str, ...]  # concatenated along the rows
    scale: str | None = None  # the layer scale that multiplies the rows
    rotary: bool = False  # rows to reorder where the teacher is rotary


@dataclass(frozen=True)
class Family:
    """One table: names in the teacher, by names in the student."""

    blocks: str  # the prefix of block i
    patch_embed: str
    norm: str
    position_table: str | None
    sources: Mapping[str, Source]
    gated_sources: Mapping[str, Source]  # used instead where the teacher's MLP is gated


def _block_sources(fc1: tuple[str, ...], fc2: str) -> dict[str, Source]:
    sources = {}
    for kind in ("weight", "bias"):
        sources[f"norm_attn.{kind}"] = Source((f"norm1.{kind}",))
        sources[f"norm_mlp.{kind}"] = Source((f"norm2.{kind}",))
        sources[f"attn.q_proj.{kind}"] = Source((f"attention.q_proj.{kind}",), rotary=True)
        sources[f"attn.k_proj.{kind}"] = Source((f"attention.k_proj.{kind}",), rotary=True)
        sources[f"attn.v_proj.{kind}"] = Source((f"attention.v_proj.{kind}",))
        sources[f"attn.out_proj.{kind}"] = Source((f"attention.o_proj.{kind}",), scale="layer_scale1.lambda1")
        sources[f"fc1.{kind}"] = Source(tuple(f"{name}.{kind}" for name in fc1))
        sources[f"fc2.{kind}"] = Source((f"{fc2}.{kind}",), scale="layer_scale2.lambda1")
    return sources


_DINOV2 = Family(
    blocks="encoder.layer",
    patch_embed="embeddings.patch_embeddings.projection",
    norm="layernorm",
    position_table="embeddings.position_embeddings",
    sources=_block_sources(("mlp.fc1",), "mlp.fc2"),
    gated_sources=_block_sources(("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"),
)
_DINOV3 = Family(
    blocks="model.layer",
    patch_embed="embeddings.patch_embeddings",
    norm="norm",
    position_table=None,
    sources=_block_sources(("mlp.up_proj",), "mlp.down_proj"),
    gated_sources=_block_sources(("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"),
)
FAMILIES: dict[str, Family] = {"dinov2": _DINOV2, "dinov2_with_registers": _DINOV2, "dinov3_vit": _DINOV3}

# Names of transformers before version 5, by today's.
_OLD_NAMES = {
    "attention.q_proj": "attention.attention.query",
    "attention.k_proj": "attention.attention.key",
    "attention.v_proj": "attention.attention.value",
    "attention.o_proj": "attention.output.dense",
    "model.layer": "layer",
}


@dataclass
class Report:
    """What a student got from its teacher, or from the model that it continues."""

    copied: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def text(self, model: Veca) -> str:
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}

        def line(title: str, names: list[str]) -> str:
            return f"{title}: {len(names)} tensors, {sum(sizes[n] for n in names):,} values ({kinds(names)})"

        shares = [line(title, names) for title, names in (("copied", self.copied), ("new", self.new)) if names]
        return "\n".join([*shares, *self.notes])


def student_config(teacher: Teacher, **overrides: object) -> VecaConfig:
    """The geometry of the teacher as a student's; `overrides` replace settings of VecaConfig."""
    family, config = _family(teacher), teacher.config
    gated = bool(getattr(config, "use_gated_mlp", False) or getattr(config, "use_swiglu_ffn", False))
    activation = str(config.hidden_act)
    swiglu = gated and (activation == "silu" or teacher.kind != "dinov3_vit")  # DINOv2's is, whatever its config says
    if not swiglu and (gated or activation != "gelu"):
        raise InputError(f"cannot convert {teacher.name}: its MLP uses {activation!r}, a student has gelu or SwiGLU")
    hidden = _tensor(teacher, f"{family.blocks}.0.{_sources(teacher)['fc2.weight'].names[0]}").shape[1]
    ratio = hidden / teacher.width
    if int(teacher.width * ratio) != hidden:  # a division that rounded down
        ratio = (hidden + 0.5) / teacher.width
    shape: dict[str, object] = {
        "depth": teacher.depth,
        "width": teacher.width,
        "heads": config.num_attention_heads,
        "mlp": "swiglu" if gated else "gelu",
        "mlp_ratio": ratio,
        "patch_size": teacher.patch_size,
        "norm_eps": config.layer_norm_eps,
        "positions": "table" if family.position_table else "rope",
        # Queries and keys were learned with the teacher's rotation, or with none: any other scrambles what they find.
        "rope_zero_fraction": 1.0 if family.position_table else 0.0,
    }
    if family.position_table:
        shape["table_size"] = math.isqrt(_tensor(teacher, family.position_table).shape[1] - 1)
    return VecaConfig.from_dict({**shape, **overrides})


@torch.no_grad()
def copy_teacher(student: Veca, teacher: Teacher) -> Report:
    """Every tensor of the teacher that has a place in the student goes there; the rest of the student is as it was."""
    family, report = _family(teacher), Report()
    parameters = dict(student.named_parameters())

    def put(name: str, value: Tensor | None) -> None:
        if value is None:  # no bias in the teacher is a bias of zero; no weight is something we do not know
            if not name.endswith(".bias"):
                raise InputError(f"cannot convert {teacher.name}: it has no tensor for {name} of the student")
            value = torch.zeros_like(parameters[name])
        if parameters[name].shape != value.shape:
            shapes = ["×".join(map(str, shape)) for shape in (value.shape, parameters[name].shape)]
            raise InputError(
                f"cannot convert {teacher.name}: {name} is {shapes[0]} there and {shapes[1]} in the student; "
                "leave --student at the teacher's own geometry"
            )
        parameters[name].copy_(value)
        report.copied.append(name)

    for kind in ("weight", "bias"):
        put(f"patch_embed.proj.{kind}", _find(teacher, f"{family.patch_embed}.{kind}"))
        put(f"norm.{kind}", _find(teacher, f"{family.norm}.{kind}"))
        for layer in range(student.config.depth):
            for name, source in _sources(teacher).items():
                if name.endswith(kind):
                    put(f"blocks.{layer}.{name}", _block_tensor(teacher, f"{family.blocks}.{layer}", source))
    place_cores(student, teacher, report)
    if student.config.positions == "table":
        entries = _tensor(teacher, family.position_table or "")[0, 1:]
        put("table", entries.reshape(student.config.table_size, student.config.table_size, -1))
    report.new = [name for name in parameters if name not in report.copied]
    return report


def place_cores(student: Veca, teacher: Teacher, report: Report) -> None:
    """The first core is the class token, the next ones are registers, each of the others a grey patch at its place.

    Pixels are normalised, so the embedding of an average patch is the embedding's bias. Blocks that were trained on
    patches know what to do with such a token: it reads its surroundings, and those read it.
    """
    tokens, states = student.bank.tokens, student.bank.states
    registers = _find(teacher, "embeddings.register_tokens")
    first = _tensor(teacher, "embeddings.cls_token")[0]  # 1×D
    learned = _find(teacher, _family(teacher).position_table or "")
    tokens.copy_(_tensor(teacher, f"{_family(teacher).patch_embed}.bias").expand_as(tokens))
    if learned is not None:
        first = first + learned[0, :1]
        side = math.isqrt(learned.shape[1] - 1)
        tokens.add_(table.at_points(learned[0, 1:].reshape(side, side, -1), states.tanh()))
    heads = first if registers is None else torch.cat((first, registers[0]))
    heads = heads[: len(tokens)]
    tokens[: len(heads)] = heads
    if learned is None:
        states[: len(heads)] = 0  # a rotary teacher does not turn these tokens, and the origin does not turn
    if student.config.rope_zero_fraction == 1:
        student.bank.alpha.zero_()  # nothing depends on where cores go, so they stay
    named = "core 0 from the class token" + (f", cores 1–{len(heads) - 1} from registers" if len(heads) > 1 else "")
    report.notes.append(f"bank.tokens: {named}, the others as grey patches at their coordinates")


@torch.no_grad()
def copy_patch_embedding(student: Veca, teacher: Teacher) -> Report:
    """The paper's start: the teacher's patch embedding where the shapes agree, all else fresh."""
    ours = student.patch_embed.proj
    report = Report()
    for module in teacher.model.modules():
        if isinstance(module, nn.Conv2d) and module.weight.shape == ours.weight.shape:
            assert ours.bias is not None
            ours.weight.copy_(module.weight)
            if module.bias is not None:
                ours.bias.copy_(module.bias)
            report.copied = ["patch_embed.proj.weight", "patch_embed.proj.bias"]
            break
    else:
        shape = "×".join(map(str, ours.weight.shape))
        report.notes.append(f"the teacher has no patch embedding of shape {shape}: the student's is new")
    report.new = [name for name, _ in student.named_parameters() if name not in report.copied]
    return report


def _family(teacher: Teacher) -> Family:
    if teacher.kind not in FAMILIES:
        raise InputError(
            f"cannot convert a teacher of type {teacher.kind!r}: there are tables for {', '.join(FAMILIES)}; "
            "start with --init patch-embedding instead"
        )
    return FAMILIES[teacher.kind]


def _sources(teacher: Teacher) -> Mapping[str, Source]:
    family, config = _family(teacher), teacher.config
    gated = getattr(config, "use_gated_mlp", False) or getattr(config, "use_swiglu_ffn", False)
    return family.gated_sources if gated else family.sources


def _block_tensor(teacher: Teacher, block: str, source: Source) -> Tensor | None:
    parts = [_find(teacher, f"{block}.{name}") for name in source.names]
    present = [part for part in parts if part is not None]
    if len(present) < len(parts):
        return None
    value = torch.cat(present)
    if source.scale is not None:
        scale = _find(teacher, f"{block}.{source.scale}")
        if scale is not None:
            value = value * (scale[:, None] if value.ndim == 2 else scale)
    if source.rotary and _family(teacher).position_table is None:
        value = value[rotary_order(teacher.width, teacher.config.num_attention_heads)]
    return value


def rotary_order(width: int, heads: int) -> Tensor:
    """For each row of VECA's query or key projection, the row of DINOv3's."""
    d = width // heads
    y = torch.stack((torch.arange(d // 4), torch.arange(d // 4) + d // 2), dim=1).flatten()
    within = torch.cat((y + d // 4, y))  # x first
    return (torch.arange(heads)[:, None] * d + within).flatten()


def _find(teacher: Teacher, name: str) -> Tensor | None:
    tensors = teacher.model.state_dict()
    if name not in tensors:
        for new, old in _OLD_NAMES.items():
            name = name.replace(new, old)
    tensor = tensors.get(name)
    return None if tensor is None else tensor.float()


def _tensor(teacher: Teacher, name: str) -> Tensor:
    tensor = _find(teacher, name)
    if tensor is None:
        raise InputError(f"cannot convert {teacher.name}: it has no tensor {name}")
    return tensor
