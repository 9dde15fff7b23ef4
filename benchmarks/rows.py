"""A row of a benchmark: what tells it from the others, and what was measured of it on rank 0."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.timing import Block

#: As a benchmark keeps it.
Run = Mapping[str, Any]

_TIMES = Block._fields


@dataclass
class Row:
    """`of`: what tells it from the others. `found`: what was read beside its times, as in JSON."""

    of: dict[str, Any]
    error: str | None = None  # the exception that ended it
    ms: list[list[float]] = field(default_factory=list)  # of every timed step, by round
    ms_by_phase: list[dict[str, float]] = field(default_factory=list)  # medians, by round
    host_ms_by_phase: list[dict[str, float]] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.of[name]

    def get(self, name: str) -> Any:
        """What was found, or None."""
        return self.found.get(name)

    @property
    def median(self) -> float | None:
        """Milliseconds, of every timed step."""
        steps = [ms for block in self.ms for ms in block]
        return statistics.median(steps) if steps else None

    @property
    def by_round(self) -> list[float]:
        """The median of each round."""
        return [statistics.median(block) for block in self.ms]

    def take(self, block: Block) -> None:
        """The steps of one round."""
        for name in _TIMES:
            getattr(self, name).append(getattr(block, name))

    def add(self, process: Mapping[str, Any]) -> None:
        """What a process kept of this row: lists, with a value for its one round."""
        for name in _TIMES:
            getattr(self, name).extend(process[name])
        for name in process.keys() - {*self.of, *_TIMES, "error"}:
            self.found.setdefault(name, []).extend(process[name])

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        times = {name: getattr(self, name) for name in _TIMES}
        return {**self.of, "error": self.error, **times, **self.found}

    @classmethod
    def read(cls, kept: Mapping[str, Any], keys: Sequence[str]) -> Row:
        """What `plain` made of one, `keys` in its `of`."""
        rest = {name: value for name, value in kept.items() if name not in keys}
        times = {name: rest.pop(name) for name in _TIMES}
        return cls({key: kept[key] for key in keys}, rest.pop("error"), **times, found=rest)


def find(rows: Sequence[Row], **of: Any) -> Row | None:
    """The first that is so."""
    return next((row for row in rows if row.of.items() >= of.items()), None)


def like(rows: Sequence[Row], row: Row, **but: Any) -> Row | None:
    """The one that differs from `row` in nothing but this."""
    return find(rows, **{**row.of, **but})


def groups(rows: Sequence[Row], name: Callable[[Row], str]) -> Iterator[tuple[str, list[Row]]]:
    """Those of one name, in the order of the first of each."""
    for one in dict.fromkeys(map(name, rows)):
        yield one, [row for row in rows if name(row) == one]


def ratios(row: Row | None, base: Row | None) -> list[float]:
    """One row's median over another's, round by round; empty if either was not timed."""
    if row is None or base is None:
        return []
    if "ratios" in row.found:  # all that at_rest kept until 2026-11-22
        return list(row.found["ratios"])
    return [one / other for one, other in zip(row.by_round, base.by_round, strict=False)]
