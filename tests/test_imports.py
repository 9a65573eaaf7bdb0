"""Data flows one way: no module of the package waits, while it is imported, for one that waits for it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "veca"
MODULES = {
    ".".join(("veca", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """What runs when a module is imported: not the bodies of functions, nor what only a type checker reads."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            yield from statements([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from statements([*node.body, *node.orelse, *node.finalbody])
            for handler in node.handlers:
                yield from statements(handler.body)
        elif isinstance(node, (ast.With, ast.ClassDef)):
            yield from statements(node.body)


def imported(path: Path) -> set[str]:
    """The modules of the package that a file imports at once."""
    found: set[str] = set()
    for node in statements(ast.parse(path.read_text(encoding="utf-8")).body):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            named = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys()
            found |= named or {node.module}
    return found & MODULES.keys()


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Some cycle, or nothing: what is left when everything that waits for nobody is taken away again and again."""
    left = {name: set(needs) - {name} for name, needs in graph.items()}
    while free := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in free:
            del left[name]
    path: list[str] = []
    name = next(iter(left), "")
    while name and name not in path:
        path.append(name)
        name = next(iter(left[name] & left.keys()))
    return path[path.index(name) :] if name else []


def test_the_check_sees_a_cycle() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert set(cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == {"b", "c"}


def test_no_module_imports_one_that_imports_it() -> None:
    graph = {name: imported(path) for name, path in MODULES.items()}
    assert graph["veca.distill.engine"] >= {"veca.training.loop", "veca.teachers"}
    assert cycle(graph) == []


def test_no_folder_imports_one_that_imports_it() -> None:
    """training, distill, recipes, tasks, probes, finetune, …: each depends on those below it only."""

    def folder(name: str) -> str:
        return name.split(".")[1] if name.count(".") > 1 or MODULES[name].name == "__init__.py" else name

    rooms: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        if name != "veca":
            found = {folder(other) for other in imported(path) if other != "veca"}
            rooms.setdefault(folder(name), set()).update(found)
    assert "training" in rooms["distill"]
    assert cycle(rooms) == []


def test_probes_and_fine_tuning_share_the_tasks_and_not_each_other() -> None:
    """Not even inside a function: what both need stands in tasks/ or below it."""
    for room, other in (("finetune", "probes"), ("probes", "finetune"), ("tasks", "probes"), ("tasks", "finetune")):
        for path in (PACKAGE / room).rglob("*.py"):
            assert f"veca.{other}" not in path.read_text(encoding="utf-8"), path
