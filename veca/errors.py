"""The one exception for mistakes a user can make: a bad file, a bad number, a missing package.

The command prints its message as one line and exits with status 2; anything else that escapes is a bug of ours and
keeps its traceback.
"""

from __future__ import annotations

import importlib
from numbers import Real
from types import ModuleType


class InputError(ValueError):
    """Something the user gave is wrong; the message says what it was and what to do, in one line."""


def check_share(share: float | str, name: str = "share") -> None:
    """Of an image's patches."""
    if isinstance(share, bool) or not isinstance(share, Real) or not 0 < share <= 1:
        raise InputError(f"{name} must lie above 0 and at most at 1 (all patches), not {share!r}")


def require(module: str, extra: str) -> ModuleType:
    """Import an optional dependency, or say which extra installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise InputError(f"{package} is needed for this: pip install 'veca[{extra}]' ({error})") from error
