"""The benchmark's bookkeeping: counts against the closed form, slopes, files, sections. Timings are never asserted."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from veca.bench.arms import Arm, attention_path, build, network, products, training_step
from veca.bench.flops import (
    attention_layer_flops,
    closed_form_dino_flops,
    closed_form_flops,
    dino_flops,
    veca_flops,
)
from veca.bench.measure import interleaved, noise, noise_said, peak_memory, spread
from veca.bench.report import rounds, slope
from veca.cli import main
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


@pytest.mark.parametrize("turning", [0.125, 1.0])
@pytest.mark.parametrize("name", ["dinov2", "dinov3"])
def test_what_info_prints_is_what_pytorch_counts(name: str, turning: float) -> None:
    """A converted model too: gelu, a table of positions, channels that do not turn."""
    config = replace(SMALL, patch_size=14, mlp="gelu", mlp_ratio=4.0, positions="table", rope_zero_fraction=turning)
    assert closed_form_dino_flops(name, config, 56) == dino_flops(name, config, 56)
    assert closed_form_flops(config, 56, 8) == veca_flops(config, 56, 8)


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


@pytest.mark.end_to_end
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


@pytest.mark.end_to_end
def test_peak_memory_grows_with_the_image() -> None:
    small = peak_memory(Arm("veca", 8), SMALL, 256, 1, CPU, dtype=torch.bfloat16)
    large = peak_memory(Arm("veca", 8), SMALL, 2048, 1, CPU)
    tokens = (2048 // 16) ** 2 * SMALL.width * 4
    assert large > small
    assert tokens < large < 100 * tokens


def test_a_table_says_from_how_many_rounds_it_comes() -> None:
    assert rounds([{"rounds": 1}, {"rounds": 1}]) == "each was measured once"
    assert rounds([{"rounds": 7}, {"rounds": 7}]) == "the best and the median of 7 rounds"
    assert rounds([{"rounds": 7}, {"rounds": 2}]) == "the best and the median of 2 to 7 rounds"


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The status and all that was printed."""

    def run(*arguments: str) -> tuple[int, str]:
        status = main(["bench", *arguments])
        return status, "".join(capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model folder with the geometry of SMALL."""
    folder = tmp_path_factory.mktemp("small") / "model"
    Veca(SMALL).save(folder)
    return str(folder)


def test_command(run: Run, small: str, tmp_path: Path) -> None:
    status, printed = run(
        *("--model", small, "--sizes", "32", "64", "--cores", "4", "8", "--rounds", "2", "--no-memory"),
        *("--paths", "whole", "attention", "--out", str(tmp_path)),
    )
    assert status == 0, printed
    results = json.loads((tmp_path / "bench.json").read_text())
    assert len(results["rows"]) == 2 * 2 * 4  # paths × sizes × (two budgets, dense, dinov3)
    row = next(row for row in results["rows"] if row["arm"] == "veca, 8 cores" and row["size"] == 64)
    assert row["gflops"] == row["gflops_closed_form"] == closed_form_flops(SMALL, 64, 8) / 1e9
    assert row["images_per_second"] == pytest.approx(1e3 / row["best_ms"])
    assert {"times_faster_than_dinov3", "times_faster_than_dense", "share_of_products"} <= row.keys()
    assert "slope" in printed
    assert row["spread"] == pytest.approx(row["median_ms"] / row["best_ms"] - 1)
    assert results["noise"]["spread"] == max(row["spread"] for row in results["rows"])
    assert printed.count(f"load {results['noise']['load']:.1f} on {results['noise']['cpus']} CPUs before") == 1
    assert "torch" in results["machine"]
    with open(tmp_path / "bench.csv") as file:
        assert len(list(csv.DictReader(file))) == len(results["rows"])
    assert (tmp_path / "bench.png").stat().st_size > 10_000


def test_bfloat16(run: Run, small: str, tmp_path: Path) -> None:
    arms = [Arm(name, 8) for name in ("veca", "dense", "stream", "products")] + [Arm("dinov3", 0)]
    with torch.inference_mode():
        out = {arm.name: network(arm, SMALL, 32, 1, CPU, torch.bfloat16)() for arm in arms}
        attention_path(arms[0], SMALL, 32, 1, CPU, torch.bfloat16)()
    assert out["veca"].patches.dtype == out["dinov3"].last_hidden_state.dtype == torch.bfloat16  # type: ignore[attr-defined]
    training_step(arms[0], SMALL, 32, 1, CPU, torch.bfloat16)()
    words = ["--model", small, "--sizes", "32", "--cores", "8", "--rounds", "1", "--no-memory"]
    status, printed = run(*words, "--against", "products", "--dtype", "bfloat16", "--out", str(tmp_path))
    assert status == 0, printed
    assert "Measured once" in printed
    assert json.loads((tmp_path / "bench.json").read_text())["machine"]["dtype"] == "bfloat16"
    assert ", bfloat16, " in (tmp_path / "bench.md").read_text()
    words = ["--sizes", "64", "--box", "32", "--share-sizes", "64", "--rounds", "2", "--dtype", "bfloat16"]
    status, printed = run("scan", "--model", small, "--cores", "8", *words, "--out", str(tmp_path))
    assert status == 0, printed
    scanned = json.loads((tmp_path / "scan.json").read_text())
    assert scanned["machine"]["dtype"] == "bfloat16"
    assert scanned["noise"]["spread"] == max(row["spread"] for row in scanned["rows"])
    assert " CPUs before the start" in printed


@pytest.mark.end_to_end
def test_ways_and_training(run: Run, small: str, tmp_path: Path) -> None:
    status, printed = run(
        *("--model", small, "--sizes", "64", "--cores", "8", "--rounds", "1", "--no-memory"),
        *("--paths", "whole", "training", "--against", "dinov3", "stream", "int8", "--out", str(tmp_path)),
    )
    assert status == 0, printed
    rows = {(row["path"], row["arm"]): row for row in json.loads((tmp_path / "bench.json").read_text())["rows"]}
    assert {arm for path, arm in rows if path == "training"} == {
        "veca, 8 cores", "dinov3", "veca checkpointed, 8 cores", "dinov3 checkpointed"
    }  # fmt: skip
    ours, int8 = rows["end to end", "veca, 8 cores"], rows["end to end", "int8, 8 cores"]
    assert int8["times_faster_than_veca"] == pytest.approx(ours["best_ms"] / int8["best_ms"])
    assert "times_faster_than_veca" not in ours


def test_a_models_own_geometry_beside_dinov2(run: Run, tmp_path: Path) -> None:
    config = VecaConfig(depth=2, width=32, heads=2, bank=16, patch_size=14, mlp="gelu", positions="table")
    Veca(config).save(tmp_path / "model")
    status, printed = run(
        *("--model", str(tmp_path / "model"), "--sizes", "56", "--cores", "8", "--rounds", "1", "--no-memory"),
        *("--against", "dinov2", "--out", str(tmp_path)),
    )
    assert status == 0, printed
    ours, dinov2 = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert ours["gflops"] == closed_form_flops(config, 56, 8) / 1e9
    assert ours["times_faster_than_dinov2"] == pytest.approx(dinov2["best_ms"] / ours["best_ms"])
    tokens, width = 16 + 1, 32  # a class token
    block = 2 * tokens * width * (4 + 4 + 4) * width + 4 * tokens**2 * width
    assert dinov2["gflops"] == (2 * block + 2 * 16 * 3 * 14 * 14 * width) / 1e9


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--sizes", "100"), "multiple of the patch size 16"),
        (("--cores", "65"), "1 and 64"),
        (("--model", "veca_smal"), "veca_smal"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], words: str, run: Run) -> None:
    status, printed = run(*arguments)
    assert (status, words in printed) == (2, True), printed


def test_a_noisy_measurement_says_so() -> None:
    quiet = {"load": 0.3, "cpus": 2}
    assert spread([1.0, 1.2, 3.0]) == pytest.approx(0.2)
    assert spread([1.0]) is None
    calm = noise({"veca": 0.02, "dinov3": 0.05}, quiet)
    assert (calm["noisy"], calm["of"]) == (False, "dinov3")
    assert noise_said(calm).startswith("Noise at most: half of the rounds of dinov3 took at least 5% longer")
    for spreads, before in (({"veca": 0.4}, quiet), ({"veca": 0.02}, {"load": 7.5, "cpus": 2})):
        about = noise(spreads, before)
        assert about["noisy"]
        assert noise_said(about).startswith("NOISY: ")
        assert f"load {before['load']} on 2 CPUs before the start" in noise_said(about)
    assert "is not known" in noise_said(noise({"veca": None}, quiet))


def test_the_papers_cost_of_attention_is_what_we_count(run: Run, small: str, tmp_path: Path) -> None:
    """PyTorch's counter over one real block without its MLP; the paper's counts to their last digit."""
    words = ("--model", small, "--sizes", "32", "--cores", "4", "--rounds", "1", "--paths", "attention")
    status, printed = run(*words, "--against", "paper", "--out", str(tmp_path))
    assert status == 0, printed
    costs = json.loads((tmp_path / "bench.json").read_text())["paper"]
    assert [cost["model"] for cost in costs] == ["veca_small", "veca_base", "veca_large"]
    for cost in costs:
        assert round(cost["counted_gflops"], 2) == cost["gflops"]
        assert round(cost["counted_dinov3_gflops"], 2) == cost["dinov3_gflops"]
    assert "37.06 (37.06)" in printed
    assert "37.06 (37.06)" in (tmp_path / "bench.md").read_text()
    mlp = 2 * (16 + 8) * SMALL.width * 3 * SMALL.hidden_width
    attention = attention_layer_flops(SMALL, 64, 8)
    per_layer = veca_flops(replace(SMALL, depth=3), 64, 8) - veca_flops(SMALL, 64, 8)
    assert per_layer == attention + mlp + 2 * 8 * SMALL.width * 2  # and the cores' coordinate head


def test_a_share_of_the_patches_is_an_arm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "--model", "veca_tiny", "--sizes", "128", "--cores", "8", "--against", "products"]
    more = ["--patches", "1", "0.5", "--rounds", "1", "--no-memory", "--out", str(tmp_path)]
    assert main([*arguments, *more]) == 0
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [(row["arm"], row["patches"]) for row in rows] == [("veca, 8 cores", 64), ("veca, 8 cores, patches 0.5", 31)]
    assert "times_faster_than_all_patches" in rows[1]
    with torch.device("meta"):
        model = Veca(MODELS["veca_tiny"]).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.empty(1, 3, 128, 128, device="meta"), cores=8, patches=0.5)
    assert rows[1]["gflops"] * 1e9 == pytest.approx(counter.get_total_flops())
    capsys.readouterr()
    assert main([*arguments, "--patches", "0"]) == 2
    assert "patches must lie above 0" in capsys.readouterr().err
