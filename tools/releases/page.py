"""Tables of a page, which are their own store: a run changes the columns or rows that ran."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.version import Version

#: The last row: what the column ran on.
ON = "on"


def _table(mark: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=<!-- {mark} -->\n\n).*?(?=\n\n<!-- end {mark} -->)", re.DOTALL)


def read(page: Path, mark: str) -> list[list[str]]:
    """Return the cells of the table between the marks, the titles first."""
    match = _table(mark).search(page.read_text("utf-8"))
    assert match, f"{page} has no table between its marks"
    head, _, *rows = (line[2:-2].split(" | ") for line in match[0].splitlines() if line[:2] == "| ")
    return [head, *rows]


def write(page: Path, mark: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write the table, wholly or not at all: whoever is interrupted finds the old page."""
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    text = _table(mark).sub(lambda _: "\n".join(lines), page.read_text("utf-8"))
    part = page.with_name(f".{page.name}.part")
    part.write_text(text, "utf-8")
    os.replace(part, page)


def write_column(
    page: Path, mark: str, version: str, cells: Mapping[str, str], order: Sequence[str] = ()
) -> None:
    """Write a release's cells into the table between the marks.

    A row without a cell has a dash; one of dashes alone goes. order: of the rows, or by name.
    """
    head, *rows = read(page, mark)
    of = {name: dict(zip(head[1:], row, strict=True)) for name, *row in rows}
    for name in {*of, *cells}:
        of.setdefault(name, {})[version] = cells.get(name, "-")
    rank = {name: place for place, name in enumerate(order)}
    names = sorted(of, key=lambda name: (name == ON, rank.get(name, -1), name))
    releases = sorted({*head[1:], version}, key=Version)
    body = [[name, *(of[name].get(release, "-") for release in releases)] for name in names]
    write(page, mark, [head[0], *releases], [row for row in body if {*row[1:]} != {"-"}])
