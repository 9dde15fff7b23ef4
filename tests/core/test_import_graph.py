"""Imports run one way: no circle, and none from a folder to one above it, not even a late one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import ds_patches
from ds_patches.core import registry

ROOT = Path(str(ds_patches.__file__)).parent
#: What a folder, or a module beside the folders, may import of others. A patch is under BELOW.
BELOW: dict[str, set[str]] = {
    "core": set(),
    "symptoms": set(),
    "runtime": {"core"},
    "startup": {"core"},
    "doctor": {"core"},
    "traincheck": {"core", "runtime", "doctor"},
    "commands": {"core", "symptoms", "startup", "doctor", "traincheck"},
    "": {"core", "traincheck"},
    "auto": {"core"},
    "__main__": {"", "core", "startup", "commands"},
}
#: What the package itself defines, importing nothing for it: anybody may ask for these.
OWN = {"__path__", "__version__"}


def modules() -> dict[str, Path]:
    found = {}
    for file in ROOT.rglob("*.py"):
        parts = file.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    # Python runs it by another name, in interpreters that may have another ds_patches, or none.
    del found["ds_patches.startup.hook.sitecustomize"]
    return found


def run(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may run beneath a node: all but what only type checkers read."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield child
            yield from run(child)


def imported(name: str, file: Path, known: dict[str, Path]) -> set[str]:
    found = set()
    for node in run(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & known.keys()
        elif isinstance(node, ast.ImportFrom):
            here = name.split(".") + ["__init__"] * (file.name == "__init__.py")
            above = here[: -node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                if f"{base}.{alias.name}" in known:
                    found.add(f"{base}.{alias.name}")
                elif base in known and not (base == "ds_patches" and alias.name in OWN):
                    found.add(base)
    return found


def graph() -> dict[str, set[str]]:
    known = modules()
    return {name: imported(name, file, known) for name, file in known.items()}


def test_there_is_no_circle() -> None:
    TopologicalSorter(graph()).prepare()  # raises CycleError, which has the circle


def test_no_import_goes_up_or_to_another_patch() -> None:
    patches = registry.patches()
    below = BELOW | {name: {"core", "runtime", *p.requires} for name, p in patches.items()}
    wrong = []
    for name, others in graph().items():
        for other in others:
            here, there = ((*one.split("."), "")[1] for one in (name, other))
            if here != there and there not in below[here]:
                wrong.append(f"{name} imports {other}")
    assert not wrong
