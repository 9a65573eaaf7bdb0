"""Wrong command lines: each has at least one mistake, so that none begins any work."""

from __future__ import annotations

import random

from veca.cli import COMMANDS

ODD = (
    *(
        "",
        " ",
        "-",
        "--",
        "-1",
        "0",
        "1e999",
        "nan",
        "NaN",
        "inf",
        "0x10",
        "1_000",
        "²",
        "\udcff",
        "a\nb",
        "[/bold]",
        "{0..9}",
    ),
    *("/proc/veca", "/dev/null", "..", "~", "*", "None", "True", "@file", "9" * 400, "x" * 5000, "{0..99999999}", "🦆"),
)
FLAGS = (
    *("--out", "--size", "--cores", "--model", "--batch", "--workers", "--device", "--seed", "--data", "--train"),
    *("--teacher", "--steps", "--json", "--port", "--slo", "--max-bytes", "--tokens", "--sizes", "--budgets"),
)
PARTS = {
    "probe": ("classify", "knn", "segment", "depth", "teacher", "predict", "score"),
    "distill": ("laptop", "stage1", "stage2", "convert"),
    "finetune": ("classify", "segment", "depth"),
    "bench": ("serve", "distill"),
    "features": ("--stream",),
}


def wrong_command(seed: int) -> list[str]:
    chance = random.Random(seed)
    if chance.random() < 0.03:
        return [chance.choice(ODD), *chance.choices(ODD, k=chance.randrange(3))]
    name = chance.choice([name for name in COMMANDS if name != "help"])
    words = [name]
    if name in PARTS and chance.random() < 0.8:
        words.append(chance.choice(PARTS[name]))
    for _ in range(chance.randrange(4)):
        words.append(chance.choice(FLAGS))
        if chance.random() < 0.8:
            words.append(chance.choice(ODD))
    words.append(chance.choice(("--no-such-flag", "--no-such-flag=3", "--nosuch")))  # the mistake that is always there
    rest = words[1:]
    if chance.random() < 0.3:
        chance.shuffle(rest)
    return [name, *rest]
