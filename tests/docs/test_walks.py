"""The walks through the code name functions that are there."""

from __future__ import annotations

from pathlib import Path

from tools import pages


def test_each_row_names_a_function_of_its_file() -> None:
    page = Path("docs/how-it-works.md").read_text(encoding="utf-8")
    steps = pages._STEP.findall(page)
    assert len(steps) > 30
    assert all(pages.line_of(file, name) for file, _, name in steps)
