"""Runs in a page: their tables, between the marks of their benchmark."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Run = Mapping[str, Any]  # as a benchmark keeps it


def main(
    program: str,
    description: str | None,
    picture: str,
    draw: Callable[[Sequence[Run], Path], None],
    filled: Callable[[str, Mapping[str, Run]], str],
) -> None:
    """Draw the runs that the command line names beside its page, and write the page anew.

    filled: the page's text with the runs, which come by the path that the page can link to.
    """
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN.json")
    parser.add_argument("page", type=Path, metavar="PAGE.md")
    options = parser.parse_args()
    page = options.page
    runs = {os.path.relpath(run, page.parent): json.loads(run.read_text()) for run in options.runs}
    draw(list(runs.values()), page.parent / picture)
    page.write_text(filled(page.read_text(encoding="utf-8"), runs), encoding="utf-8")


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
