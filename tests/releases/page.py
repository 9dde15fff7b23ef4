"""docs/compatibility.md, from the records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.version import Version

from tests.releases import ROOT, pairs
from tests.releases.at_once import markdown
from tests.releases.cell import Cell
from tests.releases.columns import columns
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

| column | what is replaced |
| --- | --- |
| `dc_fallback` | DeepCompile's C++ and its compiler need a GPU. `tests/dc_fallback/stand_in.py` replaces them. Dynamo and the rest are real. |
| `stream_safety` | A CPU has no streams. `tests/stream_safety/clocks.py` replaces them: its streams run nothing, and a detector tells which work is not ordered. |

## On GPUs

This ran by hand on NVIDIA H200 with torch 2.11.0, on two ranks. What changed after that day was
not run there.

| patch | what ran | on |
| --- | --- | --- |
| [coalesce](benchmarks-coalesce.md#correct-on-gpus) | 0.19.8: 60 of 60 cases equal plain PyTorch | 2026-11-22 |
| [dc_fallback](benchmarks-dc-fallback.md#correct-on-gpus) | with DeepCompile itself; 0.19.2, 0.19.3 and 0.19.8: every script equals plain PyTorch; 0.19.2: 18 of 18 patterns, and 0.19.8: 45 of 45 cases, on 2026-11-21 | 2026-11-23 |
| [stream_safety](benchmarks-stream-safety.md#correct-on-gpus) | with streams that are late; 0.19.8: 22 of 24 cases, and the run ended; 0.18.7 and 0.17.4: 27 of 27 on 2026-11-22 | 2026-11-23 |
| [zero3_retain](benchmarks-zero3-retain.md#correct-on-gpus) | 0.19.8: 46 of 46 cases equal plain PyTorch | 2026-11-22 |

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
"""  # noqa: E501

#: The columns whose tests have something in the place of what needs a GPU; the page says what.
STAND_INS = ("dc_fallback", "stream_safety")


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
        pair_notes="".join(_notes(records, "\n", main=False)),
        commits=markdown(("column", "recorded", "at"), _recorded(records)),
    )


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


def _pairs(records: Records) -> list[tuple[str, str]]:
    """Those that are wanted, and whatever else was recorded with another torch; oldest first."""
    wanted = {(pair.release, pair.torch) for pair in pairs.known()}
    found = {(release, torch) for release, torch, _ in records.of if torch != TORCH}
    return sorted(wanted | found, key=lambda one: tuple(map(Version, one)))


def _when(records: Records) -> str:
    """The days, and every version of what the tests ran with."""
    if not (found := list(records.of.values())):
        return "Nothing yet."
    python, ours = (
        ", ".join(sorted({getattr(record, field) for record in found}))
        for field in ("python", "ds_patches")
    )
    return f"Run {_days(found)}: Python {python}, ds_patches {ours}."


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


def _notes(records: Records, before: str, main: bool) -> Iterator[str]:
    """Why a cell is refused, failed or unknown, for those of which that is known."""
    lines = [
        f"- {release}{'' if main else f' with torch {torch}'}, `{column}`: "
        f"{record.cell.value}: {record.why}\n"
        for (release, torch, column), record in records.of.items()
        if (torch == TORCH) is main and (record.cell is Cell.REFUSED or not record.cell.settled)
    ]
    yield from (before, *lines) if lines else ()
