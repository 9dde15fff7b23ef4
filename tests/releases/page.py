"""docs/compatibility.md: what is between its marks, from the records. The rest is written there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from packaging.version import Version

from tests.releases import ROOT, markdown, pairs
from tests.releases.columns import columns
from tests.releases.record import TORCH, Cell, Record, Records, write

FILE = ROOT / "docs" / "compatibility.md"
_PART = re.compile(r"(?<=<!-- recorded: )(\w+)( -->\n).*?(?=\n<!-- end -->)", re.DOTALL)
#: The columns whose tests have something in the place of what needs a GPU; the page says what.
STAND_INS = ("dc_fallback", "stream_safety")


def rewrite(records: Records, path: Path = FILE) -> None:
    write(path, render(records))


def render(records: Records) -> str:
    """The page, with its parts from these records."""
    parts = {
        "when": _when(records),
        "main": _noted(records, [(release, TORCH) for release in records.releases]),
        "pairs": _noted(records, _pairs(records)),
        "commits": markdown(("column", "recorded", "at"), _recorded(records)),
    }
    page = FILE.read_text(encoding="utf-8")
    return _PART.sub(lambda part: f"{part[1]}{part[2]}\n{parts[part[1]]}\n", page)


def table(records: Records, rows: Iterable[tuple[str, str]]) -> str:
    """One row for each release and torch, the newest first; also what a run prints at its end."""
    rows = list(rows)
    told_apart = {torch for _, torch in rows} != {TORCH}
    marked = (f"{name} \\*" if name in STAND_INS else name for name in columns())
    head = ("DeepSpeed", *(["torch"] if told_apart else []), *marked)
    lines = []
    for release, torch in reversed(rows):
        found = (records.of.get((release, torch, column)) for column in columns())
        lines.append((release, *([torch] if told_apart else []), *map(cell, found)))
    return markdown(head, lines)


def cell(record: Record | None) -> str:
    """One cell's text; what calls for a look is bold."""
    found = record.cell if record else Cell.UNKNOWN
    if record and found is Cell.PASS:
        return f"pass ({record.passed})"
    return found.value if found.settled else f"**{found.value}**"


def _noted(records: Records, rows: Sequence[tuple[str, str]]) -> str:
    """A table, and why a cell is refused, failed or unknown, where that is known."""
    notes = [
        f"- {release}{'' if torch == TORCH else f' with torch {torch}'}, `{column}`: "
        f"{record.cell.value}: {record.why}"
        for (release, torch, column), record in records.of.items()
        if (release, torch) in rows and (record.cell is Cell.REFUSED or not record.cell.settled)
    ]
    return "\n".join([table(records, rows), *([""] if notes else []), *notes])


def _pairs(records: Records) -> list[tuple[str, str]]:
    """Those that are wanted, and whatever else was recorded with another torch; oldest first."""
    wanted = {(pair.release, pair.torch) for pair in pairs.known()}
    found = {(release, torch) for release, torch, _ in records.of if torch != TORCH}
    return sorted(wanted | found, key=lambda one: tuple(map(Version, one)))


def _when(records: Records) -> str:
    """The days, every version of what the tests ran with, and the releases that there are."""
    found = list(records.of.values())
    python, ours = (
        ", ".join(sorted({getattr(record, field) for record in found}))
        for field in ("python", "ds_patches")
    )
    return (
        f"Run {_days(found)}: Python {python}, ds_patches {ours}. The package index had "
        f"{len(records.releases)} releases from {records.releases[0]} to {records.releases[-1]} "
        f"on {records.looked_at}."
    )


def _days(found: Iterable[Record]) -> str:
    days = sorted({record.date for record in found})
    return " to ".join(dict.fromkeys((*days[:1], *days[-1:])))


def _recorded(records: Records) -> Iterator[tuple[str, ...]]:
    """Each column with its days and commits, in the order of the days."""
    for column in columns():
        found = [record for record in records.of.values() if record.column == column]
        if found:
            commits = [r.commit for r in sorted(found, key=lambda r: r.date) if r.commit]
            yield f"`{column}`", _days(found), ", ".join(dict.fromkeys(commits)) or "not noted"
