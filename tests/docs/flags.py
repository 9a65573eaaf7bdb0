"""Whether a command of `veca` has the flags that a page or a step gives it."""

from __future__ import annotations

import contextlib
import functools
import io
import re

from veca.cli import main

ALONE = ("features", "explore", "export", "info", "import", "demo", "serve")  # what follows them is no subcommand


def unknown_flags(words: list[str]) -> set[str]:
    """Those in `words` (what follows `veca`) that the command's help does not name."""
    flags = {word for word in words if re.fullmatch(r"--[a-z][\w-]*", word)}
    names = tuple(word for word in words[:2] if re.fullmatch(r"[a-z]+\d?", word))
    if not flags or (words[0] == "distill" and len(names) == 1):  # a recipe's flags, whichever it is
        return set()
    if words[0] in ALONE:
        names = (words[0], "--stream") if "--stream" in flags else (words[0],)
    known = help_text(names)
    return {
        flag
        for flag in flags - {"--stream", "--help"}
        if not re.search(rf"({flag}|{flag.replace('--no-', '--')})(?![\w-])", known)
    }


@functools.cache
def help_text(names: tuple[str, ...]) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        main([*names, "--help"])
    return said.getvalue()
