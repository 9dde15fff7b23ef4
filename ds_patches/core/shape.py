"""The shape of a function or class: a digest of its source that ignores what is not behaviour.

Two ways lead to the same digest: from the source on disk, without importing DeepSpeed, and from
the live object, which also shows whether somebody has replaced it.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import warnings
from collections.abc import Iterator
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from ds_patches.core import imports, live
from ds_patches.core.patch import Patch, Place

#: Shape of a name that does not exist; a known shape only where a patch adds the name.
ABSENT = "absent"
#: Shape of a live object whose source cannot be read.
UNREADABLE = "unreadable"

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def known(patch: Patch) -> dict[str, dict[str, str]]:
    """Return the recorded shapes of a patch: place -> digest -> spans of releases."""
    return json.loads(recorded_at(patch).read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def recorded_at(patch: Patch) -> Path:
    """Return the file that holds the recorded shapes of a patch, beside its binding."""
    return Path(str(import_module(patch.package).__file__)).with_name("shapes.json")


def of(place: Place, folder: Path) -> str:
    """Return the shape of a place: of the live object if its module is loaded, else of the source.

    folder: the DeepSpeed package's folder.
    """
    return of_live(place) if imports.is_whole(place.module) else of_source(place, folder)


def of_source(place: Place, folder: Path) -> str:
    """Return the shape of a place as the source under `folder` has it."""
    path = _source_file(place.module, folder)
    return ABSENT if path is None else _digest_by_name(path, _stamp(path), place.qualname)


def of_live(place: Place) -> str:
    """Return the shape of a loaded place, of the function or class beneath all wrappers."""
    where = live.site(place)
    value = live.innermost(live.raw(*where)) if where else live.MISSING
    if value is live.MISSING or isinstance(value, live.Absent):
        return ABSENT
    code = getattr(value, "__code__", None)
    if isinstance(value, type):
        path = Path(getattr(sys.modules.get(value.__module__), "__file__", None) or "")
    else:
        path = Path(getattr(code, "co_filename", ""))
    if not path.is_file():
        return UNREADABLE
    if code is None:
        return _digest_by_name(path, _stamp(path), value.__qualname__)
    # By line, not through inspect.getsource: that dedents, which alters multi-line strings.
    return _digest_by_line(path, _stamp(path), code.co_firstlineno, code.co_name)


def digest(node: ast.AST) -> str:
    """Return 16 hex digits that are equal on every Python for equal behaviour."""
    return hashlib.sha256(_canonical(node).encode()).hexdigest()[:16]


def _source_file(module: str, folder: Path) -> Path | None:
    inside = folder.joinpath(*module.split(".")[1:])
    candidates = (inside.with_suffix(".py"), inside / "__init__.py")
    return next((path for path in candidates if path.is_file()), None)


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size


@lru_cache(maxsize=4)  # a tree of DeepSpeed's larger files takes tens of MB
def _tree(path: Path, stamp: tuple[int, int]) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # upstream's invalid escapes are not the user's concern
        return ast.parse(path.read_bytes())


@cache
def _digest_by_name(path: Path, stamp: tuple[int, int], qualname: str) -> str:
    scope: list[ast.stmt] = _tree(path, stamp).body
    found: _Definition | None = None
    for name in qualname.split("."):
        # The last definition wins, as it does when the module runs.
        found = next((d for d in reversed(list(_definitions(scope))) if d.name == name), None)
        if found is None:
            return ABSENT
        scope = found.body
    assert found is not None
    return digest(found)


@cache
def _digest_by_line(path: Path, stamp: tuple[int, int], line: int, name: str) -> str:
    for node in ast.walk(_tree(path, stamp)):
        if isinstance(node, _Definition) and node.name == name and _first_line(node) == line:
            return digest(node)
    return UNREADABLE


def _first_line(node: _Definition) -> int:
    """Return where the interpreter says the definition starts: at its first decorator."""
    return min(one.lineno for one in (node, *node.decorator_list))


def _definitions(scope: list[ast.stmt]) -> Iterator[_Definition]:
    for statement in scope:
        if isinstance(statement, _Definition):
            if not _is_accessor(statement):
                yield statement
            continue
        for block in ("body", "handlers", "orelse", "finalbody"):
            yield from _definitions(getattr(statement, block, []))


def _is_accessor(node: _Definition) -> bool:
    """Whether this is the setter or deleter of a property; its getter carries the shape."""
    marks = (d.attr for d in node.decorator_list if isinstance(d, ast.Attribute))
    return any(mark in ("setter", "deleter") for mark in marks)


def _canonical(node: Any) -> str:
    if isinstance(node, list):
        return f"[{','.join(map(_canonical, node))}]"
    if isinstance(node, (ast.Constant, ast.MatchSingleton)):
        return f"{type(node).__name__}({node.value!r})"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, _behaviour(node, name, value)) for name, value in ast.iter_fields(node))
    # Empty fields are dropped: newer Pythons add some (type_params) and fill others.
    kept = (f"{name}={_canonical(value)}" for name, value in fields if value not in (None, []))
    return f"{type(node).__name__}({','.join(kept)})"


def _behaviour(node: ast.AST, name: str, value: Any) -> Any:
    """Drop what is not behaviour: docstrings, type comments, the text of f-strings."""
    if name == "type_comment":
        return None
    if isinstance(node, _Definition) and name == "body" and ast.get_docstring(node, clean=False):
        return value[1:]
    if isinstance(node, ast.JoinedStr) and name == "values":
        return [part for part in value if not isinstance(part, ast.Constant)]
    return value
