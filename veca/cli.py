"""The command `veca`: one line per subcommand, loaded only when it is called.

veca features photos/ --out features/        veca --help
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence

from veca.errors import InputError

# name: (module, function, one line of help). The function's docstring and typed arguments are its own --help.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "features": ("veca.features", "main", "write features of photos as .npz files"),
    "scan": ("veca.scan_command", "main", "scan images of any size once, for looking at any part of them later"),
    "look": ("veca.scan_command", "main_look", "features of any part of a scanned image"),
    "explore": ("veca.analysis.command", "main", "pictures of what the model sees, or an interactive page"),
    "distill": ("veca.recipes.command", "main", "train a model from a frozen teacher"),
    "finetune": ("veca.finetune.command", "main", "fine-tune on labels: classes, masks or depth"),
    "probe": ("veca.probes.command", "main", "judge backbones by linear probes"),
    "bench": ("veca.bench.command", "main", "measure FLOPs, latency and memory"),
    "import": ("veca.importing", "main", "turn an authors' checkpoint, or a DINOv2 or DINOv3, into a model folder"),
    "export": ("veca.export", "main", "write an ONNX file"),
    "serve": ("veca.serve.command", "main", "serve features over HTTP"),
    "demo": ("veca.demo", "main", "features of a few bundled photographs, as one picture"),
    "info": ("veca.info", "main", "sizes, parameters, budgets and FLOPs of a model"),
}

# What a disk answers when it is full or broken, when this user may not do that there, or when something else is there.
REFUSALS = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR,
    errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG,
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


if __name__ == "__main__":
    sys.exit(main())
