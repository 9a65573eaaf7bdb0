"""The interactive page: one self-contained HTML file in which a person plays with the cores."""

from veca.explorer.page import build_page

__all__ = ["build_page"]
