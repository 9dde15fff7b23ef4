"""docs/compatibility.md, from the records alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.releases import ROOT
from tests.releases.cell import Cell
from tests.releases.record import Records, columns, write

FILE = ROOT / "docs" / "compatibility.md"

_TEXT = """\
<!-- Generated from compatibility.json by `make compatibility`; edit neither by hand. -->

# Compatibility

What was tested, release by release. {when}
Each cell is one run of a patch's core tests on two CPU ranks (gloo).
The package index had {count} releases from {oldest} to {newest} on {looked_at}.

{table}

- **pass (N)**: the patch was applied to this release, and N of its tests passed.
  Tests of what an older release does not have are left out.
- **fixed upstream**: this release needs no patch, and gets none.
- **not applicable**: the patch is not for this release, and is not applied.
- **refused**: the patch does not know this release or its code. It is not applied, and says so.
- **failed**: a test failed. Do not rely on the patch here.
- **unknown**: never run.

`core` is what checks, applies and takes back every patch.
No cell is about GPUs, NCCL or another torch; for GPUs see [benchmarks.md](benchmarks.md).
Stock 0.18.7 to 0.18.9 cannot step ZeRO-1/2 on several CPU ranks; the tests' ranks work around that.
{notes}
## Your release is refused or unknown

Nothing is applied to it, and training is stock's. `python -m ds_patches doctor` names what differs.
From a clone of the project, with the release for 0.0.0, this tests it and writes its row:

    make install
    .venv/bin/python -m tests.releases record 0.0.0

A refused patch is not tested. When `doctor` finds nothing but an unknown version, raise `supported`
in the patch's `binding.py` and run the command again: the row says whether it holds.
Everything behind the table: [compatibility.json](compatibility.json).
"""


def rewrite(records: Records, path: Path = FILE) -> None:
    write(path, render(records))


def render(records: Records) -> str:
    """The page as Markdown."""
    return _TEXT.format(
        when=_when(records),
        count=len(records.releases),
        oldest=records.releases[0],
        newest=records.releases[-1],
        looked_at=records.looked_at,
        table=table(records, records.releases),
        notes="".join(_notes(records)),
    )


def table(records: Records, releases: Sequence[str]) -> str:
    """One row for each release, the newest first; also what a run prints at its end."""
    rows = [("DeepSpeed", *columns()), ("---",) * (1 + len(columns()))]
    for release in reversed(releases):
        rows.append((release, *(cell(records, release, column) for column in columns())))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def cell(records: Records, release: str, column: str) -> str:
    """One cell's text; what calls for a look is bold."""
    found = records.cell(release, column)
    if found is Cell.PASS:
        return f"pass ({records.of[release, column].passed})"
    return found.value if found.settled else f"**{found.value}**"


def _when(records: Records) -> str:
    """The days, and every version of what the tests ran with."""
    if not (found := list(records.of.values())):
        return "Nothing yet."
    days = sorted({record.date for record in found})
    with_ = (
        f"{name} {', '.join(sorted({getattr(record, field) for record in found}))}"
        for name, field in (("Python", "python"), ("torch", "torch"), ("ds_patches", "ds_patches"))
    )
    return f"Run {' to '.join(dict.fromkeys((days[0], days[-1])))}: {', '.join(with_)}."


def _notes(records: Records) -> Iterator[str]:
    """Why a cell is refused, failed or unknown, for those of which that is known."""
    lines = [
        f"- {release}, `{column}`: {record.cell.value}: {record.why}\n"
        for (release, column), record in records.of.items()
        if record.cell is Cell.REFUSED or not record.cell.settled
    ]
    if lines:
        yield "\n## Why it is no pass\n\n"
        yield from lines
