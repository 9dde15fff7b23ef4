"""The recorded results, docs/compatibility.json: one record for each release, torch and column.

A column is the core or a patch. Whatever is asked here is answered from the file and the
registry, without a network.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from packaging.version import Version

from tests.releases import ROOT
from tests.releases.columns import columns, sources

FILE = ROOT / "docs" / "compatibility.json"
#: The torch of the main table, as the Makefile has it; what ran with another one is told apart.
TORCH = "2.13.0"

#: A release, a torch without its local part (+cpu), and a column.
Key = tuple[str, str, str]


class Cell(Enum):
    """One patch, or the core, on one DeepSpeed release."""

    PASS = "pass"
    FIXED_UPSTREAM = "fixed upstream"
    NOT_APPLICABLE = "not applicable"
    REFUSED = "refused"
    FAILED = "failed"
    UNKNOWN = "unknown"

    @property
    def settled(self) -> bool:
        """Whether there is nothing to look into."""
        return self not in (Cell.FAILED, Cell.UNKNOWN)


@dataclass(frozen=True)
class Record:
    """One cell: what was found, and what it was found with.

    why: the gate's reason or the first failing test; empty for a pass.
    supported, fixed_in: the patch's claims at that time; empty for the core.
    sources: digest of what was tested and of its tests.
    commit: what was checked out then; see columns.commit. Empty where nobody noted it.
    """

    release: str
    column: str
    cell: Cell
    why: str
    passed: int
    failed: int
    skipped: int
    seconds: float
    supported: str
    fixed_in: str | None
    date: str
    python: str
    torch: str
    ds_patches: str
    sources: str
    commit: str = ""

    @property
    def key(self) -> Key:
        return self.release, Version(self.torch).public, self.column


@dataclass(frozen=True)
class Records:
    """Everything that was recorded.

    looked_at: the day on which the package index was asked for its releases.
    releases: those known then, oldest first.
    """

    looked_at: str = ""
    releases: tuple[str, ...] = ()
    of: Mapping[Key, Record] = field(default_factory=dict)

    def cell(self, release: str, column: str, torch: str = TORCH) -> Cell:
        record = self.of.get((release, torch, column))
        return record.cell if record else Cell.UNKNOWN

    def outstanding(self, release: str, torch: str = TORCH) -> list[str]:
        """The columns without a settled cell from the sources as they are now."""
        return [
            column
            for column in columns()
            if not self.cell(release, column, torch).settled
            or self.of[release, torch, column].sources != sources(column)
        ]

    def untested(self) -> list[str]:
        """The releases that have an unknown cell in the main table."""
        cells = {release: [self.cell(release, c) for c in columns()] for release in self.releases}
        return [release for release, row in cells.items() if Cell.UNKNOWN in row]

    def knowing(self, found: Iterable[str], looked_at: str) -> Records:
        """The same with the releases that are on the index; none that was known is forgotten."""
        return replace(self, looked_at=looked_at, releases=_oldest_first(*self.releases, *found))

    def adding(self, new: Iterable[Record]) -> Records:
        """The same with new records in the place of old ones, and none of patches that are gone."""
        added = dict(self.of) | {record.key: record for record in new}
        present = columns()
        kept = {key: record for key, record in added.items() if record.column in present}
        known = (*self.releases, *(release for release, _, _ in kept))
        return replace(self, of=kept, releases=_oldest_first(*known))


def load(path: Path = FILE) -> Records:
    """The records in a file; none when there is no such file."""
    if not path.is_file():
        return Records()
    content = json.loads(path.read_text(encoding="utf-8"))
    known = Records(content["index"]["date"], tuple(content["index"]["releases"]))
    return known.adding(Record(**one | {"cell": Cell(one["cell"])}) for one in content["records"])


def save(records: Records, path: Path = FILE) -> None:
    """Write the file, one record to a line so that a diff shows which moved."""
    index = {"date": records.looked_at, "releases": records.releases}
    place = {column: index for index, column in enumerate(columns())}
    order = sorted(records.of, key=lambda k: (k[1] != TORCH, *map(Version, k[:2]), place[k[2]]))
    lines = ",\n".join(json.dumps(_plain(records.of[key])) for key in order)
    write(path, f'{{"index": {json.dumps(index)},\n"records": [\n{lines}\n]}}\n')


def write(path: Path, text: str) -> None:
    """Write a file wholly or not at all: whoever is interrupted finds the old one."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def _plain(record: Record) -> dict[str, Any]:
    return asdict(record) | {"cell": record.cell.value}


def _oldest_first(*releases: str) -> tuple[str, ...]:
    return tuple(sorted(set(releases), key=Version))
