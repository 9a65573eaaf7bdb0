"""Several ranks: real processes that talk through gloo."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import veca
from distill.runs import SERVER, start, tiny_settings, wait
from veca.distill.engine import train
from veca.distill.settings import Distillation
from veca.errors import InputError
from veca.files import lock_folder
from veca.training.checkpoints import Checkpoints, read_checkpoint
from veca.training.ranks import fresh_store

pytestmark = pytest.mark.end_to_end

# Without rotation the bias of the keys moves every logit of a query alike: its gradient is rounding noise, which AdamW
# blows up to full steps. They change nothing, but differ with the order of the sum.
TURNING = {"rope_zero_fraction": 0.125}


def run_ranks(settings: Distillation, count: int, status: int = 0, nodes: Sequence[Path] = ()) -> None:
    """`nodes`: the folder that each rank starts in, as on machines that share no disk."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    own = [{"PWD": str(nodes[rank])} if nodes else {} for rank in range(count)]
    processes = [
        start(settings, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank), **own[rank]}) for rank in range(count)
    ]
    assert [wait(process) for process in processes] == [status] * count


def assert_close(first: Path, second: Path) -> None:
    tensors = [load_file(out / "last" / "model.safetensors") for out in (first, second)]
    for name, tensor in tensors[0].items():
        torch.testing.assert_close(tensor, tensors[1][name], atol=1e-5, rtol=1e-5, msg=name)


def test_two_ranks_equal_one_with_twice_the_batch(root: Path, tmp_path: Path) -> None:
    common: dict[str, Any] = {
        "matrices": "normuon",
        "lr": 1e-4,
        "clip": 0.0,
        "steps": 6,
        "val": (str(root / "photos"),),
        **TURNING,
    }
    run_ranks(tiny_settings(root, tmp_path / "two", batch=4, **common), 2)
    train(tiny_settings(root, tmp_path / "one", batch=8, **common))
    train(tiny_settings(root, tmp_path / "accumulated", batch=4, accumulate=2, **common))
    assert_close(tmp_path / "two", tmp_path / "one")
    assert_close(tmp_path / "accumulated", tmp_path / "one")


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_the_number_of_ranks_may_change_on_the_way(before: int, after: int, root: Path, tmp_path: Path) -> None:
    """The step keeps its twelve images."""
    settings = tiny_settings(root, tmp_path / "run", batch=12 // before, lr=1e-4, **TURNING)
    run_ranks(replace(settings, stop_at=5), before)
    run_ranks(settings, after)
    train(tiny_settings(root, tmp_path / "one", batch=12, lr=1e-4, **TURNING))
    assert_close(tmp_path / "run", tmp_path / "one")


def test_a_disk_that_only_the_first_rank_sees(root: Path, tmp_path: Path) -> None:
    """The second rank began anew where it found no checkpoint; now the first one sends it."""
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    for node in nodes:
        node.mkdir()
    settings = tiny_settings(root, Path("run"), batch=4, lr=1e-4, stop_at=5, **TURNING)
    run_ranks(settings, 2, nodes=nodes)
    assert not (nodes[1] / "run" / "checkpoints").exists()
    run_ranks(replace(settings, stop_at=0), 2, nodes=nodes)
    train(tiny_settings(root, tmp_path / "one", batch=8, lr=1e-4, **TURNING))
    assert_close(nodes[0] / "run", tmp_path / "one")


def test_a_cache_that_the_second_rank_does_not_see_is_refused_before_it_is_filled(root: Path, tmp_path: Path) -> None:
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    for node in nodes:
        node.mkdir()
    settings = tiny_settings(root, tmp_path / "run", views=1, cache_teacher=Path("cache"), steps=1)
    run_ranks(settings, 2, status=2, nodes=nodes)
    assert [path.name for path in (nodes[0] / "cache").iterdir()] == ["cache.json"]
    assert not (nodes[1] / "cache").exists()
    run_ranks(settings, 2, nodes=[nodes[0], nodes[0]])  # one that both see
    shutil.copytree(nodes[0] / "cache", nodes[1] / "cache")
    run_ranks(replace(settings, out=tmp_path / "copied"), 2, nodes=nodes)


def test_unreadable_images_are_counted_over_all_ranks(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "photos", tmp_path / "photos")
    broken = [tmp_path / "photos" / f"{number:03d}.png" for number in range(0, 16, 2)]
    for path in broken:
        path.write_bytes(b"no image")
    settings = tiny_settings(root, tmp_path / "run", train=(str(tmp_path / "photos"),), steps=3, max_unreadable=1.0)
    run_ranks(settings, 2)  # three steps of eight: every image once
    listed = (tmp_path / "run" / "unreadable.txt").read_text().splitlines()
    assert sorted(line.split("\t")[0] for line in listed) == sorted(map(str, broken))
    progress = read_checkpoint(next(iter(Checkpoints(tmp_path / "run" / "checkpoints").list())))["progress"]
    assert sorted(progress["unreadable"]) == sorted(listed)
    assert progress["read"] == 24


def test_a_mistake_that_the_first_rank_meets_ends_both(root: Path, tmp_path: Path) -> None:
    """A damaged checkpoint is passed over by the first rank, for all of them; a locked folder refuses all."""
    settings = tiny_settings(root, tmp_path / "run", batch=4, lr=1e-4, stop_at=4)
    run_ranks(settings, 2)
    newest, *_ = Checkpoints(tmp_path / "run" / "checkpoints").list()
    newest.write_bytes(newest.read_bytes()[:-100])
    run_ranks(replace(settings, stop_at=6), 2)
    with lock_folder(tmp_path / "run"):
        run_ranks(replace(settings, stop_at=0), 2, status=2)


def test_a_step_that_cannot_be_shared_is_refused(root: Path, tmp_path: Path) -> None:
    train(tiny_settings(root, tmp_path / "run", batch=3, stop_at=1))
    with pytest.raises(InputError, match="3 images per step, this is 6"):
        train(tiny_settings(root, tmp_path / "run", batch=3, accumulate=2))


def _parallel_steps(rank: int, port: int, found: Path) -> None:
    """Three steps of the bundled model under DistributedDataParallel as anyone would write them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model = veca.load("veca-s14").train()
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for step, budget in enumerate((8, 64, 16)):
        images = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(2 * step + rank))
        out = parallel(images, cores=budget)
        (out.cls.square().mean() + out.patches.square().mean()).backward()
        assert all((parameter.grad is not None) == parameter.requires_grad for parameter in model.parameters())
        optimiser.step()
        optimiser.zero_grad()
    torch.save(model.state_dict(), found / f"{rank}.pt")
    dist.destroy_process_group()


def test_the_bundled_model_trains_in_parallel_without_a_search_for_unused_parameters(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [SERVER.Process(target=_parallel_steps, args=(rank, port, tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    assert [wait(process) for process in processes] == [0, 0]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert not torch.equal(first["bank.tokens"], veca.load("veca-s14").state_dict()["bank.tokens"])


def test_torchrun_restarts_a_run_whose_rank_died(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    script = tmp_path / "run.py"
    script.write_text(
        "import sys, torch\nfrom pathlib import Path\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from distill.runs import _train, tiny_settings\n"
        f"_train(tiny_settings(Path({str(root)!r}), Path({str(out)!r}), batch=2, steps=30), {{}}, 0.05)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1",
               "--monitor-interval", "0.1", str(script)]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "log", "w") as log:
        torchrun = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 120
        while not (out / "metrics.jsonl").is_file() or '"step": 4,' not in (out / "metrics.jsonl").read_text():
            assert torchrun.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        children = subprocess.run(["pgrep", "-P", str(torchrun.pid)], capture_output=True, text=True).stdout.split()
        os.kill(int(children[-1]), signal.SIGKILL)
        assert torchrun.wait(120) == 0, (tmp_path / "log").read_text()
    finally:
        torchrun.terminate()
    said = (tmp_path / "log").read_text()
    assert f"continuing {out} at step" in said
    assert (out / "last" / "model.safetensors").is_file()


def test_ranks_ignore_what_an_earlier_start_left_in_the_store() -> None:
    """A store with a finished and a broken-off handshake in it, as torchrun keeps it between restarts."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set("veca/name", "old")
    server.set("veca/old/1", "dead")
    server.set("veca/old/go", "dead")
    found: dict[int, dist.Store] = {}

    def join(rank: int) -> None:
        client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
        time.sleep(0.2 if rank == 0 else 0)  # the first rank comes last: the others see the old name first
        found[rank] = fresh_store(client, rank, 3)
        if rank == 0:
            found[rank].set("key", "value")

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [found[rank].get("key") for rank in range(3)] == [b"value"] * 3
