"""docs/messages.md has a row for every warning and error of the package, and no other row."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache

from tests.shell import REPOSITORY

PACKAGE = REPOSITORY / "ds_patches"
PAGE = (REPOSITORY / "docs/messages.md").read_text(encoding="utf-8")
#: A row: a message, or its beginning and "..."; what it means; what to do.
ROW = re.compile(r"^\| `+ ?(.+?) ?`+ \| (\S.*?) \| (\S.*?) \|$", re.MULTILINE)
#: Functions that log a warning or an error, and the index of the message in their arguments.
LOGGING = {"warning": 0, "error": 0, "critical": 0, "log": 1, "_warn_once": 0, "write": 0}
#: Letters of a message without its values; words of a constant that is one.
LONG = 8
Texts = dict[str, ast.expr]
TEXTS = (ast.Constant, ast.JoinedStr, ast.BinOp)


def messages(tree: ast.Module, constants: Texts) -> Iterator[str]:
    """Yield the messages that a module raises and logs, with "<>" for each value in them."""
    texts = constants | assigned(tree.body)
    for scope in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        assignments = [node for node in ast.walk(scope) if isinstance(node, ast.Assign)]
        for node in ast.walk(scope):
            if arguments := message_arguments(node):
                before = [line for line in assignments if line.lineno < node.lineno]
                message = filled(arguments, texts | assigned(before))
                if message == "<>" and isinstance(arguments[0], ast.Name):  # one of the constants
                    own = (filled([constant], {}) for constant in assigned(tree.body).values())
                    yield from (text for text in own if len(text.split()) > LONG)
                elif len(re.sub(r"\W", "", message)) > LONG:  # else it is an exception's text
                    yield message


def message_arguments(node: ast.AST) -> list[ast.expr]:
    """Return the message that a statement raises, or a call logs, and the values for its "%s"."""
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        return node.exc.args[:1]
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__":
        return node.args[:1]
    if isinstance(node, ast.Call) and (name := last_name(node.func)) in LOGGING:
        return node.args[LOGGING[name] :]
    return []


def filled(arguments: list[ast.expr], texts: Texts) -> str:
    values = (text_of(node, texts) for node in arguments[1:])
    text = re.sub(r"%[.\d]*[sdgf]", lambda _: next(values, "<>"), text_of(arguments[0], texts))
    return re.sub(r"(<>)+", "<>", " ".join(text.split()))


def text_of(node: ast.expr, texts: Texts) -> str:
    """Return the text of an expression, with "<>" for what is not a text in the source."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, texts) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left, texts) + text_of(node.right, texts)
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value, texts)
    name = last_name(node.func if isinstance(node, ast.Call) else node)
    if name in texts and isinstance(node, (ast.Name, ast.Attribute, ast.Call)):
        return text_of(texts[name], {other: texts[other] for other in texts if other != name})
    return "<>"


def last_name(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]


def assigned(nodes: Iterable[ast.AST]) -> Texts:
    """Return the texts that are assigned to names, or that functions return at their end."""
    texts: Texts = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, TEXTS):
            texts[last_name(node.targets[0])] = node.value
        if isinstance(node, ast.ClassDef):
            texts |= assigned(node.body)
        end = node.body[-1] if isinstance(node, ast.FunctionDef) else node
        if isinstance(end, ast.Return) and isinstance(end.value, (*TEXTS, ast.Call)):
            texts[getattr(node, "name", "")] = end.value
    return texts


@cache
def in_package() -> dict[str, str]:
    """Return the file of each message. Proofs are scripts of a user's."""
    files = [file for file in PACKAGE.rglob("*.py") if "proofs" not in file.parts]
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in files}
    constants: Texts = {}
    for tree in trees.values():
        constants |= {k: v for k, v in assigned(tree.body).items() if k.isupper()}
    return {
        message: str(file.relative_to(PACKAGE))
        for file, tree in trees.items()
        for message in messages(tree, constants)
    }


def begins(message: str, row: str) -> bool:
    """Return True if a row is for a message."""
    text = re.sub(r"(<[^>]*>)+", "<>", row)
    return message.startswith(text[:-3]) if text.endswith("...") else message == text


def test_every_message_has_a_row_and_every_row_a_message() -> None:
    rows = [row for row, _, _ in ROW.findall(PAGE)]
    assert len(rows) == PAGE.count("\n| `")
    missing = {m: file for m, file in in_package().items() if not any(begins(m, r) for r in rows)}
    assert not missing, "add rows to docs/messages.md"
    stale = [row for row in rows if not any(begins(message, row) for message in in_package())]
    assert not stale, "the package has no such message"
