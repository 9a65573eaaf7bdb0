"""Veca: the forward pass, top to bottom (paper, section 3; docs/mathematics.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from veca.attention import Attention, AttentionMaps
from veca.config import VecaConfig, model_config
from veca.cores import CoreBank
from veca.errors import InputError
from veca.pieces import PATCHES, PieceRunner, can_run
from veca.rope import Rotation, join, patch_rotation, rotation

if TYPE_CHECKING:
    from veca.strips import StripSource


class VecaOutput(NamedTuple):
    """What the model says of a batch of images; D′ is the teacher's width where it differs from D."""

    cls: Tensor
    """B×D′, the global feature: the first core"""
    patches: Tensor
    """B×N×D′, the dense feature, row by row"""
    cores: Tensor
    """B×C×D′, all active cores"""
    coords: Tensor
    """B×C×2, where the cores sit after the last layer: (x, y) in [−1, 1]"""
    grid: tuple[int, int]
    """(h, w), h·w = N"""
    attention: list[AttentionMaps] | None = None
    """one per layer, on request"""


class Layers(NamedTuple):
    """What happens on the way: the raw tokens after each block, before the final norm."""

    tokens: list[Tensor]  # B×(C+N)×D, cores first
    coords: list[Tensor]  # B×C×2, where the cores sat in each block
    attention: list[AttentionMaps]
    grid: tuple[int, int]


class Veca(nn.Module):
    """A vision backbone whose patches talk only through a few cores.

    >>> model = veca.create_model("veca_small").eval()
    >>> out = model(images, cores=16)  # B×3×H×W, ImageNet-normalised; H and W multiples of the patch size
    """

    def __init__(self, config: VecaConfig) -> None:
        super().__init__()
        self.config = config
        self.default_cores = config.bank  # what `cores=None` means
        self.card: dict[str, Any] = {}  # where the weights came from, for `veca info`
        self.patch_embed = PatchEmbed(config)
        if config.positions == "table":
            self.table = nn.Parameter(torch.empty(config.table_size, config.table_size, config.width))
        self.bank = CoreBank(config.bank, config.width, config.depth)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.project = nn.Linear(config.width, config.feature_width) if config.out_width else nn.Identity()
        self.grad_checkpointing = False
        self.init_weights()
        self.requires_grad_()

    def init_weights(self) -> None:
        """Truncated normal weights, zero biases. The bank and the norms initialise themselves."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                nn.init.trunc_normal_(module.weight, std=0.02)
                assert module.bias is not None
                nn.init.zeros_(module.bias)
        if self.config.positions == "table":
            nn.init.trunc_normal_(self.table, std=0.02)

    def requires_grad_(self, requires_grad: bool = True) -> Veca:
        """As PyTorch's, but positions that nothing turns with stay out of training: they never get a gradient, and
        DistributedDataParallel would wait for one.
        """
        super().requires_grad_(requires_grad)
        if not self.config.turns:
            for parameter in self.bank.positions():
                parameter.requires_grad_(False)
        return self

    def forward(self, images: Tensor, cores: int | None = None, return_attention: bool = False) -> VecaOutput:
        """images: B×3×H×W → the named outputs; `cores` is the budget, from 1 to the bank's size (None:
        `default_cores`, which is all unless `veca.load(…, cores=…)` said otherwise).
        """
        layers = self.forward_layers(images, cores, return_attention=return_attention, last_only=True)
        tokens = self.project(self.norm(layers.tokens[-1]))
        budget = layers.coords[-1].shape[1]
        return VecaOutput(
            cls=tokens[:, 0],
            patches=tokens[:, budget:],
            cores=tokens[:, :budget],
            coords=layers.coords[-1],
            grid=layers.grid,
            attention=layers.attention if return_attention else None,
        )

    def forward_layers(
        self,
        images: Tensor,  # B×3×H×W
        cores: int | None = None,
        *,
        forced_patches: Sequence[Tensor | None] | None = None,  # per block, B×N×D; None: the block's own
        forcing: float = 1.0,
        return_attention: bool = False,
        last_only: bool = False,
    ) -> Layers:
        """Run the blocks and keep what comes out of each (or of the last only).

        `forced_patches` replaces the patches that enter each block, so that only the cores flow from block to block:
        the first phase of conversion feeds it the teacher's patches (docs/training.md). With `forcing` below 1 they are
        mixed with the block's own, of which 1 − `forcing` remains.
        """
        budget = self.check(images, cores)
        patches, grid = self.embed(images)
        tokens, state = self.bank.start(budget, images.shape[0])
        by_patch = self.patch_rotation(grid, images.device)
        x = torch.cat((tokens.to(patches.dtype), patches), dim=1)  # B×(C+N)×D
        in_pieces = None
        if forced_patches is None and not return_attention and can_run(self, x):
            in_pieces = PieceRunner(x, budget, self.config.heads, by_patch)  # the same blocks, faster, x in place
        kept, coords, attention = [], [], []
        for index, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            if forced_patches is not None and (forced := forced_patches[index]) is not None:
                fed = forced.to(x.dtype) if forcing == 1 else x[:, budget:].lerp(forced.to(x.dtype), forcing)
                x = torch.cat((x[:, :budget], fed), dim=1)
            if index > 0:
                state = self.bank.move(state, x[:, :budget], index)
            position = state.tanh()
            if in_pieces is not None:
                in_pieces.layer(block, self.rotation(position))
            else:
                by = join(self.rotation(position), by_patch)
                if return_attention:
                    attention.append(block.attn.maps(block.norm_attn(x), budget, by))
                if self.grad_checkpointing and torch.is_grad_enabled():
                    x = checkpoint(block, x, budget, by, use_reentrant=False)
                else:
                    x = block(x, budget, by)
            if last_only:
                kept, coords = [x], [position]
            else:
                kept.append(x.clone() if in_pieces is not None else x)
                coords.append(position)
        return Layers(kept, coords, attention, grid)

    def check(self, images: Tensor, cores: int | None) -> int:
        """The budget of this call; a ValueError says what was given and what is allowed."""
        patch = self.config.patch_size
        if images.ndim != 4 or images.shape[1] != 3:
            raise InputError(f"images must be B×3×H×W, not {'×'.join(map(str, images.shape)) or 'a scalar'}")
        height, width = images.shape[-2:]
        if height < patch or width < patch or height % patch or width % patch:
            raise InputError(
                f"the height and width of images must be multiples of the patch size {patch}, not {height}×{width}"
            )
        if not images.is_floating_point():
            raise InputError(f"images must be floating point, normalised as veca.preprocess does, not {images.dtype}")
        budget = self.default_cores if cores is None else cores
        if isinstance(budget, bool) or not isinstance(budget, (int, torch.SymInt)):
            raise InputError(
                f"cores must be a whole number from 1 to {self.config.bank}, or None for all, not {cores!r}"
            )
        if not 1 <= budget <= self.config.bank:
            raise InputError(f"cores must lie between 1 and {self.config.bank} (this model's bank), not {cores}")
        return budget

    def embed(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Patch tokens (B×N×D), with their table entries where the model has a table, and their grid."""
        patches, grid = self.patch_embed(images)
        if self.config.positions == "table":
            patches = patches + self.resized_table(grid).to(patches.dtype)
        return patches, grid

    def resized_table(self, grid: tuple[int, int]) -> Tensor:
        """The additive table at a grid's size: N×D, bicubic as DINOv2 does it."""
        table = self.table.permute(2, 0, 1)[None].float()
        table = nn.functional.interpolate(table, size=grid, mode="bicubic", align_corners=False)
        return table[0].flatten(1).transpose(0, 1)

    def rotation(self, coords: Tensor) -> Rotation:
        return rotation(coords, self.config.head_width, self.config.rope_zero_fraction)

    def patch_rotation(self, grid: tuple[int, int], device: torch.device) -> Rotation:
        config = self.config
        return patch_rotation(*grid, config.head_width, config.rope_zero_fraction, device, self.training)

    # The DINO family's names, so that a user of DINOv2 or DINOv3 swaps one line.

    def forward_features(self, x: Tensor, cores: int | None = None) -> dict[str, Tensor | None]:
        """DINOv3's dictionary: the global feature, the other cores where it has registers, the patches, and all tokens
        before the final norm; `masks` is None.
        """
        layers = self.forward_layers(x, cores, last_only=True)
        tokens = self.project(self.norm(layers.tokens[-1]))
        budget = layers.coords[-1].shape[1]
        return {
            "x_norm_clstoken": tokens[:, 0],
            "x_storage_tokens": tokens[:, 1:budget],  # the other cores
            "x_norm_patchtokens": tokens[:, budget:],
            "x_prenorm": layers.tokens[-1],
            "masks": None,
        }

    def get_intermediate_layers(
        self,
        x: Tensor,
        n: int | Sequence[int] = 1,
        *,
        reshape: bool = False,
        return_class_token: bool = False,
        return_extra_tokens: bool = False,
        norm: bool = True,
        cores: int | None = None,
    ) -> tuple[Tensor | tuple[Tensor, ...], ...]:
        """Patches after the last `n` blocks, or after the blocks listed (from 0), as DINOv3 returns them.

        These keep the width D: the output projection belongs to the last layer only.
        """
        wanted = range(self.depth - n, self.depth) if isinstance(n, int) else n
        if any(not 0 <= index < self.depth for index in wanted):
            raise InputError(f"layers must lie between 0 and {self.depth - 1} (n at most {self.depth}), not {n!r}")
        layers = self.forward_layers(x, cores)
        budget = layers.coords[0].shape[1]
        outputs: list[Tensor | tuple[Tensor, ...]] = []
        for index in wanted:
            tokens = self.norm(layers.tokens[index]) if norm else layers.tokens[index]
            patches = tokens[:, budget:]
            if reshape:
                patches = patches.transpose(1, 2).unflatten(-1, layers.grid).contiguous()
            extras = ((tokens[:, 0],) if return_class_token else ()) + (
                (tokens[:, 1:budget],) if return_extra_tokens else ()
            )
            outputs.append((patches, *extras) if extras else patches)
        return tuple(outputs)

    @property
    def embed_dim(self) -> int:
        return self.config.width

    @property
    def num_features(self) -> int:
        return self.config.feature_width

    @property
    def patch_size(self) -> int:
        return self.config.patch_size

    @property
    def depth(self) -> int:
        return self.config.depth

    @property
    def num_prefix_tokens(self) -> int:
        return self.default_cores

    def stream(
        self,
        source: StripSource,
        cores: int | None = None,
        tile: int = PATCHES,
        *,
        tokens: Literal["float32", "float16"] = "float32",
        spill: str | Path | None = None,
        out: str | Path | None = None,
        report: Callable[[str, int, int], None] | None = None,
    ) -> VecaOutput:
        """The exact forward pass of one image of any size, at most `tile` patches at a time, without gradients.

        `source` is an array or memory map (H×W×3), a path to a TIFF file, which is read strip by strip, to an .npy or
        to any other image, or a normalised tensor (3×H×W). It is taken at its own size; rows and columns beyond the
        last whole patch are left out. Memory is one buffer of tokens (N·D numbers) and a constant: `tokens="float16"`
        halves the buffer at the cost of rounding, `spill` keeps it in a file in that folder. `out` is an .npy file
        (h×w×D′) for the dense feature, which the result then maps. `report` hears what is done, how much, of how much.
        """
        from veca.streaming import stream

        return stream(self, source, cores, tile, tokens, spill, out, report)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keep only each block's input while training and compute the rest again in the backward pass."""
        self.grad_checkpointing = enable

    def save(self, folder: str | Path) -> None:
        """Write `config.json` and `model.safetensors`, whole or not at all."""
        from veca.weights import save

        save(self, folder)


class PatchEmbed(nn.Module):
    """A convolution whose stride is its kernel: one matrix product over the patches' pixels, which is faster so."""

    def __init__(self, config: VecaConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, config.width, kernel_size=config.patch_size, stride=config.patch_size)

    def forward(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:  # B×3×H×W → B×N×D, (h, w)
        patch = self.proj.kernel_size[0]
        batch, channels, height, width = images.shape
        grid = (height // patch, width // patch)
        pixels = images.reshape(batch, channels, grid[0], patch, grid[1], patch).permute(0, 2, 4, 1, 3, 5)
        pixels = pixels.reshape(batch, grid[0] * grid[1], channels * patch * patch)
        return nn.functional.linear(pixels, self.proj.weight.flatten(1), self.proj.bias), grid


class Block(nn.Module):
    """Attention, then an MLP, each on normalised tokens and added to the stream."""

    def __init__(self, config: VecaConfig) -> None:
        super().__init__()
        self.gated = config.mlp == "swiglu"
        self.norm_attn = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.attn = Attention(config)
        self.norm_mlp = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.fc1 = nn.Linear(config.width, config.hidden_width * (2 if self.gated else 1))
        self.fc2 = nn.Linear(config.hidden_width, config.width)

    def forward(self, x: Tensor, cores: int, by: Rotation) -> Tensor:  # B×(C+N)×D
        x = x + self.attn(self.norm_attn(x), cores, by)
        out: Tensor = x + self.mlp(self.norm_mlp(x))
        return out

    def mlp(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x)
        if self.gated:
            u, v = hidden.chunk(2, dim=-1)
            hidden = nn.functional.silu(u) * v
        else:
            hidden = nn.functional.gelu(hidden)
        out: Tensor = self.fc2(hidden)
        return out


def create_model(name: str, **overrides: Any) -> Veca:
    """A model of a named size with fresh weights; `overrides` are settings of `VecaConfig`."""
    return Veca(model_config(name, **overrides))
