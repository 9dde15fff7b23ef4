"""The definitions in a source file, found in its syntax tree, and their digests."""

import ast
import hashlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def tree(file: Path) -> ast.Module:
    """Parse a file. DeepSpeed's larger files take 70 ms and tens of MB."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DeepSpeed's invalid escapes are not the user's concern
        return ast.parse(file.read_bytes(), file.name)


def by_name(scope: list[ast.stmt], qualname: str) -> Definition | None:
    """Return the function or class that `qualname` names after these statements; None if absent."""
    name, _, path = qualname.partition(".")
    # The last definition wins, as it does when the module runs.
    last = next((d for d in reversed([*_definitions(scope)]) if d.name == name), None)
    return by_name(last.body, path) if last and path else last


def imported_from(scope: list[ast.stmt], name: str) -> str | None:
    """Return the module from which these statements import a name, or None."""
    for statement in scope:
        if isinstance(statement, ast.ImportFrom) and name in [n.name for n in statement.names]:
            return statement.module
    return None


def digest(node: ast.AST) -> str:
    """Return 16 hex digits, the same on every Python if the behaviour is the same."""
    return hashlib.sha256(_canonical(node).encode()).hexdigest()[:16]


def _definitions(scope: list[ast.stmt]) -> Iterator[Definition]:
    for statement in scope:
        if isinstance(statement, Definition):
            yield statement
            continue
        for block in ("body", "handlers", "orelse", "finalbody"):
            yield from _definitions(getattr(statement, block, []))


def _canonical(node: Any) -> str:
    if isinstance(node, list):
        return f"[{','.join(map(_canonical, node))}]"
    if isinstance(node, (ast.Constant, ast.MatchSingleton)):
        return f"{type(node).__name__}({node.value!r})"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, _behaviour(node, name, value)) for name, value in ast.iter_fields(node))
    # Empty fields are dropped: newer Pythons add some (type_params) and fill others.
    filled = (f"{name}={_canonical(value)}" for name, value in fields if value not in (None, []))
    return f"{type(node).__name__}({','.join(filled)})"


def _behaviour(node: ast.AST, name: str, value: Any) -> Any:
    """Return a field without docstrings, type comments and the text of f-strings."""
    if name == "type_comment":
        return None
    if isinstance(node, Definition) and name == "body" and ast.get_docstring(node, clean=False):
        return value[1:]
    if isinstance(node, ast.JoinedStr) and name == "values":
        return [part for part in value if not isinstance(part, ast.Constant)]
    return value
