"""The language: names say what they hold, docstrings begin with the noun or the verb."""

import ast
from collections import Counter

import pytest

from tests.shell import REPOSITORY

VAGUE = {"one", "found", "at", "where", "here", "there", "told", "thing", "mine", "kept"}
BEGINNINGS = {"Let", "Have", "Say", "Whether", "Of", "It", "That", "Those", "They", "What"}
#: By folder, the most vague names, and the most docstrings with a vague beginning.
BOUNDS = {"ds_patches": (40, 0), "tests": (30, 10), "tools": (0, 0), "benchmarks": (0, 0)}
EACH = pytest.mark.parametrize("folder", BOUNDS)


def nodes(folder: str) -> list[ast.AST]:
    files = (REPOSITORY / folder).rglob("*.py")
    return [n for file in files for n in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]


@EACH
def test_names_say_what_they_hold(folder: str) -> None:
    names = Counter(
        node.arg if isinstance(node, ast.arg) else node.id
        for node in nodes(folder)
        if isinstance(node, ast.arg)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    )
    vague = {name: count for name, count in names.items() if name.strip("_") in VAGUE}
    assert sum(vague.values()) <= BOUNDS[folder][0], vague


@EACH
def test_docstrings_begin_with_the_noun_or_the_verb(folder: str) -> None:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docs = [ast.get_docstring(node) for node in nodes(folder) if isinstance(node, documented)]
    vague = [doc for doc in docs if doc and doc.split()[0] in BEGINNINGS]
    assert len(vague) <= BOUNDS[folder][1], vague
