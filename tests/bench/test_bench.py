"""The benchmark's bookkeeping: counts against the closed form, slopes, files, sections. Timings are never asserted."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from veca.bench.arms import Arm, attention_path, build, network, products, training_step
from veca.bench.flops import closed_form_flops, veca_flops
from veca.bench.measure import interleaved, peak_memory
from veca.bench.report import put_section, rounds, slope
from veca.config import MODELS, VecaConfig
from veca.errors import InputError
from veca.model import Veca

SMALL = VecaConfig(depth=2, width=32, heads=2, bank=16)
CPU = torch.device("cpu")


@pytest.mark.parametrize("attention", ["core", "dense"])
@pytest.mark.parametrize(("size", "cores"), [(32, 1), (64, 16), (160, 8)])
def test_counted_flops_equal_the_closed_form(attention: str, size: int, cores: int) -> None:
    config = VecaConfig(**{**SMALL.to_dict(), "attention": attention, "out_width": 24})
    assert veca_flops(config, size, cores) == closed_form_flops(config, size, cores)


def test_flops_are_linear_in_patches() -> None:
    config = MODELS["veca_base"]
    per_patch = [veca_flops(config, size, 64) / (size // 16) ** 2 for size in (1024, 2048)]
    assert abs(per_patch[1] / per_patch[0] - 1) < 0.02


def test_products_are_those_of_the_forward_pass() -> None:
    """PyTorch counts the same FLOPs for the plain products as for the network, but for the tiny coordinate heads."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        products(SMALL, 64, 8, 1, CPU)()
    heads = (SMALL.depth - 1) * 2 * 8 * SMALL.width * 2
    assert counter.get_total_flops() == closed_form_flops(SMALL, 64, 8) - heads


def test_every_contender_runs_and_is_measured() -> None:
    arms = [Arm("veca", 8), Arm("dense", 8), Arm("dinov2", 0), Arm("dinov3", 0), Arm("products", 8)]
    calls = {arm: network(arm, SMALL, 32, 2, CPU) for arm in arms}
    said: list[str] = []
    times = interleaved(calls, 3, CPU, 60, said.append)
    assert {arm: len(values) for arm, values in times.items()} == dict.fromkeys(arms, 3)
    assert said[: len(arms)] == [f"{arm.label}, round 1 of 3" for arm in arms]  # interleaved, not one after another
    for arm in arms[:4]:
        attention_path(arm, SMALL, 32, 1, CPU)()


def test_other_ways_to_run_the_same_network() -> None:
    """Exported and streamed, the network of the benchmark is the one that is measured beside them."""
    model = build(Arm("veca", 8), SMALL, CPU)
    images = torch.randn(1, 3, 64, 64)  # what `network` draws after it has built the same model
    patches = network(Arm("onnx", 8), SMALL, 64, 1, CPU)()[1]  # type: ignore[index]
    assert patches.shape == (1, 16, 32)
    with torch.inference_mode():
        expected = model(images, cores=8).patches
    assert torch.allclose(torch.from_numpy(patches), expected, atol=1e-4)
    assert network(Arm("stream", 8), SMALL, 64, 1, CPU)().patches.shape == (1, 16, 32)  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="--batches 1"):
        network(Arm("stream", 8), SMALL, 64, 2, CPU)


def test_checkpointing_needs_less_memory() -> None:
    deep = VecaConfig(depth=8, width=64, heads=2, bank=16)
    plain, checkpointed = (
        peak_memory(Arm(name, 16), deep, 1024, 1, CPU, training=True) for name in ("veca", "veca checkpointed")
    )
    assert plain > 1.5 * checkpointed


def test_slow_contenders_get_fewer_rounds() -> None:
    arm = Arm("veca", 8)
    times = interleaved({arm: lambda: None}, 9, CPU, 0, lambda _: None)
    assert len(times[arm]) == 2


def test_slope() -> None:
    assert slope([(n, 3.0 * n**1.5) for n in (10, 100, 1000)]) == pytest.approx(1.5)
    assert slope([(10, 1.0)]) is None


def test_peak_memory_grows_with_the_image() -> None:
    small, large = (peak_memory(Arm("veca", 8), SMALL, size, 1, CPU) for size in (256, 2048))
    tokens = (2048 // 16) ** 2 * SMALL.width * 4
    assert large > small
    assert tokens < large < 100 * tokens


def test_a_table_says_from_how_many_rounds_it_comes() -> None:
    assert rounds([{"rounds": 1}, {"rounds": 1}]) == "each was measured once"
    assert rounds([{"rounds": 7}, {"rounds": 7}]) == "the best and the median of 7 rounds"
    assert rounds([{"rounds": 7}, {"rounds": 2}]) == "the best and the median of 2 to 7 rounds"


def test_a_section_of_a_page_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- x:begin -->\nold\n<!-- x:end -->\nafter\n")
    put_section(page, "x", "new")
    assert page.read_text() == "before\n<!-- x:begin -->\nnew\n<!-- x:end -->\nafter\n"
    with pytest.raises(InputError, match="must hold"):
        put_section(page, "y", "new")
    with pytest.raises(InputError, match="cannot read"):
        put_section(tmp_path / "none.md", "x", "new")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "veca.cli", "bench", *arguments], capture_output=True, text=True, timeout=200
    )


def test_command(tmp_path: Path) -> None:
    done = run(
        *("--model", "veca_tiny", "--sizes", "32", "64", "--cores", "4", "8", "--rounds", "2", "--no-memory"),
        *("--paths", "whole", "attention", "--out", str(tmp_path)),
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "bench.json").read_text())
    assert len(results["rows"]) == 2 * 2 * 4  # paths × sizes × (two budgets, dense, dinov3)
    row = next(row for row in results["rows"] if row["arm"] == "veca, 8 cores" and row["size"] == 64)
    assert row["gflops"] == row["gflops_closed_form"] == closed_form_flops(MODELS["veca_tiny"], 64, 8) / 1e9
    assert row["images_per_second"] == pytest.approx(1e3 / row["best_ms"])
    assert {"times_faster_than_dinov3", "times_faster_than_dense", "share_of_products"} <= row.keys()
    assert "slope" in done.stdout
    assert "torch" in results["machine"]
    with open(tmp_path / "bench.csv") as file:
        assert len(list(csv.DictReader(file))) == len(results["rows"])
    assert (tmp_path / "bench.png").stat().st_size > 10_000


def test_bfloat16(tmp_path: Path) -> None:
    arms = [Arm(name, 8) for name in ("veca", "dense", "stream", "products")] + [Arm("dinov3", 0)]
    with torch.inference_mode():
        out = {arm.name: network(arm, SMALL, 32, 1, CPU, torch.bfloat16)() for arm in arms}
        attention_path(arms[0], SMALL, 32, 1, CPU, torch.bfloat16)()
    assert out["veca"].patches.dtype == out["dinov3"].last_hidden_state.dtype == torch.bfloat16  # type: ignore[attr-defined]
    training_step(arms[0], SMALL, 32, 1, CPU, torch.bfloat16)()
    assert peak_memory(arms[0], SMALL, 256, 1, CPU, dtype=torch.bfloat16) > 0
    words = ["--model", "veca_tiny", "--sizes", "32", "--cores", "8", "--rounds", "1", "--no-memory"]
    done = run(*words, "--against", "products", "--dtype", "bfloat16", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "bench.json").read_text())["machine"]["dtype"] == "bfloat16"
    assert ", bfloat16, " in (tmp_path / "bench.md").read_text()
    words = ["--sizes", "56", "--box", "28", "--share-sizes", "56", "--rounds", "1", "--dtype", "bfloat16"]
    done = run("scan", *words, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "scan.json").read_text())["machine"]["dtype"] == "bfloat16"


def test_ways_and_training(tmp_path: Path) -> None:
    done = run(
        *("--model", "veca_tiny", "--sizes", "64", "--cores", "8", "--rounds", "1", "--no-memory"),
        *("--paths", "whole", "training", "--against", "dinov3", "stream", "int8", "--out", str(tmp_path)),
    )
    assert done.returncode == 0, done.stderr
    rows = {(row["path"], row["arm"]): row for row in json.loads((tmp_path / "bench.json").read_text())["rows"]}
    assert {arm for path, arm in rows if path == "training"} == {
        "veca, 8 cores", "dinov3", "veca checkpointed, 8 cores", "dinov3 checkpointed"
    }  # fmt: skip
    ours, int8 = rows["end to end", "veca, 8 cores"], rows["end to end", "int8, 8 cores"]
    assert int8["times_faster_than_veca"] == pytest.approx(ours["best_ms"] / int8["best_ms"])
    assert "times_faster_than_veca" not in ours


def test_a_models_own_geometry_beside_dinov2(tmp_path: Path) -> None:
    config = VecaConfig(depth=2, width=32, heads=2, bank=16, patch_size=14, mlp="gelu", positions="table")
    Veca(config).save(tmp_path / "model")
    done = run(
        *("--model", str(tmp_path / "model"), "--sizes", "56", "--cores", "8", "--rounds", "1", "--no-memory"),
        *("--against", "dinov2", "--out", str(tmp_path)),
    )
    assert done.returncode == 0, done.stderr
    ours, dinov2 = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert ours["gflops"] == closed_form_flops(config, 56, 8) / 1e9
    assert ours["times_faster_than_dinov2"] == pytest.approx(dinov2["best_ms"] / ours["best_ms"])
    tokens, width = 16 + 1, 32  # a class token
    block = 2 * tokens * width * (4 + 4 + 4) * width + 4 * tokens**2 * width
    assert dinov2["gflops"] == (2 * block + 2 * 16 * 3 * 14 * 14 * width) / 1e9


def test_mistakes() -> None:
    for arguments, words in (
        (("--sizes", "100"), "multiple of the patch size 16"),
        (("--cores", "65"), "1 and 64"),
        (("--model", "veca_smal"), "veca_smal"),
    ):
        done = run(*arguments)
        assert done.returncode == 2
        assert words in done.stderr
