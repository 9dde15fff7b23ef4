"""The columns of the compatibility page, the core and each patch: their tests, their sources."""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from ds_patches.core import registry
from tests.releases import ROOT

CORE = "core"
_CORE_TESTS = ("tests/core", "tests/launchers", "tests/traincheck", "tests/world")
_MARKED = re.compile(r"\bpytest\.mark\.core_case\b")


def columns() -> tuple[str, ...]:
    return (CORE, *registry.patches())


def tests_of(column: str) -> tuple[str, ...]:
    """The files and folders with a column's tests, relative to the project's root."""
    return _CORE_TESTS if column == CORE else (f"tests/{column}",)


def marked_files(roots: Iterable[str] = ("tests",)) -> list[str]:
    """The test files at these places that hold a core case.

    They are what pytest is given for the core subset: to collect all the others as well takes
    longer than some releases' tests.
    """
    found = (path for root in roots for path in _below(ROOT / root) if path.match("test_*.py"))
    marked = (path for path in found if _MARKED.search(path.read_text(encoding="utf-8")))
    return sorted(str(path.relative_to(ROOT)) for path in marked)


def sources(column: str) -> str:
    """A digest of a column's code and core tests.

    What belongs to another patch is no part of it, nor what answers questions, nor a patch's page.
    """
    others = {*registry.patches(), "commands", "symptoms.py"} - {column}
    pages = {Path("ds_patches", name, "__init__.py") for name in registry.patches()}
    roots = ("ds_patches", "tests/training", *tests_of(column))
    marked = {*map(Path, marked_files(roots))}
    digest = hashlib.sha256()
    for path in sorted(_files(*roots)):
        unmarked = path.match("test_*.py") and path not in marked
        if path.parts[1] not in others and path not in pages and not unmarked:
            digest.update(f"{path}\0".encode() + (ROOT / path).read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def commit(column: str) -> str:
    """The commit that is checked out, with a + when the column is tested in another state.

    Empty where git does not say.
    """
    head = git("rev-parse", "--short", "HEAD")
    changed = git("status", "--porcelain", "--", "ds_patches", *tests_of(column))
    return f"{head}+" if head and changed else head


def git(*arguments: str) -> str:
    """What git says of the checkout; nothing where there is no git, no repository or no answer."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _files(*roots: str) -> Iterator[Path]:
    for root in map(ROOT.joinpath, roots):
        yield from (p.relative_to(ROOT) for p in _below(root) if p.suffix in (".py", ".json"))


def _below(root: Path) -> Iterable[Path]:
    return root.rglob("*") if root.is_dir() else [root]
