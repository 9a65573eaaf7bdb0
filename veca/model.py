"""Veca: the forward pass, top to bottom (paper, section 3; docs/research/mathematics.md)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from veca import table
from veca.block import AttentionMaps, Block
from veca.config import VecaConfig, model_config
from veca.cores import CoreBank
from veca.devices import in_memory
from veca.dino import DinoNames
from veca.errors import InputError, check_share
from veca.fused import FusedPass
from veca.images import MAX_PIXELS, SIZE, preprocess
from veca.mixed import Cells, by_tokens, choose_cells, leaves, tokens_of
from veca.rope import Rotation, axis_coords, grid_rotation, jitter, rotation

if TYPE_CHECKING:
    import numpy as np
    from torch.distributed import ProcessGroup

    from veca.auto import Calibration
    from veca.large.picture import StripSource
    from veca.large.sinks import Sink
    from veca.scan import Scan


NO_ATTENTION = "attention is shown over all patches of the grid: ask for it without patches="


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
    cells: Cells | list[Cells | None] | None = None
    """which squares stood for the patches, at mixed scale (None: the patches themselves); of shares of their own one
    for each image"""
    chosen: list[tuple[int, float]] | None = None
    """cores and share of the patches of each image, where "auto" chose them"""

    @property
    def tokens(self) -> list[int]:
        """How many squares were spent on each image."""
        batch, count = self.patches.shape[:2]
        each = self.cells if isinstance(self.cells, list) else [self.cells] * batch
        return [count if cells is None else cells.numbers.shape[1] for cells in each]


class Layers(NamedTuple):
    """What happens on the way: the raw tokens after the blocks that were kept, before the final norm."""

    cores: list[Tensor]  # B×C×D
    patches: list[Tensor]  # B×N×D
    coords: list[Tensor]  # B×C×2, where the cores sat in each of these blocks
    attention: list[AttentionMaps]
    grid: tuple[int, int]
    start: tuple[Tensor, Tensor]  # cores and patches that entered the first block
    joined: list[Tensor]  # B×(C+N)×D, where asked for
    cells: Cells | None = None  # what the patches are (N of them), at mixed scale

    @property
    def tokens(self) -> list[Tensor]:
        """B×(C+N)×D each, cores first."""
        return self.joined or [torch.cat(both, dim=1) for both in zip(self.cores, self.patches, strict=True)]


class Veca(DinoNames, nn.Module):
    """A vision backbone whose patches talk only through a few cores.

    >>> model = veca.create_model("veca_small").eval()
    >>> out = model(images, cores=16)  # B×3×H×W, ImageNet-normalised; H and W multiples of the patch size
    """

    def __init__(self, config: VecaConfig) -> None:
        super().__init__()
        self.config = config
        self.default_cores = config.bank  # what `cores=None` means
        self.card: dict[str, Any] = {}  # where the weights came from, for `veca info`
        self.calibration: Calibration | None = None  # what "auto" chooses by
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

    def forward(
        self,
        images: Tensor,
        cores: int | Literal["auto"] | None = None,
        return_attention: bool = False,
        is_training: None = None,
        *,
        patches: float | Sequence[float] | Literal["auto"] | None = None,
        tolerance: float = 0.98,
    ) -> VecaOutput:
        """images: B×3×H×W → the named outputs; `cores` is the budget, from 1 to the bank's size (None:
        `default_cores`, which is all unless `veca.load(…, cores=…)` said otherwise). `patches` is the share of the
        grid's patches to spend, coarse ones where there is little to see (`veca.mixed`), or one for each image; the
        output is as dense as ever. "auto" chooses either or both, as few as keep the dense feature within a cosine of
        `tolerance` of the full pass (`veca.auto`, after `veca calibrate`). `is_training` is DINOv2's, whose answer has
        another shape: it is refused with the name of what gives that answer here.
        """
        if is_training is not None:
            raise InputError(
                "DINOv2's is_training=True is model.forward_features(images) here, and is_training=False is "
                "model(images).cls; model.train() and model.eval() are PyTorch's"
            )
        if isinstance(cores, str) or isinstance(patches, str):
            from veca.auto import run

            if return_attention:
                raise InputError("attention is shown for what you choose yourself: ask for it without 'auto'")
            return run(self, images, cores, patches, tolerance)
        if isinstance(patches, Sequence) and not isinstance(patches, str):
            if return_attention:
                raise InputError(NO_ATTENTION)
            return self.forward_each(images, cores, patches)
        cells = self.cells(images, cores, patches)  # words were answered above
        if cells is not None and return_attention:
            raise InputError(NO_ATTENTION)
        return self._forward_cells(images, cores, cells, return_attention)

    def _forward_cells(
        self, images: Tensor, cores: int | None, cells: Cells | None, return_attention: bool = False
    ) -> VecaOutput:
        layers = self.forward_layers(images, cores, cells=cells, return_attention=return_attention, last_only=True)
        core_features, dense = self.output(layers.cores[-1]), self.output(layers.patches[-1])
        return VecaOutput(
            cls=core_features[:, 0],
            patches=dense if cells is None else cells.spread(dense),
            cores=core_features,
            coords=layers.coords[-1],
            grid=layers.grid,
            attention=layers.attention if return_attention else None,
            cells=cells,
        )

    def forward_each(
        self, images: Tensor, cores: int | None, shares: Sequence[float], order: Tensor | None = None
    ) -> VecaOutput:
        """Every image with its own share of the patches; those with as many tokens go through together. `order` is
        that in which cells are split, where it is known already (`veca.mixed.split_order`).
        """
        self.check(images, cores)
        if len(shares) != len(images) or not shares:
            raise InputError(f"patches must be one share, or one for each of {len(images)} images, not {len(shares)}")
        for share in shares:
            check_share(share, "patches")
        grid = (images.shape[-2] // self.config.patch_size, images.shape[-1] // self.config.patch_size)
        groups = by_tokens(grid, shares)
        outs = []
        for group in groups:
            known = None if order is None else order[group]
            cells = self.cells(images[group], cores, shares[group[0]], known)
            outs.append(self._forward_cells(images[group], cores, cells))
        numbers = [number for group in groups for number in group]
        back = torch.tensor(numbers, device=images.device).argsort()
        each = [
            Cells(out.cells.numbers[[place]], grid) if isinstance(out.cells, Cells) else None
            for group, out in zip(groups, outs, strict=True)
            for place in range(len(group))
        ]
        cls, dense, core_features, coords = (torch.cat(parts)[back] for parts in list(zip(*outs, strict=True))[:4])
        ordered = [each[place] for place in back.tolist()]
        return VecaOutput(cls, dense, core_features, coords, grid, cells=ordered)

    def forward_layers(
        self,
        images: Tensor,  # B×3×H×W
        cores: int | None = None,
        *,
        forced_patches: Sequence[Tensor | None] | None = None,  # per block, B×N×D; None: the block's own
        forcing: float = 1.0,
        looking: Tensor | None = None,
        reading: Tensor | None = None,
        cells: Cells | None = None,
        return_attention: bool = False,
        last_only: bool = False,
        keep: Collection[int] | None = None,
        joined: bool = False,
    ) -> Layers:
        """Run the blocks and keep what comes out of each, of the last only, or of those numbered in `keep`.

        `forced_patches` replaces the patches that enter each block, so that only the cores flow from block to block:
        the first phase of conversion feeds it the teacher's patches (docs/training.md). With `forcing` below 1 they are
        mixed with the block's own, of which 1 − `forcing` remains. Where every block but the first is given its
        patches, `looking` names those of which the output is wanted (n numbers): all are read, only these look. Only
        patches numbered in `reading` are read by the cores; None: all. With `cells` these are the patches (B×T×D),
        at mixed scale. With `joined` the next block gets views of `Layers.tokens`, so that gradients pass there.
        """
        budget = self.check(images, cores)
        patches, grid = self.embed(images, cells)
        tokens, state, pace = self.bank(budget, images.shape[0])
        tokens = tokens.to(patches.dtype)
        by_patch = self.patch_rotation(grid, images.device, cells)
        layers = Layers([], [], [], [], grid, (tokens, patches), [], cells)
        fused = None
        if forced_patches is None and reading is None and not return_attention and not joined:
            fused = FusedPass.start(self.blocks, tokens, patches)  # the same blocks, faster; None where it must not
        which = (looking,) if reading is None else (looking, reading)
        last = len(self.blocks) - 1
        for index, block in enumerate(self.blocks):
            if forced_patches is not None and (forced := forced_patches[index]) is not None:
                forced = forced.to(patches.dtype)
                patches = forced if forcing == 1 else patches.lerp(forced, forcing)
            if index > 0:
                state = self.bank.move(state, pace, tokens, index)
            position = state.tanh()
            by_core = self.rotation(position)
            if return_attention:
                normed = block.norm_attn(tokens), block.norm_attn(patches)  # type: ignore[operator]
                layers.attention.append(block.attn.maps(*normed, by_core, by_patch))  # type: ignore[operator, union-attr]
            if fused is not None:
                tokens, patches = fused.layer(index, by_core, by_patch)
            elif self.grad_checkpointing and torch.is_grad_enabled():
                tokens, patches = checkpoint(block, tokens, patches, by_core, by_patch, *which, use_reentrant=False)
            else:
                tokens, patches = block(tokens, patches, by_core, by_patch, *which)
            if index == last and state.requires_grad and not self.config.turns:
                idle = 0 * state.sum()  # unfrozen by a framework: a gradient of zero, for which DDP would wait
                tokens, patches = tokens + idle, patches + idle
            if joined:
                layers.joined.append(torch.cat((tokens, patches), dim=1))
                tokens, patches = layers.joined[-1][:, :budget], layers.joined[-1][:, budget:]
            if index == last if last_only else keep is None or index in keep:
                own = fused is not None and index < last  # the fused pass goes on in the same memory
                layers.cores.append(tokens.clone() if own else tokens)
                layers.patches.append(patches.clone() if own else patches)
                layers.coords.append(position)
        return layers

    def output(self, tokens: Tensor) -> Tensor:
        """The final norm and projection: …×D → …×D′."""
        features: Tensor = self.project(self.norm(tokens))
        return features

    def check(self, images: Tensor, cores: int | None) -> int:
        """The budget of this call; a ValueError says what was given and what is allowed."""
        patch = self.config.patch_size
        if not isinstance(images, Tensor):
            raise InputError(f"images must be one tensor, B×3×H×W, {_instead_of(images)}")
        channels = self.patch_embed.proj.in_channels  # 3, but in timm's hands
        if images.ndim != 4 or images.shape[1] != channels:
            raise InputError(f"images must be B×{channels}×H×W, not {'×'.join(map(str, images.shape)) or 'a scalar'}")
        height, width = images.shape[-2:]
        if height < patch or width < patch or height % patch or width % patch:
            raise InputError(
                f"the height and width of images must be multiples of the patch size {patch}, not {height}×{width}"
            )
        if not images.is_floating_point():
            raise InputError(f"images must be floating point, normalised as model.preprocess does, not {images.dtype}")
        return self.budget(cores)

    def budget(self, cores: int | None) -> int:
        """How many cores `cores` means."""
        budget = self.default_cores if cores is None else cores
        if isinstance(budget, bool) or not isinstance(budget, (int, torch.SymInt)):
            raise InputError(
                f"cores must be a whole number from 1 to {self.config.bank}, or None for all, not {cores!r}"
            )
        if not 1 <= budget <= self.config.bank:
            raise InputError(f"cores must lie between 1 and {self.config.bank} (this model's bank), not {cores}")
        return budget

    def cells(
        self, images: Tensor, cores: int | None, share: float | str | None, order: Tensor | None = None
    ) -> Cells | None:
        """The cells of a pass with this share of the patches, split in this `order` if it is known; None: the grid's
        own.
        """
        if share is None:
            return None
        check_share(share, "patches")
        self.check(images, cores)
        patch, share = self.config.patch_size, float(share)
        h, w = images.shape[-2] // patch, images.shape[-1] // patch
        if tokens_of((h, w), share) == h * w:
            return None
        return choose_cells(images, patch, share) if order is None else Cells(leaves(order, (h, w), share), (h, w))

    def embed(self, images: Tensor, cells: Cells | None = None) -> tuple[Tensor, tuple[int, int]]:
        """Patch tokens (B×N×D, or of `cells`), with their table entries where the model has a table, and the grid."""
        seen = images if cells is None else cells.squares(images, self.config.patch_size)
        patches, grid = self.patch_embed(seen)
        grid = grid if cells is None else cells.grid
        if self.config.positions == "table":
            own = in_memory(self, "table")
            entries = table.resized(own, grid) if cells is None else cells.entries(own)
            patches = patches + entries.to(patches.dtype)
        return patches, grid

    def rotation(self, coords: Tensor) -> Rotation | None:
        """Of tokens at `coords` (…×T×2); None where nothing turns."""
        return rotation(coords, self.config.head_width, self.config.rope_zero_fraction) if self.config.turns else None

    def lattice_rotation(self, across: Tensor, down: Tensor, points: Tensor | None = None) -> Rotation | None:
        """Of all points of a lattice, row by row, or of those numbered, from its coordinates along the axes."""
        config = self.config
        if not config.turns:
            return None
        return grid_rotation(across, down, config.head_width, config.rope_zero_fraction, points)

    def patch_rotation(
        self, grid: tuple[int, int], device: torch.device, cells: Cells | None = None
    ) -> Rotation | None:
        """Of a grid's patches, or of cells; in training their positions are drawn anew."""
        if not self.config.turns:
            return None
        across, down = axis_coords(grid[1], device), axis_coords(grid[0], device)
        if cells is not None:
            across, down = cells.centres.unbind(-1)
        if self.training:
            across, down = jitter(across, down)
        if cells is not None:
            return self.rotation(torch.stack((across, down), dim=-1))
        return self.lattice_rotation(across, down)

    def preprocess(self, source: Any, size: int = SIZE, max_pixels: int | None = MAX_PIXELS) -> Tensor:  # 1×3×H×W
        """A photo (path, bytes, PIL image, array) as this model expects it, the shorter side about `size` pixels."""
        weight = self.patch_embed.proj.weight
        image = preprocess(source, size, self.config.patch_size, max_pixels)
        return image.to(weight.device, weight.dtype)

    def stream(
        self,
        source: StripSource,
        cores: int | None = None,
        tile: int | None = None,
        *,
        tokens: Literal["float32", "float16"] = "float32",
        spill: str | Path | None = None,
        out: str | Path | Sink | None = None,
        report: Callable[[str, int, int], None] | None = None,
        where: str | Path | np.ndarray[Any, Any] | Tensor | None = None,
        group: ProcessGroup | None = None,
    ) -> VecaOutput:
        """The exact forward pass of one image of any size, at most `tile` patches at a time, without gradients.

        `source` is an array or memory map (H×W×3), a path to any image, a picture of `veca.open_source` (a slide, a
        scene, an array, at a resolution that you choose) or a normalised tensor (3×H×W). Rows and columns beyond the
        last whole patch are left out. Memory is one buffer of tokens (N·D numbers) and a constant: `tokens="float16"`
        halves the buffer at the cost of rounding, `spill` keeps it in a file in that folder. `out` is an .npy file
        (h×w×D′) for the dense feature, which the result then maps, or a sink (veca.large.sinks). `where` is a mask (see
        `scan`): the feature of what it leaves out is zero. `report` hears what is done, how much, of how much.
        With a `group` of torch.distributed its ranks, all of which call this, share the image (docs/parallel.md).
        There is no mixed scale here: `scan(source, patches=…)` has it, and looks anywhere.
        """
        from veca.streaming import stream

        return stream(self, source, cores, tile, tokens, spill, out, report, where, group)

    def scan(
        self,
        source: StripSource,
        cores: int | None = None,
        tile: int | None = None,
        *,
        share: float = 1.0,
        patches: float | str | None = None,
        where: str | Path | np.ndarray[Any, Any] | Tensor | None = None,
        tokens: Literal["float32", "float16"] = "float32",
        spill: str | Path | None = None,
        out: str | Path | Sink | None = None,
        report: Callable[[str, int, int], None] | None = None,
        group: ProcessGroup | None = None,
    ) -> Scan:
        """One pass over an image of any size that keeps what its cores went through: `look` at any part of it later.

        Takes what `stream` takes. With `share` below 1 the cores read an even share of the patches, at that share of
        the cost; with `patches` they read that share of them at mixed scale, coarse ones where there is little to see
        (the source is then read twice). `where` is a mask of any resolution (an array, a path to a picture or to
        GeoJSON): patches of which it covers less than half are neither read nor looked with; "auto" finds blank glass,
        or nodata.
        """
        from veca.scan import scan

        return scan(self, source, cores, tile, share, where, tokens, spill, out, report, group, patches)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keep only each block's input while training and compute the rest again in the backward pass."""
        self.grad_checkpointing = enable

    def save(self, folder: str | Path) -> None:
        """Write `config.json` and `model.safetensors`, whole or not at all."""
        from veca.weights import save

        save(self, folder)


class PatchEmbed(nn.Module):
    def __init__(self, config: VecaConfig) -> None:
        super().__init__()
        self.proj = PatchConv(3, config.width, kernel_size=config.patch_size, stride=config.patch_size)

    def forward(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:  # B×3×H×W → B×N×D, (h, w)
        patch = self.proj.kernel_size[0]
        grid = (images.shape[-2] // patch, images.shape[-1] // patch)
        # Called, not read: it may be an adapter, or on disk.
        return self.proj(images).flatten(2).transpose(1, 2).contiguous(), grid


class PatchConv(nn.Conv2d):
    """A convolution whose stride is its kernel: one matrix product over the patches' pixels, which is faster so."""

    def forward(self, images: Tensor) -> Tensor:  # B×3×H×W → B×D×h×w
        patch = self.kernel_size[0]
        batch, channels, height, width = images.shape
        grid = (height // patch, width // patch)
        pixels = images.reshape(batch, channels, grid[0], patch, grid[1], patch).permute(0, 2, 4, 1, 3, 5)
        pixels = pixels.reshape(batch, grid[0] * grid[1], channels * patch * patch)
        rows = nn.functional.linear(pixels, self.weight.flatten(1), self.bias)
        squares: Tensor = rows.transpose(1, 2).unflatten(2, grid)  # a view: `PatchEmbed` turns it back
        return squares


def _instead_of(images: object) -> str:
    """What to do with what was given as images."""
    if isinstance(images, (list, tuple)) and images and all(isinstance(image, Tensor) for image in images):
        return (
            f"not a {type(images).__name__} of {len(images)} tensors: stack crops of one size (torch.stack, or "
            "torch.cat of batches), and call the model once for each size"
        )
    return f"not {type(images).__name__}: model.preprocess makes it of a photo, as in model(model.preprocess(photo))"


def create_model(name: str, **overrides: Any) -> Veca:
    """A model of a named size with fresh weights; `overrides` are settings of `VecaConfig`."""
    return Veca(model_config(name, **overrides))
