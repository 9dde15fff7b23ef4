"""Find a function or class in a source file, parse no more of it than that, and digest it.

DeepSpeed's larger files take 70 ms each to parse, and a rank asks for some seventy definitions of
a dozen files: parsed alone, they take a tenth of the time. Whatever is not plain to see in the
text is looked up in the tree of the whole file.
"""

from __future__ import annotations

import ast
import hashlib
import re
import tokenize
import warnings
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
#: Path, time and size: what is kept of a file is kept for this state of it.
Stamp = tuple[Path, int, int]
#: By its qualified name, the indices of the lines that look as if they began a definition.
Heads = dict[str, list[int]]

_HEAD = re.compile(r"(\s*)(?:async\s+def|def|class)\s+(\w+)")
#: Ends of a definition that are tried before the whole file is parsed.
_TRIES = 20


def stamp(path: Path) -> Stamp:
    """Return what a file's content is remembered by."""
    stat = path.stat()
    return path, stat.st_mtime_ns, stat.st_size


def by_name(file: Stamp, qualname: str) -> Definition | None:
    """Return the definition that `qualname` names once the module has run, or None."""
    lines, heads, names = _lines(file), _heads(file), qualname.split(".")
    if not set(names) <= {name.rpartition(".")[2] for name in heads}:
        return None
    places = [heads.get(above, []) for above in accumulate(names, "{}.{}".format)]
    is_plain = all(len(of) == 1 for of in places)  # each is defined just once
    start = _with_decorators(lines, places[-1][0]) if is_plain else None
    alone = None if start is None else _parsed_from(lines, start)
    return alone or _in_tree(tree(file).body, names)


def imported_from(file: Stamp, name: str) -> str | None:
    """Return the module that a function comes from that the file only imports, by this name."""
    if not any(name in line for line in _lines(file)):  # most have no need of the tree
        return None
    statements = (one for one in tree(file).body if isinstance(one, ast.ImportFrom))
    found = (one.module for one in statements if any(n.name == name for n in one.names))
    return next(found, None)


def digest(node: ast.AST) -> str:
    """Return 16 hex digits that are equal on every Python for equal behaviour."""
    return hashlib.sha256(_canonical(node).encode()).hexdigest()[:16]


def first_line(node: Definition) -> int:
    """Return where the interpreter says the definition starts: at its first decorator."""
    return min(one.lineno for one in (node, *node.decorator_list))


@lru_cache(maxsize=4)
def _lines(file: Stamp) -> list[str]:
    with tokenize.open(file[0]) as source:  # in the encoding that it declares
        return source.read().split("\n")


@lru_cache(maxsize=4)
def _heads(file: Stamp) -> Heads:
    heads: Heads = {}
    scopes = [(-1, "")]  # around the line: how far each is indented, and the beginning of its names
    for index, line in enumerate(_lines(file)):
        if head := _HEAD.match(line):
            while scopes[-1][0] >= len(head[1]):
                scopes.pop()
            name = scopes[-1][1] + head[2]
            heads.setdefault(name, []).append(index)
            scopes.append((len(head[1]), f"{name}."))
    return heads


@lru_cache(maxsize=4)  # a tree of DeepSpeed's larger files takes tens of MB
def tree(file: Stamp) -> ast.Module:
    """Return the whole file, parsed."""
    return _parse(file[0].read_bytes(), file[0].name)


def _parse(source: str | bytes, file: str = "") -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # upstream's invalid escapes are not the user's concern
        return ast.parse(source, file)


def _parsed_from(lines: list[str], start: int) -> Definition | None:
    """Parse the definition that begins at this index; None if its end is not found soon.

    It ends before a line that is indented no deeper than it begins, unless what is cut off there
    is no whole statement: a decorator, an argument list, a string that is still open.
    """
    indentation = _indentation(lines[start])
    # Under a condition, and not dedented, which would alter the strings of several lines.
    above = ["if 1:"] if indentation else []
    may_begin = re.compile(rf"\s{{0,{indentation}}}[^\s#]").match
    later = range(start + 1, len(lines))
    ends = chain((end for end in later if may_begin(lines[end])), [len(lines)])
    for _, end in zip(range(_TRIES), ends, strict=False):
        try:
            body = _parse("\n".join([*above, *lines[start:end], ""])).body
        except SyntaxError:
            continue
        inner = body[0].body if above and isinstance(body[0], ast.If) else body
        if len(inner) == 1 and isinstance(only := inner[0], Definition):
            ast.increment_lineno(only, start - len(above))
            return only
        return None
    return None


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def _with_decorators(lines: list[str], head: int) -> int | None:
    """Return where a definition begins; None if what is above could be part of a decorator."""
    start, apart = head, False
    for line in range(head - 1, -1, -1):
        text = lines[line].strip()
        if text.startswith("@"):
            start = line
        elif not text:
            apart = True
        elif not text.startswith("#"):
            outside = _indentation(lines[line]) < _indentation(lines[head])
            return start if outside or (apart and not text.startswith(")")) else None
    return start


def _in_tree(scope: list[ast.stmt], names: list[str]) -> Definition | None:
    # The last definition wins, as it does when the module runs.
    found = next((d for d in reversed([*_definitions(scope)]) if d.name == names[0]), None)
    return _in_tree(found.body, names[1:]) if found and names[1:] else found


def _definitions(scope: list[ast.stmt]) -> Iterator[Definition]:
    for statement in scope:
        if isinstance(statement, Definition):
            marks = {d.attr for d in statement.decorator_list if isinstance(d, ast.Attribute)}
            if not marks & {"setter", "deleter"}:  # of a property: its getter carries the shape
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
    kept = (f"{name}={_canonical(value)}" for name, value in fields if value not in (None, []))
    return f"{type(node).__name__}({','.join(kept)})"


def _behaviour(node: ast.AST, name: str, value: Any) -> Any:
    """Drop what is not behaviour: docstrings, type comments, the text of f-strings."""
    if name == "type_comment":
        return None
    if isinstance(node, Definition) and name == "body" and ast.get_docstring(node, clean=False):
        return value[1:]
    if isinstance(node, ast.JoinedStr) and name == "values":
        return [part for part in value if not isinstance(part, ast.Constant)]
    return value
