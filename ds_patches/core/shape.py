"""The shape of a function or class: a digest of its source that ignores what is not behaviour.

Two ways lead to the same digest: from the source on disk, without importing DeepSpeed, and from
the live object, which also shows whether somebody has replaced it.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from ds_patches.core import definitions, imports, live
from ds_patches.core.patch import Patch, Place

#: Shape of a name that does not exist; a known shape only where a patch adds the name.
ABSENT = "absent"
#: Shape of a live object whose source cannot be read.
UNREADABLE = "unreadable"


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
    return ABSENT if path is None else _digest_by_name(definitions.stamp(path), place.qualname)


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
        return _digest_by_name(definitions.stamp(path), value.__qualname__)
    # By line, not through inspect.getsource: that dedents, which alters multi-line strings.
    return _digest_by_line(definitions.stamp(path), code.co_firstlineno, code.co_name)


def digest(node: ast.AST) -> str:
    """Return 16 hex digits that are equal on every Python for equal behaviour."""
    return hashlib.sha256(_canonical(node).encode()).hexdigest()[:16]


def _source_file(module: str, folder: Path) -> Path | None:
    inside = folder.joinpath(*module.split(".")[1:])
    candidates = (inside.with_suffix(".py"), inside / "__init__.py")
    return next((path for path in candidates if path.is_file()), None)


@cache
def _digest_by_name(file: definitions.Stamp, qualname: str) -> str:
    found = definitions.by_name(file, qualname)
    return ABSENT if found is None else digest(found)


@cache
def _digest_by_line(file: definitions.Stamp, line: int, name: str) -> str:
    found = definitions.at_line(file, line, name)
    return UNREADABLE if found is None else digest(found)


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
    if (
        isinstance(node, definitions.Definition)
        and name == "body"
        and ast.get_docstring(node, clean=False)
    ):
        return value[1:]
    if isinstance(node, ast.JoinedStr) and name == "values":
        return [part for part in value if not isinstance(part, ast.Constant)]
    return value
