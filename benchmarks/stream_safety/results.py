"""What was measured of a row, on rank 0."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.stream_safety.agreement import Agreement
from benchmarks.stream_safety.rows import PATCHED, PHASES, STOCK, name_of
from benchmarks.stream_safety.trace import Shares
from benchmarks.timing import Spread, StepTimes, median_phases

# bf16 rounds to 4e-3; a lost or doubled gradient is off by its own size.
_TOLERANCE = 2e-2


@dataclass
class Result:
    """A row of a batch size, a bucket size and a number of micro steps.

    gradient_error: to plain PyTorch's. gradients, end: against overlap_comm=false of the same
    stage; None for that row itself.
    """

    stage: int
    overlap: bool
    mode: str
    batch: int
    reduce_bucket_size: int
    micro_steps: int = 1
    error: str | None = None  # the exception that ended it
    ms: list[list[float]] = field(default_factory=list)  # of every timed step, by round
    ms_by_phase: list[dict[str, float]] = field(default_factory=list)  # medians, by round
    host_ms_by_phase: list[dict[str, float]] = field(default_factory=list)
    peak_mib: float | None = None
    gradient_error: float | None = None
    gradients: Agreement | None = None
    end: Agreement | None = None
    trace: dict[str, Shares] | None = None  # by phase

    def __str__(self) -> str:
        return f"{self.name} {self.mode}, {self.where}"

    @property
    def name(self) -> str:
        return name_of(self.stage, self.overlap)

    @property
    def where(self) -> str:
        one = f"batch {self.batch}, bucket {self.reduce_bucket_size:,}"
        return one if self.micro_steps == 1 else f"{one}, {self.micro_steps} micro steps"

    @property
    def patched(self) -> bool:
        return self.mode == PATCHED

    @property
    def spread(self) -> Spread | None:
        """Of every timed step."""
        totals = [ms for block in self.ms for ms in block]
        return Spread.of(totals) if totals else None

    @property
    def by_round(self) -> list[float]:
        """The median of each round."""
        return [statistics.median(block) for block in self.ms]

    @property
    def phases(self) -> dict[str, float]:
        """Medians of the rounds' medians."""
        return median_phases(self.ms_by_phase) if self.ms_by_phase else {}

    @property
    def whole(self) -> Shares | None:
        """Of the traced step."""
        return Shares.total([self.trace[name] for name in PHASES]) if self.trace else None

    @property
    def differing(self) -> int | None:
        """The elements that are not the reference's to the bit, in all that was compared."""
        compared = (self.gradients, self.end)
        if any(one is None for one in compared):
            return None
        return sum(one.differing for one in compared if one is not None)

    def take(self, block: Sequence[StepTimes]) -> None:
        """The steps of one round."""
        self.ms.append([step.total for step in block])
        self.ms_by_phase.append(median_phases([step.phases for step in block]))
        self.host_ms_by_phase.append(median_phases([step.host for step in block]))

    def fail(self, error: Exception) -> None:
        """The first exception is the one that counts."""
        self.error = self.error or f"{type(error).__name__}: {error}"

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, kept: dict[str, Any]) -> Result:
        """What `plain` made of one."""
        read = cls(**kept)
        read.gradients = Agreement(**kept["gradients"]) if kept["gradients"] else None
        read.end = Agreement(**kept["end"]) if kept["end"] else None
        if kept["trace"]:
            read.trace = {name: Shares(**one) for name, one in kept["trace"].items()}
        return read


def groups(results: Sequence[Result]) -> Iterator[tuple[str, list[Result]]]:
    """Those of a batch size, a bucket size and a number of micro steps, by their name."""
    for where in dict.fromkeys(result.where for result in results):
        yield where, [result for result in results if result.where == where]


def stock_of(results: Sequence[Result], like: Result) -> Result | None:
    """What `like` is compared with."""
    return find(results, like.where, like.stage, like.overlap, STOCK)


def find(
    results: Sequence[Result], where: str, stage: int, overlap: bool, mode: str
) -> Result | None:
    wanted = (where, stage, overlap, mode)
    return next((r for r in results if (r.where, r.stage, r.overlap, r.mode) == wanted), None)


def ratios(result: Result | None, base: Result | None) -> list[float]:
    """One row's time over another's, round by round; empty if either was not timed."""
    if result is None or base is None:
        return []
    return [one / other for one, other in zip(result.by_round, base.by_round, strict=False)]


def failures(results: Sequence[Result]) -> Iterator[str]:
    """Rows that did not run, or whose gradients are not those of plain PyTorch."""
    for result in results:
        error = result.gradient_error
        if result.error is not None:
            yield f"{result}: {result.error}"
        elif error is None or math.isnan(error) or error > _TOLERANCE:
            yield f"{result}: gradients are off by {error}"
