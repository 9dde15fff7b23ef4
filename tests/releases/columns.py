"""The columns of the compatibility page, the core and each patch: their tests, their sources."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ds_patches.core import registry
from tests.releases import ROOT, git

CORE = "core"
_CORE_TESTS = ("tests/core", "tests/launchers", "tests/traincheck", "tests/world")
_MARKED = re.compile(r"\bpytest\.mark\.core_case\b")


@dataclass(frozen=True)
class About:
    """What a column's passes do not say by themselves.

    stand_in: what its tests have in the place of something real, and where that is.
    on_gpus: what of it ran on GPUs, as the pages of benchmarks have it, and when.
    where: the page and the heading there.
    """

    stand_in: str = ""
    on_gpus: str = ""
    on: str = ""
    where: str = ""


#: Of the columns of which there is something to say.
ABOUT: Mapping[str, About] = {
    "coalesce": About(
        on_gpus="0.19.8: 60 of 60 cases equal plain PyTorch",
        on="2026-11-22",
        where="benchmarks-coalesce.md#correct-on-gpus",
    ),
    "dc_fallback": About(
        stand_in=(
            "DeepCompile's C++ and its compiler need a GPU. `tests/dc_fallback/stand_in.py` "
            "replaces them. Dynamo and the rest are real."
        ),
        on_gpus=(
            "with DeepCompile itself; 0.19.2, 0.19.3 and 0.19.8: every script equals plain "
            "PyTorch; 0.19.2: 18 of 18 patterns, and 0.19.8: 45 of 45 cases, on 2026-11-21"
        ),
        on="2026-11-23",
        where="benchmarks-dc-fallback.md#correct-on-gpus",
    ),
    "stream_safety": About(
        stand_in=(
            "A CPU has no streams. `tests/stream_safety/clocks.py` replaces them: its streams run "
            "nothing, and a detector tells which work is not ordered."
        ),
        on_gpus=(
            "with streams that are late; 0.19.8: 22 of 24 cases, and the run ended; 0.18.7 and "
            "0.17.4: 27 of 27 on 2026-11-22"
        ),
        on="2026-11-23",
        where="benchmarks-stream-safety.md#correct-on-gpus",
    ),
    "zero3_retain": About(
        on_gpus="0.19.8: 46 of 46 cases equal plain PyTorch",
        on="2026-11-22",
        where="benchmarks-zero3-retain.md#correct-on-gpus",
    ),
}


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
    """A digest of a column's code and tests: what belongs to another patch is no part of it."""
    others = set(registry.patches()) - {column}
    digest = hashlib.sha256()
    for path in sorted(_files("ds_patches", "tests/training", *tests_of(column))):
        if path.parts[1] not in others:
            digest.update(f"{path}\0".encode() + (ROOT / path).read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def commit(column: str) -> str:
    """The commit that is checked out, with a + when the column is tested in another state.

    Empty where git does not say.
    """
    head = git.says("rev-parse", "--short", "HEAD")
    changed = git.says("status", "--porcelain", "--", "ds_patches", *tests_of(column))
    return f"{head}+" if head and changed else head


def _files(*roots: str) -> Iterator[Path]:
    for root in map(ROOT.joinpath, roots):
        yield from (p.relative_to(ROOT) for p in _below(root) if p.suffix in (".py", ".json"))


def _below(root: Path) -> Iterable[Path]:
    return root.rglob("*") if root.is_dir() else [root]
