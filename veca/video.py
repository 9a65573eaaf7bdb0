"""Video: frames of a file or a folder, and a model that goes from frame to frame (docs/video.md).

    frames = veca.video.Frames(model, cores=64, share=0.25, carry=True)
    for name, image in veca.video.read_frames("clip.mp4"):
        out = frames(model.preprocess(image, size=448))     # as model(…): cls, patches, cores

With `carry` the cores of a frame start from what they read in the last ones: each frame gives them another share of its
patches, which takes the place of what they had read there before. What the cores keep of patches can be merged exactly
(`veca.block.Read`), so while nothing moves the result is that of reading every patch of every frame. To begin with the
last frame's final cores instead does not work, as the first layer has never seen such cores: tools/video_carry.py
measures it as `restart` (dog of DAVIS, 4 frames, 112 pixels: a cosine of 0.10 to the whole pass, with carry 0.97).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from veca.block import CoreSide, Read
from veca.errors import InputError, check_share, require
from veca.folders import by_number, is_image
from veca.images import MAX_PIXELS, open_image
from veca.large.picture import StripSource, open_strips
from veca.model import Veca, VecaOutput
from veca.scan import Scan, scan, scanned, spread
from veca.streaming import dtype_of, refuse_changed, verbs_of

SUFFIXES = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm", ".wmv")


class Passed(NamedTuple):
    """One frame after all layers."""

    cores: Tensor  # 1×C×D, before the final norm
    coords: Tensor  # 1×C×2
    path: list[CoreSide]
    patches: Tensor | None  # 1×N×D, if all of them were wanted


class Frames:
    """A model that is given the frames of one video in order; `reset` before another video, or after a cut."""

    def __init__(self, model: Veca, cores: int | None = None, share: float = 1.0, carry: bool = False) -> None:
        check_share(share)
        self.model, self.cores, self.share, self.carry = model, model.budget(cores), share, carry
        self.parts = round(1 / share)
        if carry and (self.parts < 2 or abs(self.parts * share - 1) > 0.02):
            raise InputError(f"with carry the share is one half, a third, a quarter …, not {share:g}")
        if carry:
            refuse_changed(model)
        self.reset()

    def reset(self) -> None:
        """Forget the frames so far: the next one is read whole."""
        self.frame, self.grid = 0, (0, 0)
        self.order: list[Tensor] = []  # which patches make each part
        self.reads: list[
            list[Read | None]
        ] = []  # of each layer: what the cores read of each part, when it was last read

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> VecaOutput:
        """As `model(images)` of the next frame, 1×3×H×W."""
        if not self.carry:
            return (
                self.model(images, cores=self.cores)
                if self.share == 1
                else scanned(self.model, images, self.cores, self.share)
            )
        self.model.check(images, self.cores)
        if len(images) != 1:
            raise InputError(f"frames come one at a time, 1×3×H×W, not {len(images)} together")
        passed = self._pass(images, dense=True)
        assert passed.patches is not None
        features = self.model.output(passed.cores)
        patches = self.model.output(passed.patches)
        return VecaOutput(features[:, 0], patches, features, passed.coords, self.grid)

    @torch.inference_mode()
    def scan(self, source: StripSource) -> Scan:
        """As `model.scan` of the next frame."""
        if not self.carry:
            return scan(self.model, source, self.cores, share=self.share)
        weight = self.model.patch_embed.proj.weight
        strips = open_strips(source, self.model.patch_size)
        passed = self._pass(strips.read(0, strips.height).to(weight.device, weight.dtype), dense=False)
        features = self.model.output(passed.cores)[0].float().cpu()
        return Scan(self.model, strips, passed.path, features, passed.coords[0].cpu(), self.share, None)

    def _pass(self, images: Tensor, dense: bool) -> Passed:
        """The next frame (1×3×H×W) through all layers: its part is read and looks; with `dense` the others look too."""
        model, device = self.model, images.device
        patches, grid = model.embed(images)
        if grid != self.grid:
            self._begin(grid)
        fresh = {self.frame % self.parts} if self.frame else set(range(self.parts))
        wanted = [part for part in range(self.parts) if dense or part in fresh]
        rows = {part: patches[:, self.order[part].to(device)].contiguous() for part in wanted}
        by_grid = model.patch_rotation(grid, device)
        turns = {part: by_grid and by_grid.at(self.order[part].to(device)) for part in wanted}
        tokens, state, pace = model.bank(self.cores, 1)
        tokens, path = tokens.to(dtype_of(model)), []
        blocks = verbs_of(model)
        for index, block in enumerate(blocks):
            if index > 0:
                state = model.bank.move(state, pace, tokens, index)
            position = state.tanh()
            side = block.ask(tokens, model.rotation(position))
            path.append(CoreSide(*(part.clone() for part in side)))
            for part in wanted:
                view = block.norm_attn(rows[part])
                if part in fresh:
                    self.reads[index][part] = block.read(side, view, turns[part])
                if dense or index < len(blocks) - 1:
                    rows[part] = block.look(rows[part], view, turns[part], side)
            known = [read for read in self.reads[index] if read is not None]
            tokens = block.settle(tokens, side, functools.reduce(Read.merge, known))
        self.frame += 1
        whole = None
        if dense:
            whole = torch.empty_like(patches)
            for part in wanted:
                whole[:, self.order[part].to(device)] = rows[part]
        return Passed(tokens, position, path, whole)

    def _begin(self, grid: tuple[int, int]) -> None:
        self.reset()
        self.grid = grid
        numbers = spread(torch.arange(grid[0] * grid[1]), grid).tensor_split(self.parts)
        self.order = [part.sort().values for part in numbers if len(part)]
        if len(self.order) < self.parts:
            raise InputError(f"a frame of {grid[1]}×{grid[0]} patches has no {self.parts} parts; raise the share")
        self.reads = [[None] * self.parts for _ in self.model.blocks]


def is_video(path: str | os.PathLike[str]) -> bool:
    """By its name."""
    return str(path).lower().endswith(SUFFIXES)


def has_frames(path: Path) -> bool:
    """Whether it is a folder with images in it (a .zarr has none)."""
    return path.is_dir() and any(is_image(entry.name) for entry in path.iterdir())


def read_frames(source: str | os.PathLike[str]) -> Iterator[tuple[str, Image.Image]]:
    """(name, RGB image) of every frame in order; a video file names them by number, a folder by file."""
    path = Path(source)
    if path.is_dir():
        names = sorted((entry.name for entry in path.iterdir() if is_image(entry.name)), key=by_number)
        if not names:
            raise InputError(f"{path}: no frames in this folder")
        for name in names:
            yield name, open_image(path / name)
        return
    if not path.is_file():
        raise InputError(f"{path}: no such file or folder")
    yield from decoded(path)


def decoded(path: Path) -> Iterator[tuple[str, Image.Image]]:
    av: Any = require("av", "video")
    try:
        # Playlists that are named like a video may not fetch from elsewhere.
        with av.open(str(path), options={"protocol_whitelist": "file"}) as file:
            if not file.streams.video:
                raise InputError(f"{path}: there is no picture in it")
            stream = file.streams.video[0]
            if stream.width * stream.height > MAX_PIXELS:
                raise InputError(f"{path}: {stream.width}×{stream.height} is over the limit of {MAX_PIXELS} pixels")
            for number, frame in enumerate(file.decode(stream)):
                image = frame.to_image()
                yield f"{number:06d}", image.rotate(frame.rotation, expand=True) if frame.rotation else image
    except (av.error.FFmpegError, OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: not a video that can be decoded ({' '.join(str(error).split())[:200]})") from error
