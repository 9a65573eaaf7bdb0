"""A real Ray on this machine: the same features as the local engine, a worker and a node that die, a run that
continues, and the class behind Ray Serve.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from veca.errors import InputError
from veca.extract.cluster import decoded
from veca.extract.command import main
from veca.extract.extractor import Extractor
from veca.extract.sources import find_files

from .conftest import CORES, SIZE, encoded, expected

ROOT = Path(__file__).parents[2]
if not os.environ.get("CI"):
    pytest.importorskip("ray", reason="pip install 'veca[ray]'")
import pandas  # noqa: E402
import pyarrow.parquet  # noqa: E402

pytestmark = pytest.mark.end_to_end
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled", "RAY_memory_monitor_refresh_ms": "0",
    "RAY_worker_niceness": "0",  # or workers get no time where others compute
    "RAY_worker_register_timeout_seconds": "300", "RAY_raylet_start_wait_time_s": "120", "OMP_NUM_THREADS": "1",
}  # fmt: skip


def ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a Ray with two processors and a small store."""
    port, *others = map(str, ports(5))
    names = (
        "dashboard-agent-listen-port",
        "dashboard-agent-grpc-port",
        "runtime-env-agent-port",
        "metrics-export-port",
    )
    words = ["--head", "--block", "--node-ip-address", "127.0.0.1", "--port", port, "--num-cpus", "2"]
    words += ["--object-store-memory", "100000000", "--include-dashboard", "false", "--disable-usage-stats"]
    for name, other in zip(names, others, strict=True):
        words += [f"--{name}", other]
    environment = os.environ | ENVIRONMENT
    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray = Path(sys.executable).with_name("ray")
    process = subprocess.Popen(
        [ray, "start", *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if "Ray runtime started" in line:
            break
    else:
        pytest.fail("".join(said))
    try:
        yield f"127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # asked to end, Ray takes half a minute; its workers end with it
        process.wait(60)


def command(small: Path, out: str | Path, *words: object) -> list[str]:
    common = ("--out", out, "--model", small, "--size", SIZE, "--cores", CORES, "--dtype", "float32", "--workers", 2)
    return [sys.executable, "-m", "veca.cli", "features", *map(str, (*common, *words))]


def start(words: list[str], folder: Path | None = None) -> subprocess.Popen[str]:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "RAY_AUTH_MODE": "disabled",
        "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    }
    return subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder
    )


def run(words: list[str], status: int, folder: Path | None = None) -> tuple[str, str]:
    process = start(words, folder)
    out, err = process.communicate(timeout=600)
    assert process.returncode == status, out + err
    return out, err


def table(out: Path) -> pandas.DataFrame:
    found = pandas.read_parquet(out).set_index("path").sort_index()
    assert found.index.is_unique
    return found


def test_every_source_as_on_one_machine(cluster: str, small: Path, world: Path) -> None:
    """Files, a list, tar shards and a table; by path, and by the addresses of pyarrow (file) and fsspec (local).

    The model's path is relative, to a folder that only the command runs in; there are more copies of it than the
    cluster has room for, so that Ray must not give them everything.
    """
    given = [f"{world}/photos", f"{world}/shard-{{0..1}}.tar", f"{world}/table.parquet"]
    far = [f"file://{world}/photos", f"local://{world}/shard-0.tar", f"local://{world}/list.txt"]
    ours, theirs = world / "local", world / "ray"
    assert main(command(small, ours, *given, "--dense", "--format", "parquet", "--workers", 0)[4:]) == 1
    more = ("--dense", "--engine", "ray", "--address", cluster, "--workers", 8)
    out, err = run(command(Path(small.name), f"local://{theirs}", *given, *far, *more), 1, small.parent)
    assert "28 images done, 5 could not be read" in out
    assert "3.png: damaged or truncated image" in err
    assert "Traceback" not in err
    local, ray = table(ours), table(theirs)
    extractor = Extractor(small, cores=CORES, size=SIZE, dense=True, dtype="float32")
    assert set(local.index) == {path for path in ray.index if "://" not in path}
    for path, row in ray.iterrows():
        own = local.loc[re.sub("^(file|local)://", "", str(path))]
        if pandas.isna(own["error"]):
            np.testing.assert_allclose(row["cls"], own["cls"], atol=1e-6)
            photo = world / "photos" / Path(str(path)).name
            if photo.suffix:  # rows of a table have numbers
                exact = extractor({"bytes": [photo.read_bytes()]})["patches"][0].ravel()
                least, most = (exact + np.float32([[-1e-6], [1e-6]])).astype(np.float16)  # rounded as the table is
                for patches in (row["patches"], own["patches"]):
                    assert ((least <= patches) & (patches <= most)).all()
            assert [*row["size"], *row["grid"]] == [*own["size"], *own["grid"]]
        else:
            assert row["error"] == own["error"]
            assert pandas.isna(row["cls"])
    # What one engine wrote the other continues; what could not be read is tried again.
    (world / "photos" / "3.png").write_bytes(encoded(3))
    words = [*given[:1], "--dense", "--format", "parquet", "--workers", "0"]
    assert main(command(small, theirs, *words)[4:]) == 0
    assert pandas.isna(table(theirs).loc[f"{world}/photos/3.png"]["error"])


def test_a_worker_that_dies_loses_nothing_and_nothing_is_done_twice(cluster: str, small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = command(small, out, many_photos(tmp_path), "--size", 224, "--engine", "ray", "--address", cluster)
    process = start(words)
    killed: set[int] = set()
    while process.poll() is None and not killed:
        if list(out.glob("*.parquet")):
            killed = set(workers()[:1])
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    said, err = process.communicate(timeout=600)
    assert process.returncode == 0, said + err
    assert killed, "the run was over before a worker could be killed"
    assert "320 images done" in said
    assert sorted(table(out).index) == [str(path) for path in sorted((tmp_path / "photos").iterdir())]
    parts = {path: path.stat().st_mtime_ns for path in out.glob("*.parquet")}
    said, _ = run(words, 0)
    assert "0 images done, 320 were there before" in said
    assert {path: path.stat().st_mtime_ns for path in out.glob("*.parquet")} == parts


def test_a_node_that_dies_loses_nothing(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of four processors end in the middle: all copies of the model must go on beside the tasks on the last one.

    They once counted for half a processor each: restarted, they took all of it, and nothing was read any more.
    """
    from ray.cluster_utils import Cluster

    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    soon = {"health_check_period_ms": 1000}  # a busy node still has its ten seconds to answer
    common = {"object_store_memory": 80_000_000, "include_dashboard": False}
    machines = Cluster()
    try:
        (agent,) = ports(1)
        machines.add_node(num_cpus=1, dashboard_agent_listen_port=agent, _system_config=soon, **common)
        node = machines.add_node(num_cpus=3, **common)
        out = tmp_path / "out"
        words = ("--size", 224, "--engine", "ray", "--address", machines.address, "--workers", 4)
        with start(command(small, out, many_photos(tmp_path), *words)) as process:
            try:
                while process.poll() is None and not rows_in(out):
                    time.sleep(0.02)
                written = rows_in(out) if process.poll() is None else 320
                machines.remove_node(node, allow_graceful=False)
                said, err = process.communicate(timeout=300)
            finally:
                process.kill()
    finally:
        machines.shutdown()
    assert written < 320, "the run was over before the node could be killed"
    assert process.returncode == 0, said + err
    assert "320 images done" in said
    assert sorted(table(out).index) == [str(path) for path in sorted((tmp_path / "photos").iterdir())]


def rows_in(out: Path) -> int:
    """Of the parts that are whole by now."""
    count = 0
    for part in out.glob("*.parquet"):
        with contextlib.suppress(pyarrow.ArrowInvalid):
            count += pyarrow.parquet.read_metadata(part).num_rows
    return count


def many_photos(folder: Path) -> Path:
    (folder / "photos").mkdir()
    for number in range(320):
        (folder / "photos" / f"{number:03d}.png").write_bytes(encoded(number))
    return folder / "photos"


def test_a_model_that_the_workers_do_not_see_is_one_line(cluster: str, small: Path, world: Path) -> None:
    """A path that is the command's own: elsewhere it leads into another folder."""
    words = ("--engine", "ray", "--address", cluster)
    _, err = run(command(Path("/proc/self/cwd", small.name), world / "out", world / "photos", *words), 2, small.parent)
    (line,) = [line for line in err.splitlines() if line.startswith("veca features:")]
    assert "Ray gave up" in line
    assert f"InputError: no teacher at '/proc/self/cwd/{small.name}'" in line  # what is no model may be a teacher's id
    assert "Traceback" not in err


def test_a_ray_that_does_not_start_is_one_line(small: Path, world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", f"{world}/list.txt")
    _, err = run(command(small, world / "out", world / "photos", "--engine", "ray"), 2)
    (line,) = [line for line in err.splitlines() if line.startswith("veca features:")]
    assert "Ray does not start here" in line
    assert "list.txt" in line
    assert "Traceback" not in err


def workers() -> list[int]:
    """Processes in which Ray runs our model."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if place.read_bytes().startswith(b"ray::MapWorker"):
                found.append(int(place.parent.name))
        except OSError:
            continue
    return found


def test_the_class_as_it_is_in_a_pipeline(cluster: str, small: Path, world: Path) -> None:
    """The lines of docs/cluster.md."""
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(import ray\n.*?)```", page, flags=re.DOTALL)
    for given, ours in (
        ('"photos/"', f'"{world}/photos"'),
        ('"veca-s14"', f'"{small}"'),
        ("32, ", f'{CORES}, "size": {SIZE}, '),
    ):
        assert given in block
        block = block.replace(given, ours)
    script = f"import ray\nray.init('{cluster}', log_to_driver=False)\n{block}\nfeatures.write_parquet('{world}/out')"
    run([sys.executable, "-c", script], 0)
    found = {Path(str(path)).stem: row for path, row in table(world / "out").iterrows()}
    assert "damaged or truncated" in found["3"]["error"]
    for number, cls, grid in expected(small):
        np.testing.assert_allclose(found[str(number)]["cls"], cls, atol=1e-5)
        assert tuple(found[str(number)]["grid"]) == grid


def test_the_class_behind_ray_serve(cluster: str, small: Path, tmp_path: Path) -> None:
    """The lines of docs/cluster.md, with a small model."""
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(from ray import serve.*?)```", page, flags=re.DOTALL)
    assert len([line for line in block.splitlines() if line]) <= 20
    (tmp_path / "features_service.py").write_text(
        block.replace('"veca-s14", cores=32', f'"{small}", cores={CORES}, size={SIZE}, dtype="float32"')
    )
    (port,) = ports(1)
    script = (
        f"import ray, time\nray.init('{cluster}', log_to_driver=False)\nfrom ray import serve\n"
        f"serve.start(http_options={{'port': {port}}})\nfrom features_service import app\n"
        "serve.run(app)\nprint('serving', flush=True)\ntime.sleep(600)\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "RAY_AUTH_MODE": "disabled"}
    process = subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert any("serving" in line for line in process.stdout)
        request = urllib.request.Request(f"http://127.0.0.1:{port}/", data=encoded(1))
        answer = np.frombuffer(urllib.request.urlopen(request, timeout=60).read(), np.float32)
        ((_, cls, _),) = expected(small, range(1, 2))
        np.testing.assert_allclose(answer, cls, atol=1e-5)
        with pytest.raises(urllib.error.HTTPError, match="422"):
            urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/", data=b"no image"), timeout=60)
    finally:
        process.terminate()
        process.wait(60)


def test_mistakes_get_one_line(small: Path, world: Path) -> None:
    words = command(small, world / "out", world / "photos", "--engine", "ray")[4:]
    for more, message in (
        (("--shard", "1/2"), "leave --format and --shard out"),
        (("--format", "npz"), "leave --format and --shard out"),
        (("--model", "absent"), "no model at 'absent'"),
        (("--out", str(world / "photos" / "0.png")), "is a file, not a folder"),
    ):
        with pytest.raises(InputError, match=message):
            main([*words, *more])
    with pytest.raises(InputError, match="neither pyarrow nor fsspec knows"):
        find_files(("nowhere://bucket/photos",))
    with pytest.raises(InputError, match="no such file"):
        find_files((f"file://{world}/absent",))


def test_a_broken_shard_is_a_row_with_an_error(world: Path) -> None:
    (world / "broken.tar").write_bytes(b"no tar" * 1000)
    files = {"file": [f"{world}/broken.tar", f"{world}/absent.png", f"{world}/photos/0.png"]}
    (batch,) = decoded(files, set(), SIZE, 16, 8)
    assert list(batch["path"]) == files["file"]
    assert [bool(error) for error in batch["error"]] == [True, True, False]
