"""The map of the package in docs/architecture.md: one line a file, from the first words of its docstring.

    python tools/architecture.py

Run it after adding, moving or renaming a file; a test says when it was forgotten.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from sections import put_section

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/architecture.md"
LONG = 42  # characters of a line beyond which its first half will do
LEFT_OUT = ("__init__.py", "_version.py")


def main() -> None:
    put_section(PAGE, "map", package_map())
    print(f"{PAGE.relative_to(ROOT)}: {len(list((ROOT / 'veca').rglob('*.py')))} files")


def package_map(package: Path = ROOT / "veca") -> str:
    """The files as a tree, folders last; a folder's line is that of its __init__.py."""
    lines = list(entries(package, depth=0))
    widest = max(len(name) for name, _ in lines)
    return "\n".join(["```text", *(f"{name:{widest}}  {words}" for name, words in lines), "```"])


def entries(folder: Path, depth: int) -> Iterator[tuple[str, str]]:
    """Name and line of every module below a folder."""
    indent = "  " * depth
    for path in sorted(folder.glob("*.py")):
        if path.name not in LEFT_OUT:
            yield indent + path.name, summary(path)
    for path in sorted(folder.iterdir()):
        if (path / "__init__.py").is_file():
            yield f"{indent}{path.name}/", summary(path / "__init__.py")
            yield from entries(path, depth + 1)


def summary(path: Path) -> str:
    """The first clause of a module's docstring (of its first class, where the module has none)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef))
    said = ast.get_docstring(tree) or next((text for node in classes if (text := ast.get_docstring(node))), None)
    if said is None:
        raise SystemExit(f"{path}: say in a docstring what this file is for")
    first = re.sub(r" ?\([^)]*\)", "", said.split("\n\n")[0].replace("\n", " ")).replace("`", "").replace("*", "")
    first = re.split(r"(?<=\w)\. |\.$|; ", first)[0]
    for mark, fewest in ((": ", 2), (", ", 4)):
        clause, _, _ = first.partition(mark)
        if len(clause.split()) >= fewest and (mark == ": " or len(first) > LONG):
            first = clause
    return re.sub(r"^(?:The|A) (.)", lambda found: found[1].upper(), first)


if __name__ == "__main__":
    main()
