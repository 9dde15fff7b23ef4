"""Runs in a page: their tables, between the marks of their benchmark."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Run = Mapping[str, Any]  # as a benchmark keeps it


def parse(program: str, description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN.json")
    parser.add_argument("page", type=Path, metavar="PAGE.md")
    return parser.parse_args()


def read(paths: Sequence[Path], page: Path) -> dict[str, Run]:
    """The runs, by the path that `page` can link to."""
    return {os.path.relpath(path, page.parent): json.loads(path.read_text()) for path in paths}


def rewrite(page: Path, change: Callable[[str], str]) -> None:
    page.write_text(change(page.read_text(encoding="utf-8")), encoding="utf-8")


def between_marks(text: str, name: str, parts: Sequence[str]) -> str:
    """`text` with `parts` between the marks of the benchmark called `name`."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"the page has no {begin} and {end}")
    return before + "\n\n".join([begin, *parts, end]) + after


def link(path: str) -> str:
    return f"Everything behind the tables: [{Path(path).name}]({path})."
