"""Latency by interleaved rounds: all contenders once, then all again, so that a busy moment disturbs all alike.

python -m veca.bench.measure '{"arm": ["veca", 64], …}'      prints the peak memory of one pass
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from veca.bench.arms import Arm, Call, network, training_step
from veca.config import VecaConfig
from veca.errors import InputError

NOISY = 0.15  # of the best round


def interleaved(
    calls: Mapping[Arm, Call],
    rounds: int,
    device: torch.device,
    seconds: float,
    said: Callable[[str], None],
    training: bool = False,
) -> dict[Arm, list[float]]:
    """Seconds of each call, warm. No call gets more than about `seconds` of rounds, but each gets two."""
    times: dict[Arm, list[float]] = {arm: [] for arm in calls}
    with torch.inference_mode(not training):
        for round_ in range(-1, rounds):  # the first is for warming up
            for arm, call in calls.items():
                spent = sum(times[arm])
                if round_ >= 2 and spent + spent / len(times[arm]) > seconds:
                    continue
                said(f"{arm.label}, round {max(round_, 0) + 1} of {rounds}")
                taken = timed(call, device)
                if round_ >= 0:
                    times[arm].append(taken)
    return times


def load_before() -> dict[str, Any]:
    """How busy the machine is before the first measurement: processes that want a CPU, over the last minute."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"load": round(os.getloadavg()[0], 2), "cpus": cpus}


def spread(times: Sequence[float]) -> float | None:
    """How much longer than the best round half of them took; nothing is known from one."""
    return statistics.median(times) / min(times) - 1 if len(times) > 1 else None


def noise(spreads: Mapping[str, float | None], before: Mapping[str, Any]) -> dict[str, Any]:
    """What says how far times can be believed: the contender that varied most, and the machine's load."""
    known = {name: value for name, value in spreads.items() if value is not None}
    worst = max(known, key=lambda name: known[name], default=None)
    about = {**before, "spread": known[worst] if worst else None, "of": worst}
    busy = before["load"] > before["cpus"] / 2
    return {**about, "noisy": busy or worst is None or known[worst] > NOISY}


def noise_said(about: Mapping[str, Any]) -> str:
    """One line for people."""
    load = f"load {about['load']:.1f} on {about['cpus']} CPUs before the start"
    if about["spread"] is None:
        return f"Measured once, {load}: how noisy these times are is not known. Measure with more --rounds."
    line = f"half of the rounds of {about['of']} took at least {about['spread']:.0%} longer than its best, {load}"
    if about["noisy"]:
        return f"NOISY: {line}. Do not trust these times: measure again on a quiet machine."
    return f"Noise at most: {line}."


def timed(call: Call, device: torch.device) -> float:
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize(device)
        return float(start.elapsed_time(end)) / 1e3
    began = time.perf_counter()
    call()
    if device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter() - began


def peak_memory(
    arm: Arm,
    config: VecaConfig,
    size: int,
    batch: int,
    device: torch.device,
    training: bool = False,
    dtype: torch.dtype = torch.float32,
) -> int:
    """Bytes that a pass needs beyond the weights and the images: on a CPU measured in a process of its own."""
    if device.type == "cuda":
        call = (training_step if training else network)(arm, config, size, batch, device, dtype)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        with torch.inference_mode(not training):
            call()
        return int(torch.cuda.max_memory_allocated(device) - before)
    shape = {"arm": list(arm), "config": config.to_dict(), "size": size, "batch": batch}
    request = json.dumps({**shape, "training": training, "dtype": str(dtype).removeprefix("torch.")})
    # glibc keeps what is freed below this size as holes that later allocations may not fit: without it up to two thirds
    # of a peak were holes, and how many changed from run to run.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-m", "veca.bench.measure", request], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}; out of memory?"])[-1]
        raise InputError(f"{arm.label} at {size}² failed: {reason}")
    return int(done.stdout)


def _peak_of_one_pass(request: dict[str, Any]) -> int:
    config, arm, training = VecaConfig.from_dict(request["config"]), Arm(*request["arm"]), request["training"]
    device, dtype = torch.device("cpu"), getattr(torch, request["dtype"])
    contender = training_step if training else network
    with torch.inference_mode(not training):
        contender(arm, config, 8 * config.patch_size, 1, device, dtype)()  # load the libraries
        call = contender(arm, config, request["size"], request["batch"], device, dtype)
        before = forget_peak()
        call()
    return max(0, peak() - before)


def forget_peak() -> int:
    """Let the highest resident memory start anew from what is resident now (Linux), and return that."""
    with contextlib.suppress(OSError):  # elsewhere the highest so far is the best guess of what is resident
        Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """The highest resident memory of this process, in bytes."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024  # bytes there, kibibytes elsewhere
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            name = next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    about = {
        "cpu": name,
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    if torch.cuda.is_available():
        about["gpu"] = torch.cuda.get_device_name()
    return about


if __name__ == "__main__":
    print(_peak_of_one_pass(json.loads(sys.argv[1])))
