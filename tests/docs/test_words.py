"""The language of the package: names say what they hold, docstrings begin with the verb."""

import ast
from collections import Counter

from tests.docs.test_messages import PACKAGE

VAGUE = {"one", "found", "at", "where", "here", "there", "told", "thing", "mine", "kept"}
BEGINNINGS = {"Let", "Have", "Say", "Whether", "Of", "It", "That", "Those", "They", "What"}
TREES = {file: ast.parse(file.read_text(encoding="utf-8")) for file in PACKAGE.rglob("*.py")}
NODES = [(file, node) for file, tree in TREES.items() for node in ast.walk(tree)]


def test_names_say_what_they_hold() -> None:
    names = Counter(
        node.arg if isinstance(node, ast.arg) else node.id
        for _, node in NODES
        if isinstance(node, ast.arg)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    )
    vague = {name: count for name, count in names.items() if name.strip("_") in VAGUE}
    assert sum(vague.values()) <= 40, vague


def test_docstrings_begin_with_the_noun_or_the_verb() -> None:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docs = {(file, ast.get_docstring(n)) for file, n in NODES if isinstance(n, documented)}
    assert not [(file, doc) for file, doc in docs if doc and doc.split()[0] in BEGINNINGS]
