"""The one place where batches of pixels become features: on the model's device, in its precision, at a budget.

extractor = veca.Extractor("veca-s14", cores=32, dense=True)
extractor(images)["patches"]                              # B×H×W×3 uint8 → B×h×w×D
dataset.map_batches(veca.Extractor, concurrency=4, …)     # Ray Data: the class as it is (docs/cluster.md)
table.mapInPandas(extractor, "path string, cls array<float>, …")      # Spark: an object of it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from veca.backbones import AUTO, Backbone, Model, load_backbone
from veca.devices import no_memory, pick_device, pick_dtype
from veca.errors import InputError, check_share
from veca.extract.sources import COLUMNS, image_column
from veca.images import SIZE, normalise, open_image, resize_to_patches
from veca.mixed import tokens_of
from veca.model import Veca
from veca.scan import scanned
from veca.teachers import Teacher
from veca.weights import bundled_models

Array = np.ndarray[Any, Any]
UNREAD: Array = np.empty((0, 0, 3), np.uint8)


class Features(NamedTuple):
    cls: Tensor  # B×D, float32
    patches: Tensor  # B×N×D, float32, row by row
    grid: tuple[int, int]  # (h, w), h·w = N
    cores: Tensor  # B×C×D, float32; the global feature alone where a model has none
    tokens: list[int]  # how many squares stood for the patches of each image: N, but at mixed scale


class Extractor:
    """Features of batches of uint8 images by one model, ours or a `transformers` vision model, at one budget.

    Pickled, an extractor made by name is its name and settings; each process loads the weights for itself, and computes
    in the precision that was picked where the extractor was made: machines of several kinds give the same features.
    """

    def __init__(
        self,
        model: str | Path | Model | Backbone = "veca-s14",
        *,
        cores: int | None = None,  # the budget; None: all
        size: int = SIZE,  # the shorter side of what is decoded here
        dense: bool = False,  # a feature for every patch too
        stride: float | None = None,  # pixels from one of these to the next; None: the patch size
        patches: float | str = 1.0,  # share of them that is spent, large ones where there is little to see
        dtype: str = "auto",  # of a model given by its name
        device: str | torch.device = "auto",  # the same
    ) -> None:
        self.cores, self.size, self.dense, self.stride, self.patches = cores, size, dense, stride, patches
        self._named = (absolute(str(model)), dtype, str(device)) if isinstance(model, (str, Path)) else None
        self._backbone = model if isinstance(model, Backbone) else None
        if isinstance(model, (Veca, Teacher)):
            self._backbone = Backbone("model", model, stride=stride, patches=patches)
        bank = self.backbone.bank  # a name that nobody knows is refused here
        if self._named is not None:
            self._named = (self._named[0], str(self.backbone.dtype).removeprefix("torch."), self._named[2])
        if cores is not None and bank and not 1 <= cores <= bank:
            raise InputError(f"cores must be a whole number from 1 to {bank}, not {cores}")
        if stride is not None and not 1 <= stride <= self.patch_size:
            raise InputError(f"--stride lies between 1 and this model's patch size {self.patch_size}, not {stride}")
        if patches != 1:
            self.backbone.veca  # noqa: B018  (refuses other models)
            if patches != AUTO:
                check_share(patches, "patches")

    @property
    def backbone(self) -> Backbone:
        if self._backbone is None:
            assert self._named is not None
            name, dtype, where = self._named
            device = pick_device(where)
            self._backbone = load_backbone(name, device, pick_dtype(dtype, device))
            self._backbone.stride, self._backbone.patches = self.stride, self.patches
        return self._backbone

    @property
    def patch_size(self) -> int:
        return self.backbone.patch_size

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | ({"_backbone": None} if self._named else {})

    def prepare(self, source: Any) -> Array:  # H×W×3 uint8
        """A photo (path, bytes, PIL image, array) as this extractor takes it: the shorter side about `size`, whole
        patches.
        """
        return np.array(resize_to_patches(open_image(source), self.size, self.patch_size))

    @overload
    def __call__(self, batch: Array | Sequence[Array] | Mapping[str, Any]) -> dict[str, Array]: ...

    @overload
    def __call__(self, batch: Any) -> Any: ...

    def __call__(self, batch: Any) -> Any:
        """Named arrays: `cls` (B×D), `grid` (B×2) and, where dense, `patches` (B×h×w×D), all of one batch; at mixed
        scale also `tokens` (B), how many squares were spent.

        A batch is B×H×W×3 uint8, whole patches, or a list of such images of any sizes; then the maps are a list, too.
        A table of columns has them, or files of any format, in `image`, `bytes` or `content`; its other columns go
        through. A file that cannot be read has an `error`, a grid of 0×0 and no numbers (NaN).

        What engines hand around comes back as they want it: of a dictionary (Ray Data) a dictionary, of pandas' tables
        one after another (Spark) the same, of one column (Daft, Arrow) a list of rows. In the last two `patches` are
        h·w·D numbers, row by row, as in Parquet.
        """
        if isinstance(batch, Iterator):
            return map(self, batch)
        if hasattr(batch, "to_pylist"):
            found = {name: _cells(column) for name, column in self({"image": batch.to_pylist()}).items()}
            return [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)]
        if hasattr(batch, "columns"):
            found = {name: _cells(column) for name, column in self(dict(batch.items())).items()}
            return type(batch)(found, index=batch.index)
        if not isinstance(batch, Mapping):
            return self._rows(batch)
        name = image_column(batch, "a batch")
        rest = {other: column for other, column in batch.items() if other not in {name, *COLUMNS[:2]}}
        column = list(batch[name])
        if name == "image" and not any(cell is None or isinstance(cell, (bytes, bytearray, dict)) for cell in column):
            return rest | self._rows([np.asarray(image) for image in column])
        images, errors = [], []
        for cell in column:
            data = cell.get("bytes") if isinstance(cell, dict) else cell
            try:
                images.append(self.prepare(b"" if data is None else data))
                errors.append("")
            except InputError as error:
                images.append(UNREAD)
                errors.append(str(error).removeprefix("image bytes: "))
        return rest | self._rows(images) | {"error": np.array(errors, dtype=object)}

    def _rows(self, images: Sequence[Array] | Array) -> dict[str, Array]:
        """Images of equal size go through the model together; the answers are in the order of the images."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for number, image in enumerate(images):
            groups.setdefault(image.shape, []).append(number)
        cls = np.full((len(images), self.backbone.width), np.nan, np.float32)
        maps: list[Array] = [np.empty((0, 0, self.backbone.width), np.float32)] * len(images)
        grid, tokens = np.zeros((len(images), 2), np.int32), np.zeros(len(images), np.int32)
        for shape, numbers in groups.items():
            if 0 in shape:  # could not be read
                continue
            found = self.compute(np.stack([images[number] for number in numbers]))
            cls[numbers], grid[numbers], tokens[numbers] = found.cls.cpu().numpy(), found.grid, found.tokens
            if self.dense:
                for number, patches in zip(numbers, found.patches.unflatten(1, found.grid).cpu().numpy(), strict=True):
                    maps[number] = patches
        more = {"tokens": tokens} if self.patches != 1 else {}
        return {"cls": cls, "grid": grid} | more | ({"patches": _column(maps)} if self.dense else {})

    @torch.inference_mode()
    def compute(self, images: Array | Tensor, cores: int | None = None, patches: float | None = None) -> Features:
        """Tensors on the model's device, of images of one size; where a batch does not fit in memory, of its halves."""
        pixels = images if isinstance(images, Tensor) else torch.from_numpy(np.require(images, requirements="W"))
        self._check(pixels)
        failed = None
        try:
            return self._forward(pixels, self.cores if cores is None else cores, patches)
        except RuntimeError as error:
            if not no_memory(error):
                raise
            failed = error
        count, (height, width) = len(pixels), pixels.shape[1:3]
        if count == 1:
            raise InputError(f"not enough memory for an image of {width}×{height}: use a smaller size") from failed
        failed = None  # it holds what had been computed
        if self.backbone.device.type == "cuda":
            torch.cuda.empty_cache()
        halves = [self.compute(part, cores, patches) for part in pixels.split((count + 1) // 2)]
        cls, dense, grids, bank, tokens = zip(*halves, strict=True)
        return Features(torch.cat(cls), torch.cat(dense), grids[0], torch.cat(bank), [*chain(*tokens)])

    def _forward(self, pixels: Tensor, cores: int | None, patches: float | None) -> Features:
        backbone, patch = self.backbone, self.patch_size
        images = normalise(pixels.to(backbone.device)).to(backbone.dtype)
        grid = (images.shape[-2] // patch, images.shape[-1] // patch)
        if not isinstance(backbone.model, Veca):
            seen = backbone.model(images, grid=grid)
            count = [grid[0] * grid[1]] * len(images)
            return Features(seen.cls.float(), seen.patches.float(), grid, seen.cls.float()[:, None], count)
        if backbone.share < 1 or backbone.stride is not None:
            out = scanned(backbone.model, images, cores, backbone.share, backbone.stride, backbone.patches)
            tokens = [tokens_of(grid, float(backbone.patches))] * len(images)
        else:
            share = backbone.patches if patches is None else patches
            out = backbone.model(images, cores=cores, **({} if share == 1 else {"patches": share}))
            tokens = out.tokens
        return Features(out.cls.float(), out.patches.float(), out.grid, out.cores.float(), tokens)

    def _check(self, pixels: Tensor) -> None:
        shape = "×".join(map(str, pixels.shape))
        if pixels.dtype != torch.uint8 or pixels.ndim != 4 or pixels.shape[3] != 3:
            raise InputError(f"a batch is B×H×W×3 of uint8, not {shape} of {str(pixels.dtype).removeprefix('torch.')}")
        if any(side < self.patch_size or side % self.patch_size for side in pixels.shape[1:3]):
            raise InputError(
                f"the sides of a batch must be multiples of the patch size {self.patch_size}, not {shape}: "
                "extractor.prepare makes them so"
            )


def absolute(name: str) -> str:
    """The same model for a process that runs in another folder."""
    return str(Path(name).absolute()) if name not in bundled_models() and Path(name).exists() else name


def _cells(column: Any) -> list[Any]:
    """A column for tables that have no arrays of several dimensions."""
    return [cell.ravel() if isinstance(cell, np.ndarray) else cell for cell in column]


def _column(maps: list[Array]) -> Array:
    """One array where all maps have the same grid, else an array of arrays."""
    if len({one.shape for one in maps}) == 1:
        return np.stack(maps)
    column = np.empty(len(maps), dtype=object)
    column[:] = maps
    return column
