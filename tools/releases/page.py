"""Tables of a page that have a column for each release; a run changes the columns that ran."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.version import Version

#: The last row: what the column ran on.
ON = "on"


def write_column(
    page: Path, mark: str, version: str, cells: Mapping[str, str], order: Sequence[str] = ()
) -> None:
    """Write a release's cells into the table between the marks.

    A row without a cell has a dash; one of dashes alone goes. order: of the rows, or by name.
    """
    text = page.read_text("utf-8")
    table = re.compile(rf"(?<=<!-- {mark} -->\n\n).*?(?=\n\n<!-- end {mark} -->)", re.DOTALL)
    match = table.search(text)
    assert match, f"{page} has no table between its marks"
    lines = [line[2:-2].split(" | ") for line in match[0].splitlines() if line[:2] == "| "]
    head, _, *rows = lines
    of = {name: dict(zip(head[1:], row, strict=True)) for name, *row in rows}
    for name in {*of, *cells}:
        of.setdefault(name, {})[version] = cells.get(name, "-")
    rank = {name: place for place, name in enumerate(order)}
    names = sorted(of, key=lambda name: (name == ON, rank.get(name, -1), name))
    releases = sorted({*head[1:], version}, key=Version)
    body = [[name, *(of[name].get(release, "-") for release in releases)] for name in names]
    body = [row for row in body if {*row[1:]} != {"-"}]
    whole = [[head[0], *releases], ["---"] * (1 + len(releases)), *body]
    new = "\n".join(f"| {' | '.join(row)} |" for row in whole)
    page.write_text(table.sub(lambda _: new, text), "utf-8")
