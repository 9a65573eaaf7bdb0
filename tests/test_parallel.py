"""One image over several ranks against one process: real processes, uneven parts, mistakes and deaths."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
import torch.distributed as dist
import zarr
from ranks import PATIENCE, end_ranks, run_ranks, start_ranks
from test_streaming import VARIANTS, photo, small
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import veca
from veca import parallel
from veca.block import Read, read
from veca.cli import main as run_command
from veca.errors import InputError
from veca.large.sinks import GeoTiffSink, NpySink, ZarrSink
from veca.model import Veca

pytestmark = pytest.mark.usefixtures("one_thread")
CORES = 6
GRIDS = ((7, 5), (2, 9), (1, 4))  # seven rows for two or three ranks; fewer rows than ranks: some have no patch
WAYS: dict[str, dict[str, Any]] = {"plain": {}, "halves": {"tokens": "float16"}, "spilled": {"spill": True}}


def cases(folder: Path) -> list[tuple[str, Veca, Path, dict[str, Any]]]:
    found = []
    for variant, settings in VARIANTS.items():
        model = small(**settings)
        for height, width in GRIDS:
            picture = folder / f"{variant}-{height}-{width}.tif"
            if not picture.exists():
                side = model.patch_size
                tifffile.imwrite(picture, photo(height * side + 3, width * side + 5), tile=(16, 16), photometric="rgb")
            for way, options in WAYS.items():
                spill = {"spill": folder / "tokens"} if "spill" in options else {}
                found.append((f"{picture.stem}-{way}", model, picture, {**options, **spill, "tile": 4}))
    return found


# Streaming


def stream_all(folder: Path, group: bool = True) -> None:
    kind = f"ranks{dist.get_world_size()}" if group else "alone"
    number = dist.get_rank() if group else 0
    for name, model, picture, options in cases(folder):
        shared = {"group": dist.group.WORLD} if group else {}
        out = folder / f"{name}-{kind}.npy"
        result = model.stream(picture, CORES, out=out, **options, **shared)
        np.savez(folder / f"{name}-{kind}-{number}.npz", **{
            field: getattr(result, field).numpy() for field in ("cls", "patches", "cores", "coords")
        })  # fmt: skip


@pytest.mark.parametrize("count", [2, 3])
def test_a_stream_over_ranks_is_that_of_one(count: int, tmp_path: Path) -> None:
    stream_all(tmp_path, group=False)
    run_ranks(stream_all, count, tmp_path, folder=tmp_path)
    for name, _, _, options in cases(tmp_path):
        alone = np.load(tmp_path / f"{name}-alone-0.npz")
        atol = 2e-2 if options.get("tokens") == "float16" else 1e-4
        for rank in range(count):
            ours = np.load(tmp_path / f"{name}-ranks{count}-{rank}.npz")
            for field in alone.files:
                np.testing.assert_allclose(ours[field], alone[field], atol=atol, rtol=0, err_msg=f"{name} {field}")
        files = [np.load(tmp_path / f"{name}-{kind}.npy") for kind in ("alone", f"ranks{count}")]
        assert files[0].dtype == files[1].dtype
        np.testing.assert_allclose(files[1], files[0], atol=atol, rtol=0)
    assert not list(tmp_path.glob(".*"))


def write_zarr(folder: Path, group: bool = True) -> None:
    """Whole, and of a mask, in float16 and in int8; chunks of at most three rows, or as many as are a rank's."""
    kind, shared = (f"ranks{dist.get_world_size()}", {"group": dist.group.WORLD}) if group else ("alone", {})
    for height, width in GRIDS:
        image, model = photo(height * 16, width * 16), small()
        mask = np.random.default_rng(height).random((height, width)) < 0.5
        mask[0] = True
        for where, int8 in itertools.product((None, mask), (False, True)):
            name = f"{height}-{'all' if where is None else 'mask'}-{int8}-{kind}.zarr"
            sink = ZarrSink(folder / name, int8=int8)
            sink.rows = 3
            model.stream(image, CORES, tile=4, out=sink, where=where, **shared)


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_write_one_zarr_together(count: int, tmp_path: Path) -> None:
    write_zarr(tmp_path, group=False)
    run_ranks(write_zarr, count, tmp_path, folder=tmp_path)
    there = sorted(tmp_path.glob("*-alone.zarr"))
    assert len(there) == 4 * len(GRIDS)
    for place in there:
        one, many = (
            zarr.open_group(str(place).replace("alone", kind), mode="r") for kind in ("alone", f"ranks{count}")
        )
        assert dict(one.attrs)["veca"] == dict(many.attrs)["veca"]
        values, ours = one["0"][:], many["0"][:]
        assert values.dtype == ours.dtype
        assert values.any()
        if "scales" in one:
            np.testing.assert_allclose(many["scales"][:], one["scales"][:], atol=1e-4)
        np.testing.assert_allclose(ours.astype(float), values.astype(float), atol=1.01 if "scales" in one else 4e-3)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64])
@pytest.mark.parametrize(("height", "width", "most"), [(1170, 3, 32), (37, 5, 32), (7, 5, 3), (1, 4, 32)])
def test_bands_of_a_grid_are_shared_nearly_evenly(count: int, height: int, width: int, most: int) -> None:
    """Each patch is one rank's, each band one rank's, and none has a band more than an even share."""
    ranks = parallel.Together(None)
    ranks.count = count
    band = ranks.band(height, most)
    assert 1 <= band <= most
    drawn = torch.rand(height * width, generator=torch.Generator().manual_seed(0)) < 0.3
    drawn[0] = True
    for patches in (range(height * width), drawn.nonzero()[:, 0]):
        parts = []
        for ranks.rank in range(count):
            parts.append([int(number) for number in ranks.part(patches, width, band)])
        assert [number for part in parts for number in part] == [int(number) for number in patches]
        bands = [{number // width // band for number in part} for part in parts]
        assert sum(map(len, bands)) == len(set().union(*bands))
        if isinstance(patches, range):
            assert max(map(len, parts)) - band * width < height * width / count


# Scanning

SHARES = ({}, {"share": 0.4}, {"where": True}, {"where": True, "share": 0.5})


def scan_all(folder: Path, group: bool = True) -> None:
    mask = np.zeros((7, 5), bool)
    mask[1:3, 1:4] = True  # all of it in the first rank's rows: yet the ranks have as many patches each
    model = small(**VARIANTS["converted"])
    image = torch.randn(3, 7 * 14, 5 * 14, generator=torch.Generator().manual_seed(0))
    for number, options in enumerate(SHARES):
        mine = {**options, "where": mask} if "where" in options else options
        scan = model.scan(image, CORES, tile=4, **mine, **({"group": dist.group.WORLD} if group else {}))
        rank = f"{dist.get_world_size()}-{dist.get_rank()}" if group else "alone"
        torch.save((scan.cores, scan.coords, scan.look().features), folder / f"{number}-{rank}.pt")


@pytest.mark.parametrize("count", [2, 3])
def test_a_scan_over_ranks_is_that_of_one(count: int, tmp_path: Path) -> None:
    scan_all(tmp_path, group=False)
    run_ranks(scan_all, count, tmp_path, folder=tmp_path)
    for number in range(len(SHARES)):
        alone = torch.load(tmp_path / f"{number}-alone.pt")
        for rank in range(count):
            for ours, expected in zip(torch.load(tmp_path / f"{number}-{count}-{rank}.pt"), alone, strict=True):
                torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


def count_bytes(folder: Path) -> None:
    """All that the ranks tell each other on the way, layer by layer."""
    plain, calls = dist.all_reduce, []

    def counted(tensor: Tensor, *arguments: Any, **more: Any) -> Any:
        calls.append(tensor.numel())
        return plain(tensor, *arguments, **more)

    dist.all_reduce = counted
    model = small()
    for side in (4, 12):
        calls.clear()
        model.scan(photo(side * 16, side * 16), CORES, group=dist.group.WORLD)
        config = model.config
        assert sum(calls) == config.depth * CORES * (config.width + 2 * config.heads)


def test_what_travels_does_not_grow_with_the_image(tmp_path: Path) -> None:
    run_ranks(count_bytes, 2, tmp_path, folder=tmp_path)


def test_without_a_group_nothing_is_shared(tmp_path: Path) -> None:
    """Somebody who trains under a process group and streams a picture on one of the ranks must not wait for others."""
    run_ranks(stream_alone, 2, tmp_path, folder=tmp_path)


def stream_alone(folder: Path) -> None:
    if dist.get_rank() == 1:
        small().stream(photo(48, 64), CORES)


def test_a_rank_without_patches_reads_nothing() -> None:
    q, k, v = (torch.randn(1, 2, n, 8) for n in (3, 5, 5))
    whole = read(q, k, v)
    for merged in (whole.merge(Read.of_nothing(q)), Read.of_nothing(q).merge(whole)):
        torch.testing.assert_close(merged.result(), whole.result())


# Mistakes


def mistakes(folder: Path) -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    model, image = small(), photo(64, 80)
    with pytest.raises(InputError, match="goes to a file"):
        model.stream(image, CORES, group=group)
    with veca.open_source(image) as picture, pytest.raises(InputError, match=r"one \.npy or Zarr together"):
        model.stream(image, CORES, out=GeoTiffSink(folder / "out.tif", picture, 16), group=group)
    with pytest.raises(InputError, match=r"the ranks disagree on out: ZarrSink at .*, NpySink at"):
        model.stream(image, CORES, out=(NpySink if rank else ZarrSink)(folder / "out"), group=group)
    with pytest.raises(InputError, match="the ranks disagree on cores: 4 on the first, 5 on 1"):
        model.scan(image, 4 + rank, group=group)
    with pytest.raises(InputError, match="disagree on size"):
        model.scan(image[: 48 + 16 * rank], CORES, group=group)
    torch.manual_seed(rank)
    with pytest.raises(InputError, match="disagree on the model's weights"):
        Veca(model.config).eval().scan(image, CORES, group=group)
    same_sum = small()
    with torch.no_grad():
        same_sum.bank.tokens.copy_((same_sum.bank.tokens * 64).round() / 64)
        same_sum.bank.tokens.copy_(same_sum.bank.tokens.flip(0) if rank else same_sum.bank.tokens)
    with pytest.raises(InputError, match="disagree on the model's weights"):
        same_sum.scan(image, CORES, group=group)
    with pytest.raises(InputError, match="disagree on dtype: float32 on the first, bfloat16 on 1"):
        small().to(torch.bfloat16 if rank else torch.float32).scan(image, CORES, group=group)
    missing = folder / ("there.npy" if rank == 0 else "elsewhere.npy")
    np.save(folder / "there.npy", image)
    with pytest.raises(InputError, match="elsewhere.npy: no such file" if rank else "rank 1 failed: .*no such file"):
        model.stream(missing, CORES, out=folder / "out.npy", group=group)
    broken = folder / f"{rank}.tif"  # the lower half of one rank's copy cannot be read
    tifffile.imwrite(broken, image, tile=(16, 16), photometric="rgb", compression="zlib")
    if rank == 1:
        with tifffile.TiffFile(broken) as file:
            offset = file.pages[0].dataoffsets[-1]
        with open(broken, "r+b") as file:
            file.seek(offset)
            file.write(b"\xff" * 20)
    with pytest.raises(InputError, match="cannot be decoded" if rank else "rank 1 failed: .*cannot be decoded"):
        model.stream(broken, CORES, out=folder / "out.npy", group=group)
    (folder / "file").write_text("")
    with pytest.raises((InputError, OSError)):
        model.stream(image, CORES, out=folder / "file" / "out.npy", group=group)
    huge = small()
    huge.norm.weight.data.mul_(1e6)
    with pytest.raises(InputError, match="too large for float16"):
        huge.stream(image, CORES, out=ZarrSink(folder / "out.zarr"), group=group)
    model.stream(image, CORES, out=folder / "good.npy", group=group)  # and the group still works


def test_a_mistake_on_one_rank_ends_all(tmp_path: Path) -> None:
    run_ranks(mistakes, 2, tmp_path, folder=tmp_path)
    assert not list(tmp_path.glob("out*"))
    assert not list(tmp_path.glob(".*"))
    assert np.load(tmp_path / "good.npy").shape == (4, 5, 48)


# The command


def picture_and_model(folder: Path) -> list[str]:
    small(**VARIANTS["converted"]).save(folder / "model")
    tifffile.imwrite(folder / "big.tif", photo(100, 80), tile=(16, 16), photometric="rgb")
    return [str(folder / "big.tif"), "--model", str(folder / "model"), "--cores", str(CORES), "--dtype", "float32"]


@pytest.mark.end_to_end
def test_torchrun_streams_and_scans_as_one_process_does(tmp_path: Path) -> None:
    given = picture_and_model(tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for command in (["features", "--stream"], ["features", "--stream", "--format", "zarr"], ["scan"]):
        assert run_command([*command, *given, "--out", str(tmp_path / "one")]) == 0
        done = subprocess.run(
            [*torchrun, "-m", "veca.cli", *command, *given, "--out", str(tmp_path / "two")],
            capture_output=True, text=True, timeout=5 * PATIENCE,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == (1 if "features" in command else 2)  # the first rank's
    one, two = (np.load(tmp_path / kind / "big.tif.npy") for kind in ("one", "two"))
    assert one.shape == two.shape == (7, 5, 48)
    np.testing.assert_allclose(two, one, atol=1e-4)
    cells = [zarr.open_array(str(tmp_path / kind / "big.tif.zarr/0"), mode="r")[:] for kind in ("one", "two")]
    np.testing.assert_allclose(cells[1], cells[0], atol=4e-3)
    np.testing.assert_allclose(np.moveaxis(cells[1], 0, -1), two, atol=4e-3)
    model = veca.load(tmp_path / "model")
    scans = [veca.open_scan(tmp_path / kind / "big.tif.scan", tmp_path / "big.tif", model) for kind in ("one", "two")]
    torch.testing.assert_close(scans[1].cores, scans[0].cores, atol=1e-4, rtol=0)
    written = [".lock", "big.tif.npy", "big.tif.npz", "big.tif.scan", "big.tif.zarr", "index.jsonl"]
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == written
    assert len((tmp_path / "two/index.jsonl").read_text().splitlines()) == 2  # the first rank's
    for more in (["--format", "tif"], ["--window", "448"]):
        done = subprocess.run(
            [*torchrun, "-m", "veca.cli", "features", "--stream", *given, "--out", str(tmp_path / "three"), *more],
            capture_output=True, text=True, timeout=5 * PATIENCE,
        )  # fmt: skip
        assert done.returncode
        assert "veca features: several ranks share one whole image and one .npy or Zarr" in done.stderr
        assert not (tmp_path / "three").exists()


def run_and_die(folder: Path, arguments: list[str], who: int, when: str, how: signal.Signals) -> None:
    """The command on every rank, one of which gets a signal in the middle: of a layer, or of writing."""
    arguments = [*arguments, "--format", "zarr"] if when == "chunks" else arguments
    owner, name, calls = {"layer": (dist, "all_reduce", 5), "writing": (os, "fsync", 1)}.get(when, (np, "moveaxis", 1))
    plain, count = getattr(owner, name), itertools.count(1)

    def deadly(*given: Any, **more: Any) -> Any:
        if next(count) == calls:
            os.kill(os.getpid(), how)
        return plain(*given, **more)

    if dist.get_rank() == who:
        setattr(owner, name, deadly)
    sys.exit(run_command(["features", "--stream", *arguments, "--out", str(folder / "out")]))


@pytest.mark.end_to_end
@pytest.mark.parametrize(
    ("who", "when", "how"),
    [
        (1, "layer", signal.SIGKILL),
        (0, "layer", signal.SIGTERM),
        (0, "writing", signal.SIGKILL),
        (2, "writing", signal.SIGKILL),
        (0, "chunks", signal.SIGKILL),
        (2, "chunks", signal.SIGKILL),
    ],
)
@pytest.mark.end_to_end
def test_when_a_rank_dies_the_others_end_with_one_line(
    who: int, when: str, how: signal.Signals, tmp_path: Path
) -> None:
    """They would wait for twenty minutes in the group, and longer than the test does."""
    given = picture_and_model(tmp_path)
    statuses = end_ranks(start_ranks(run_and_die, 3, tmp_path, given, who, when, how, folder=tmp_path))
    assert statuses == [(-how if how == signal.SIGKILL else 2) if rank == who else 2 for rank in range(3)]
    for rank in {0, 1, 2} - ({who} if how == signal.SIGKILL else set()):
        said = [line for line in (tmp_path / f"{rank}.txt").read_text().splitlines() if line.startswith("veca")]
        expected = "stopped, by another rank's end" if rank == who else "another rank ended or does not answer"
        assert len(said) == 1, said
        assert said[0].startswith(f"veca features: {expected}")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]


# Training


def loss_of(cls: Tensor, errors: Tensor) -> Tensor:
    return (1 - nn.functional.cosine_similarity(cls, torch.ones_like(cls), dim=-1)).mean() + errors


def batch_of(number: int, model: Veca, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Images, and what their patches should become (B×h×w×D′)."""
    generator = torch.Generator().manual_seed(number)
    height, width = (side * model.patch_size for side in grid)
    wanted = torch.randn(2, *grid, model.config.feature_width, generator=generator)
    return torch.randn(2, 3, height, width, generator=generator), wanted


def gradients(model: Veca) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def alone(model: Veca, grid: tuple[int, int], batches: int = 1) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    losses = []
    for number in range(batches):
        images, wanted = batch_of(number, model, grid)
        torch.manual_seed(5)  # of the jitter
        out = model(images, cores=CORES)
        losses.append(loss_of(out.cls, (out.patches - wanted.flatten(1, 2)).square().mean()))
    loss = sum(losses) / batches
    loss.backward()
    return float(loss.detach()), gradients(model)


def same_gradients(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(ours[name], gradient, atol=1e-5 * float(gradient.abs().max()) + 1e-7, rtol=1e-5)


def train_split(grids: list[tuple[int, int]], data: int, training: bool, checkpointed: bool = False) -> None:
    """A step of each kind with images split over ranks, on a mesh of data × image, under DistributedDataParallel."""
    mesh = init_device_mesh("cpu", (data, dist.get_world_size() // data), mesh_dim_names=("data", "image"))
    group, number = mesh.get_group("image"), mesh.get_local_rank("data")
    for variant, grid in itertools.product(VARIANTS, grids):
        model = small(**VARIANTS[variant]).train(training)
        model.set_grad_checkpointing(checkpointed)
        expected, wanted_gradients = alone(model, grid, data)
        model.zero_grad()
        split = DistributedDataParallel(parallel.SplitVeca(model, group))
        rows, patch = parallel.share(grid[0], group), model.patch_size
        images, wanted = batch_of(number, model, grid)
        torch.manual_seed(5 + mesh.get_local_rank("image"))  # the first rank's jitter is everybody's
        out = split(images[:, :, rows.start * patch : rows.stop * patch], cores=CORES)
        assert out.grid == (rows.stop - rows.start, grid[1])
        loss = loss_of(out.cls, parallel.mean((out.patches - wanted[:, rows].flatten(1, 2)).square(), group))
        loss.backward()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        assert float(whole) / dist.get_world_size() == pytest.approx(expected, rel=1e-5)
        same_gradients(gradients(model), wanted_gradients)


@pytest.mark.parametrize("count", [2, 3])
def test_gradients_of_a_split_image(count: int, tmp_path: Path) -> None:
    """Of three ranks and two rows, one has no patch."""
    run_ranks(train_split, count, [(5, 4), (2, 5)], 1, count == 3, folder=tmp_path)


@pytest.mark.end_to_end
def test_split_images_on_a_mesh_with_data_parallelism(tmp_path: Path) -> None:
    run_ranks(train_split, 4, [(3, 4)], 2, True, True, folder=tmp_path)


def wrong_parts() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    split = parallel.SplitVeca(small(), group)
    for shape, cores, words in (
        ((1, 3, 32, 32 + 16 * rank), 4, "differ in number, width or cores"),
        ((1, 3, 32, 32), 4 + rank, "differ in number, width or cores"),
        ((1, 3, 32 + rank, 32), 4, "whole rows of patches of 16"),
        ((3, 32, 32)[rank:], 4, "must be B×3×H×W"),
        ((1, 3, 0, 32), 4, "no rank has a row"),
    ):
        with pytest.raises(InputError, match=words):
            split(torch.zeros(shape), cores=cores)
    with pytest.raises(InputError, match="dense control arm"):
        parallel.SplitVeca(small(attention="dense"), group)


def test_parts_that_do_not_belong_together_are_refused_by_all(tmp_path: Path) -> None:
    run_ranks(wrong_parts, 2, folder=tmp_path)


# A user's own loop, sharded by PyTorch


def shard_and_train(folder: Path) -> None:
    model = small(**VARIANTS["converted"]).train()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for step in range(3):
        images, wanted = batch_of(step, model, (3, 4))
        mine = slice(dist.get_rank(), dist.get_rank() + 1)  # one of the two images each
        out = model(images[mine], cores=CORES + step)
        loss_of(out.cls, (out.patches - wanted[mine].flatten(1, 2)).square().mean()).backward()
        optimiser.step()
        optimiser.zero_grad()
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save(whole, folder / "sharded.pt")


def test_fully_sharded_training_is_that_of_one_process(tmp_path: Path) -> None:
    run_ranks(shard_and_train, 2, tmp_path, folder=tmp_path)
    model = small(**VARIANTS["converted"]).train()
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for step in range(3):
        images, wanted = batch_of(step, model, (3, 4))
        out = model(images, cores=CORES + step)
        loss_of(out.cls, (out.patches - wanted.flatten(1, 2)).square().mean()).backward()
        optimiser.step()
        optimiser.zero_grad()
    sharded = torch.load(tmp_path / "sharded.pt")
    assert sharded.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(sharded[name], value, atol=1e-5, rtol=1e-5, msg=name)
