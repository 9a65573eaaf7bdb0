"""The head's old address: `veca.tasks.base.heads` is its home."""

from veca.tasks.base.heads import Head, NormedLinear

__all__ = ["Head", "NormedLinear"]
