"""docs/troubleshooting.md answers every message of the package, and quotes none that is not one.

A message is a text of two words or more in the source; what differs from case to case, the parts
of an f-string and the %s of a log line, splits it into fixed parts.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ds_patches"
PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")

#: Calls whose texts are no messages: below a warning, or help that the command line prints.
QUIET = {"debug", "info", "add_parser", "add_argument", "ArgumentParser"}
#: Files whose texts are shown when one asks for them.
ON_REQUEST = {
    "__main__.py": "help, and the answers of the commands",
    "commands/status.py": "status",
    "commands/doctor.py": "doctor",
    "commands/symptoms.py": "doctor and table",
    "commands/explain.py": "explain",
    "commands/page.py": "what explain reads",
    "commands/configuration.py": "doctor --config",
    "commands/record_shapes.py": "record-shapes",
    "symptoms.py": "doctor and table",
    "startup/diagnosis.py": "the end of doctor",
    "core/state.py": "the states, which are in using.md",
}
#: Single texts that need no answer.
NO_TROUBLE = {
    "on by default": "why a patch is wanted",
    "skipped by the call": "why a patch is disabled, as the user asked",
    "the call's choice": "why a patch is disabled, as the user asked",
    "required by": "why a patch is wanted",
    ", every shape is known": "a patch that may be applied",
    "wrappers in place": "a patch that is applied",
    "unapplied, no wrapper is left": "a patch that was taken back",
    "would apply at the import of": "a patch that is pending",
    'import os; os.environ.get("DS_PATCHES") and exec(': "code of the .pth file",
    ', {"os": os})': "code of the .pth file",
}


def sources() -> Iterator[Path]:
    """Every file with messages; a binding is data, which its page shows."""
    for file in sorted(PACKAGE.rglob("*.py")):
        relative = file.relative_to(PACKAGE).as_posix()
        if file.name != "binding.py" and relative not in ON_REQUEST:
            yield file


def fixed_parts(tree: ast.AST) -> Iterator[str]:
    """The fixed parts of all messages in a syntax tree."""
    for node in _spoken(tree):
        if "sys.stderr.write" in node.value:  # a program that is written to a file
            yield from fixed_parts(ast.parse(node.value))
        else:
            parts = (_plain(part) for part in re.split(r"%(?:\(\w+\))?[sdg]", node.value))
            yield from (part for part in parts if _is_said(part))


def _spoken(node: ast.AST) -> Iterator[ast.Constant]:
    """The texts that are neither docstrings nor arguments of a quiet call."""
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name in QUIET:
            return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _spoken(child)


def _is_said(text: str) -> bool:
    return len(re.findall(r"[A-Za-z]{2,}", text)) > 1 and " " in text


def _plain(text: str) -> str:
    return " ".join(text.replace("`", "").split())


@cache
def parts_in(file: Path) -> list[str]:
    return list(fixed_parts(ast.parse(file.read_text(encoding="utf-8"))))


@pytest.mark.parametrize("file", [*sources()], ids=lambda file: str(file.relative_to(PACKAGE)))
def test_every_message_is_answered(file: Path) -> None:
    page = _plain(PAGE)
    missing = [part for part in parts_in(file) if part not in page and part not in NO_TROUBLE]
    assert not missing, "docs/troubleshooting.md says nothing of these"


def test_every_exception_to_that_is_still_needed() -> None:
    found = {part for file in sources() for part in parts_in(file)}
    page = _plain(PAGE)
    assert [text for text in NO_TROUBLE if text not in found or text in page] == []
    assert [name for name in ON_REQUEST if not (PACKAGE / name).is_file()] == []


def quoted() -> list[str]:
    """The messages that are headings below "Messages of ds_patches"."""
    ours = PAGE.partition("\n## Messages of ds_patches\n")[2]
    return re.findall(r"^#### (`+) ?(.+?) ?\1(?: \{.*\})?$", ours, re.MULTILINE)


@pytest.mark.parametrize("message", [text for _, text in quoted()])
def test_every_quoted_message_is_one(message: str) -> None:
    spoken = [part for file in sources() for part in parts_in(file)]
    quoted_parts = [_plain(part) for part in re.split(r"<\w+>", message)]
    of_weight = [part for part in quoted_parts if _is_said(part)]
    assert of_weight, "a heading that would match anything"
    for part in of_weight:
        assert any(part in text for text in spoken), part
