"""The command `veca`: one line per subcommand, loaded only when it is called.

veca features photos/ --out features/        veca --help
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import importlib
import inspect
import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from veca.errors import InputError

T = TypeVar("T")

# name: (module, function, one line of help). The function's docstring and typed arguments are its own --help.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "features": ("veca.extract.command", "main", "write features of photos as .npz files"),
    "scan": ("veca.scan_command", "main", "scan images of any size once, for looking at any part of them later"),
    "look": ("veca.scan_command", "main_look", "features of any part of a scanned image"),
    "view": ("veca.viewer.command", "main", "look around in an image of any size, on a local page"),
    "similar": ("veca.similar", "main", "places that look like one place, in a large image or in many"),
    "explore": ("veca.analysis.command", "main", "pictures of what the model sees, or an interactive page"),
    "distill": ("veca.recipes.command", "main", "train a model from a frozen teacher"),
    "finetune": ("veca.finetune.command", "main", "fine-tune on labels: classes, masks or depth"),
    "probe": ("veca.probes.command", "main", "judge backbones by linear probes"),
    "bench": ("veca.bench.command", "main", "measure FLOPs, latency and memory"),
    "calibrate": ("veca.calibrate", "main", "let a model choose its own budgets of cores and patches"),
    "import": ("veca.importing", "main", "turn an authors' checkpoint, or a DINOv2 or DINOv3, into a model folder"),
    "export": ("veca.export", "main", "write an ONNX file"),
    "serve": ("veca.serve.command", "main", "serve features over HTTP"),
    "demo": ("veca.demo", "main", "features of a few bundled photographs, as one picture"),
    "info": ("veca.info", "main", "sizes, parameters, budgets and FLOPs of a model"),
}

# What a disk answers when it is full or broken, when this user may not do that there, or when something else is there.
REFUSALS = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR,
    errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ENOENT, errno.ELOOP, errno.EINVAL,
)  # fmt: skip


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {help_line}" for name, (_, _, help_line) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: veca COMMAND [arguments]",
            "",
            "Dense image features at a cost that grows linearly with image area.",
            "",
            *lines,
            "",
            "`veca COMMAND --help` explains each one, with examples.",
        ]
    )


def parse(settings: Callable[..., T], arguments: Sequence[str], prog: str) -> T:
    """The settings that arguments ask for, by tyro; --help shows the docstring whole, examples and all.

    Of a wrong argument tyro prints a box of five lines or more; here it becomes one line, as every mistake does.
    """
    import tyro

    about = inspect.getdoc(settings)
    if {"-h", "--help"} & set(arguments):
        return tyro.cli(settings, args=arguments, prog=prog, description=about)
    printed, width = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100000"  # so wide that no word is broken in two
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.cli(settings, args=arguments, prog=prog, description=about)
    except SystemExit:
        raise InputError(f"{in_one_line(printed.getvalue())}; see {prog} --help") from None
    finally:
        del os.environ["COLUMNS"]
        if width is not None:
            os.environ["COLUMNS"] = width


def in_one_line(box: str) -> str:
    """What a box of tyro's says: its first part, and the names that it lists after it."""
    lines = [line[2:-2].rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()[1:-1]]
    parts: list[list[str]] = [[]]
    for line in lines:
        if line and set(line) <= {"─", "-"}:
            parts.append([])
        elif not line.startswith(8 * " ") and not line.startswith(("Argument helptext", "For full helptext")):
            parts[-1].append(line)
    said = []
    for part in parts:
        title, names = " ".join(line for line in part if line[:1] != " "), [line.strip() for line in part[1:]]
        if title.startswith("Missing from"):
            said.append(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} missing")
        elif title.startswith(("Perhaps you meant", "Unrecognized options:")) and names:
            said.append(f"{title.rstrip(':').lower()} {', '.join(names)}")
        elif title and not said:
            # Where several types were tried, what the last of them says is what a person can use.
            first, _, tried = title.partition(" no type matching")
            said.append(f"{first} {tried.rsplit(']: ', 1)[-1]}" if tried else title)
    return "; ".join(" ".join(text.split()).rstrip(".") for text in said)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; a user's mistake becomes one line on stderr and exit status 2."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from veca import __version__

        print(f"veca {__version__}")
        return 0
    for output in (sys.stdout, sys.stderr):  # a file's name may hold any bytes
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors="backslashreplace")
    warnings.filterwarnings("ignore", module=r"PIL\.")  # comments on damaged tags, one an image, help nobody
    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # the same; what matters becomes our one line
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"veca: no command {name!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    module, function, _ = COMMANDS[name]
    try:
        status = getattr(importlib.import_module(module), function)(rest)
        return int(status or 0)
    except InputError as error:
        print(f"veca {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"veca {name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away (| head)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:  # the disk says no, and nobody on the way knew better
        if error.errno not in REFUSALS:
            raise
        print(f"veca {name}: {error.filename or 'a file'}: {error.strerror}", file=sys.stderr)
        return 2


def run() -> NoReturn:
    """The whole process. A rank of `torchrun` leaves at once when its work is done and its files are whole.

    Taken down in order, gloo's threads now and then end the interpreter by an abort, and torchrun then calls the job
    failed and stops the other ranks.
    """
    status = main()
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    run()
