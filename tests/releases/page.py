"""docs/compatibility.md, from the records and from what there is to say of pairs and columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.version import Version

from tests.releases import ROOT, pairs
from tests.releases.cell import Cell
from tests.releases.columns import ABOUT, columns
from tests.releases.record import TORCH, Record, Records, write

FILE = ROOT / "docs" / "compatibility.md"

_TEXT = """\
<!-- Generated from compatibility.json by `make compatibility`; edit neither by hand. -->

# Compatibility

Each cell is one run of the core tests of a patch on two CPU ranks (gloo). {when}
The package index had {count} releases from {oldest} to {newest} on {looked_at}.

What a cell does not say:

- A column with a \\* was tested [on stand-ins](#stand-ins), since it is about GPUs.
- The cells say nothing of GPUs or NCCL; [what ran there](#on-gpus) is listed by itself.
- A cell is as old as [its column](#when-this-was-run). Code that changed later was not run again on
  every release.

## With torch {torch}

<div class="cells" markdown>

{table}

</div>

| cell | meaning |
| --- | --- |
| pass (N) | the patch was applied to this release, and N of its tests passed |
| fixed upstream | this release needs no patch, and gets none |
| not applicable | the patch is not for this release, and is not applied |
| refused | the patch does not know this release or its code; it is not applied, and says so |
| failed | a test failed; do not rely on the patch here |
| unknown | never run |

N differs between releases, because tests of what a release does not have are left out. The column
`core` tests what checks, applies and takes back every patch, and `train_check`. Stock 0.18.7 to
0.18.9 cannot step ZeRO-1/2 on several CPU ranks; the tests work around that. {notes}
## With another torch

The same tests ran with the torch that people have beside these releases.

<div class="cells" markdown>

{pairs}

</div>
{pair_notes}
## Stand-ins

{stand_ins}

## On GPUs

This ran by hand on NVIDIA H200 with torch 2.11.0, on two ranks. What changed after that day was
not run there.

{on_gpus}

`accumulation` ran as part of coalesce and zero3_retain, which require it.

## When this was run

A `+` after a commit means that the patch or its tests had uncommitted changes. Records from before
commits were noted have none.

{commits}

## Your release is refused or unknown

Nothing is applied to it, and training is stock's. `python -m ds_patches doctor` names what differs.
[CHANGELOG.md](../CHANGELOG.md) says what a new release means for you. In a clone of the project,
this prepares support for a new release, here 0.0.0, and tests it:

    make release-support VERSION=0.0.0

This tests a release again, and then one with torch 2.0.0, in an environment of some 5 GB that is
removed afterwards:

    .venv/bin/python -m tests.releases record 0.0.0
    .venv/bin/python -m tests.releases record --pair 0.0.0+2.0.0

Everything behind the tables is in [compatibility.json](compatibility.json).
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
        torch=TORCH,
        table=table(records, [(release, TORCH) for release in records.releases]),
        notes="".join(_notes(records, "\n## Why it is no pass\n\n", main=True)),
        pairs=table(records, _pairs(records)),
        pair_notes="".join(_pair_notes(records)),
        stand_ins=_lines(("column", "what is replaced"), _stand_ins()),
        commits=_lines(("column", "recorded", "at"), _recorded(records)),
        on_gpus=_lines(("patch", "what ran", "on"), _on_gpus()),
    )


def table(records: Records, rows: Iterable[tuple[str, str]]) -> str:
    """One row for each release and torch, the newest first; also what a run prints at its end."""
    rows = list(rows)
    told_apart = {torch for _, torch in rows} != {TORCH}
    marked = (
        f"{name} \\*" if name in ABOUT and ABOUT[name].stand_in else name for name in columns()
    )
    head = ("DeepSpeed", *(["torch"] if told_apart else []), *marked)
    lines = []
    for release, torch in reversed(rows):
        found = (records.of.get((release, torch, column)) for column in columns())
        lines.append((release, *([torch] if told_apart else []), *map(cell, found)))
    return _lines(head, lines)


def cell(record: Record | None) -> str:
    """One cell's text; what calls for a look is bold."""
    found = record.cell if record else Cell.UNKNOWN
    if record and found is Cell.PASS:
        return f"pass ({record.passed})"
    return found.value if found.settled else f"**{found.value}**"


def _lines(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows))


def _pairs(records: Records) -> list[tuple[str, str]]:
    """Those that are wanted, and whatever else was recorded with another torch; oldest first."""
    wanted = {(pair.release, pair.torch) for pair in pairs.known()}
    return sorted(wanted | records.with_other_torch(), key=lambda one: tuple(map(Version, one)))


def _when(records: Records) -> str:
    """The days, and every version of what the tests ran with."""
    if not (found := list(records.of.values())):
        return "Nothing yet."
    with_ = (
        f"{name} {', '.join(sorted({getattr(record, field) for record in found}))}"
        for name, field in (("Python", "python"), ("ds_patches", "ds_patches"))
    )
    return f"Run {_days(found)}: {', '.join(with_)}."


def _days(found: Iterable[Record]) -> str:
    days = sorted({record.date for record in found})
    return " to ".join(dict.fromkeys((days[0], days[-1])))


def _recorded(records: Records) -> Iterator[tuple[str, ...]]:
    """Each column with its days and commits, in the order of the days."""
    for column in columns():
        found = [record for record in records.of.values() if record.column == column]
        if found:
            commits = [r.commit for r in sorted(found, key=lambda r: r.date) if r.commit]
            yield f"`{column}`", _days(found), ", ".join(dict.fromkeys(commits)) or "not noted"


def _on_gpus() -> Iterator[tuple[str, ...]]:
    for column, about in ABOUT.items():
        if about.on_gpus:
            yield f"[{column}]({about.where})", about.on_gpus, about.on


def _stand_ins() -> Iterator[tuple[str, ...]]:
    for column, about in ABOUT.items():
        if about.stand_in:
            yield f"`{column}`", about.stand_in


def _pair_notes(records: Records) -> Iterator[str]:
    told = [f"- {p.release} with torch {p.torch}: {p.note}\n" for p in pairs.known() if p.note]
    yield from ("\n", *told) if told else ()
    yield from _notes(records, "\n", main=False)


def _notes(records: Records, before: str, main: bool) -> Iterator[str]:
    """Why a cell is refused, failed or unknown, for those of which that is known."""
    lines = [
        f"- {release}{'' if main else f' with torch {torch}'}, `{column}`: "
        f"{record.cell.value}: {record.why}\n"
        for (release, torch, column), record in records.of.items()
        if (torch == TORCH) is main and (record.cell is Cell.REFUSED or not record.cell.settled)
    ]
    yield from (before, *lines) if lines else ()
