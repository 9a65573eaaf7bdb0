"""NorMuon for the weight matrices, AdamW for everything else (NorMuon: arXiv 2510.05491).

Which parameter goes where is decided by `split_parameters`, and printed as a table when training starts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor, nn

from veca import tabulate
from veca.model import Veca

FRESH_DEVIATION = 0.02  # of a fresh model's matrices

# Optimal quintics for singular values in [1e-3, 1] (Polar Express, arXiv 2505.16932), five iterations.
POLAR_EXPRESS = (
    (8.237312490, -23.157747415, 16.680568411),
    (4.082441999, -2.893047735, 0.525284926),
    (3.926347992, -2.854746803, 0.531802242),
    (3.298218713, -2.424541981, 0.486320084),
    (2.320007313, -1.686216973, 0.420680273),
)


def orthogonalise(matrices: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The nearest (semi-)orthogonal matrix to each of K×rows×columns, roughly, by five matrix polynomials."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices  # so that the Gram matrix below is the smaller of the two
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) * 1.01 + 1e-7)).to(dtype)
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class NorMuon(torch.optim.Optimizer):
    """Momentum, orthogonalised, normalised row by row.

    `polar_dtype` is the precision of the orthogonalisation: bfloat16 as in the paper; a CPU without bfloat16
    arithmetic is several times faster, and more exact, in float32.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 4e-4,
        weight_decay: float = 0.015,
        momentum: float = 0.95,
        beta2: float = 0.95,
        eps: float = 1e-8,
        polar_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "beta2": beta2, "eps": eps}
        super().__init__(params, defaults)
        self.polar_dtype = polar_dtype

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for parameters in by_shape.values():  # one batched orthogonalisation a shape
                self._update(parameters, group)
        return loss

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        rows, columns = parameters[0].shape
        momentum, beta2, lr = group["momentum"], group["beta2"], group["lr"]
        directions = []
        for parameter in parameters:
            assert parameter.grad is not None
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
                state["variance"] = parameter.new_zeros(rows, 1)
            state["momentum"].mul_(momentum).add_(parameter.grad)
            directions.append(parameter.grad.add(state["momentum"], alpha=momentum))  # Nesterov
        for parameter, u in zip(parameters, orthogonalise(torch.stack(directions), self.polar_dtype), strict=True):
            u = u.to(parameter.dtype)
            norm = u.norm()
            variance = self.state[parameter]["variance"]
            variance.mul_(beta2).add_(u.square().mean(dim=1, keepdim=True), alpha=1 - beta2)
            u = u / (variance.sqrt() + group["eps"])
            u *= norm / (u.norm() + group["eps"])
            parameter.sub_(parameter * (parameter * u > 0), alpha=lr * group["weight_decay"])  # cautious decay
            parameter.sub_(u, alpha=lr * 0.2 * max(rows, columns) ** 0.5)


class Share(NamedTuple):
    """A set of parameters that one optimiser treats alike."""

    optimiser: Literal["NorMuon", "AdamW"]
    copied: bool  # whether the values came from the teacher, or from a model that is trained further
    names: list[str]
    parameters: list[nn.Parameter]


def split_parameters(
    model: Veca, copied: Collection[str] = (), matrices: Literal["normuon", "adamw"] = "normuon"
) -> list[Share]:
    """NorMuon takes the weights of linear layers, but not the coordinate heads or the last block's second MLP matrix.

    `copied` names the parameters whose values came from another model, so that they may have a rate of their own;
    `matrices="adamw"` leaves everything to AdamW. Parameters without gradients are left out.
    """
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    linear -= {name for name in linear if name.startswith("bank.heads.")}
    linear -= {f"blocks.{model.config.depth - 1}.fc2.weight"}
    shares: dict[tuple[str, bool], Share] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        optimiser: Literal["NorMuon", "AdamW"] = "NorMuon" if matrices == "normuon" and name in linear else "AdamW"
        key = (optimiser, name in copied)
        share = shares.setdefault(key, Share(optimiser, name in copied, [], []))
        share.names.append(name)
        share.parameters.append(parameter)
    return sorted(shares.values(), key=lambda share: (share.optimiser != "NorMuon", share.copied))


def build_optimisers(
    shares: list[Share],
    lr: float,
    weight_decay: float,
    copied_rate: float,
    polar_dtype: torch.dtype,
    relative_rates: bool = False,
) -> list[torch.optim.Optimizer]:
    """One optimiser of each kind; every group keeps its factor of the common rate curve as `rate`.

    With `relative_rates` every copied tensor has a factor of its own (`relative_rate`).
    """

    named = {name: p for share in shares for name, p in zip(share.names, share.parameters, strict=True)}

    def groups(kind: str) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        for share in (share for share in shares if share.optimiser == kind):
            if share.copied and relative_rates:
                made += [
                    {"params": [named[name]], "rate": copied_rate * relative_rate(name, named)} for name in share.names
                ]
            else:
                made.append({"params": share.parameters, "rate": copied_rate if share.copied else 1.0})
        return made

    optimisers: list[torch.optim.Optimizer] = []
    if matrix_groups := groups("NorMuon"):
        optimisers.append(NorMuon(matrix_groups, lr=lr, weight_decay=weight_decay, polar_dtype=polar_dtype))
    if other_groups := groups("AdamW"):
        fused = other_groups[0]["params"][0].device.type in ("cpu", "cuda")
        optimisers.append(
            torch.optim.AdamW(other_groups, lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=weight_decay, fused=fused)
        )
    return optimisers


def relative_rate(name: str, parameters: Mapping[str, Tensor]) -> float:
    """A matrix moves in proportion to its own size, the matrix of a fresh model (deviation 0.02) at the rate itself.

    The optimisers step by the rate whatever the gradient's size. A teacher's layer scale, multiplied into the
    projections that write to the stream, makes them 0.004 in the first blocks and 0.1 in the last: one rate for all
    would shake the first and hardly move the last. The biases of these projections go with them. The bank is no matrix
    of weights: its tokens move at the rate itself, and its positions, which a teacher does not have, 25 times as fast:
    at a rate that is right for going on from trained weights they would hardly leave their places.
    """
    matrix = parameters[name]
    if name.startswith("bank."):
        return 1.0 if name == "bank.tokens" else 25.0
    if name.endswith(("out_proj.bias", "fc2.bias")):
        matrix = parameters.get(name.removesuffix("bias") + "weight", matrix)
    return float(matrix.detach().square().mean().sqrt()) / FRESH_DEVIATION if matrix.ndim > 1 else 1.0


def set_rate(optimisers: list[torch.optim.Optimizer], lr: float) -> None:
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = lr * group["rate"]


def split_table(shares: list[Share]) -> str:
    """The split as text: optimiser, origin, tensors, values, and a few names."""
    rows = [("optimiser", "values", "tensors", "parameters", "which")]
    for share in shares:
        count = sum(parameter.numel() for parameter in share.parameters)
        origin = "copied" if share.copied else "new"
        rows.append((share.optimiser, origin, str(len(share.names)), f"{count:,}", kinds(share.names)))
    return tabulate.text(rows, left=(0, 1, 4))


def kinds(names: Iterable[str]) -> str:
    """`blocks.0.norm.weight`, `blocks.1.norm.weight`, … → `blocks.*.norm.weight`; at most three, and how many more."""
    found = list(dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in names))
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more kinds" if found[3:] else "")
