"""What was measured: by one process, and of a row in all its rounds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

from benchmarks.dc_fallback.rows import EAGER, may_fail
from benchmarks.timing import Spread

# Rounding in bf16 is less; not to train is all of it.
_NORM_TOLERANCE = 0.02
# Rounding is some per cent after some steps; a factor that a gradient lacks is 50 per cent or more.
_GRADIENT_TOLERANCE = 0.25


@dataclass
class Peak:
    """MiB allocated at most in one step, and in its forward and backward alone."""

    whole: float
    backward: float

    @classmethod
    def most(cls, peaks: Sequence[Peak]) -> Peak:
        return cls(max(peak.whole for peak in peaks), max(peak.backward for peak in peaks))


@dataclass
class Difference:
    """Of one parameter's training to eager's, each relative to eager's.

    norm: of the norm of what the parameter moved by. AdamW divides the size of a gradient away, so
        it sees a parameter that does not train, and no factor in a gradient.
    update: of the vector of it. AdamW's first steps go by the sign of each element, so rounding
        alone is worth some per cent here.
    gradient: of AdamW's running average of the gradients, which sees any factor.
    """

    norm: float
    update: float
    gradient: float

    @property
    def is_training(self) -> bool:
        return self.norm <= _NORM_TOLERANCE

    @property
    def has_gradients(self) -> bool:
        return self.gradient <= _GRADIENT_TOLERANCE

    @classmethod
    def worst(cls, differences: Iterable[Difference]) -> Difference:
        """Each of the largest; NaN if any is."""
        columns = zip(*map(astuple, differences), strict=True)
        return cls(*(max(one, key=lambda value: (value != value, value)) for one in columns))


@dataclass
class Compilations:
    """As Dynamo counts them."""

    graphs: int
    frames: int
    graph_breaks: int


@dataclass
class Measured:
    """By one process, on rank 0."""

    mode: str
    skipped: str
    error: str | None = None  # the exception that ended it
    provenance: dict[str, str] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)  # of the first steps
    first_peaks: list[Peak] = field(default_factory=list)  # of the same steps
    compilations: Compilations | None = None  # until then
    recompilations: int = 0  # graphs after that
    differences: dict[str, Difference] | None = None  # by parameter; None: not compared
    ms: list[float] = field(default_factory=list)  # of the timed steps
    ms_by_phase: dict[str, float] = field(default_factory=dict)
    host_ms_by_phase: dict[str, float] = field(default_factory=dict)
    peak: Peak | None = None  # of steps after those

    @classmethod
    def read(cls, kept: dict[str, Any]) -> Measured:
        """What ``dataclasses.asdict`` made of one."""
        read = cls(**kept)
        read.first_peaks = [Peak(**peak) for peak in kept["first_peaks"]]
        read.peak = Peak(**kept["peak"]) if kept["peak"] else None
        if kept["compilations"]:
            read.compilations = Compilations(**kept["compilations"])
        if kept["differences"] is not None:
            read.differences = {k: Difference(**v) for k, v in kept["differences"].items()}
        return read


@dataclass
class Row:
    """A mode and how much is skipped, in the rounds that it ran."""

    mode: str
    skipped: str
    rounds: list[Measured] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.mode}, {self.skipped} skipped"

    @property
    def error(self) -> str | None:
        return next((one.error for one in self.rounds if one.error), None)

    @property
    def by_round(self) -> list[float]:
        """The median of each round, ms."""
        return [statistics.median(one.ms) for one in self.rounds if one.ms]

    @property
    def ms(self) -> Spread | None:
        """Of the rounds' medians."""
        return Spread.of(self.by_round) if self.by_round else None

    @property
    def peak(self) -> Peak | None:
        """Of a step like any other."""
        peaks = [one.peak for one in self.rounds if one.peak]
        return Peak.most(peaks) if peaks else None

    @property
    def peak_from_the_first(self) -> Peak | None:
        """Of any step, from the very first."""
        peaks = [peak for one in self.rounds for peak in (*one.first_peaks, one.peak) if peak]
        return Peak.most(peaks) if peaks else None

    @property
    def differences(self) -> dict[str, Difference] | None:
        return next((one.differences for one in self.rounds if one.differences is not None), None)

    @property
    def untrained(self) -> list[str]:
        """The parameters that did not move as far as eager's."""
        return [name for name, one in (self.differences or {}).items() if not one.is_training]

    def plain(self) -> dict[str, Any]:
        rounds = [
            {name: value for name, value in asdict(one).items() if name not in _OF_THE_ROW}
            for one in self.rounds
        ]
        spread = asdict(self.ms) if self.ms else None
        return {"mode": self.mode, "skipped": self.skipped, "ms": spread, "rounds": rounds}

    @classmethod
    def read(cls, kept: dict[str, Any]) -> Row:
        """What `plain` made of one."""
        own = {name: kept[name] for name in ("mode", "skipped")}
        return cls(**own, rounds=[Measured.read(own | one) for one in kept["rounds"]])


# Said once, of all rounds or of the whole run.
_OF_THE_ROW = ("mode", "skipped", "provenance")


def ratios(row: Row | None, base: Row | None) -> list[float]:
    """One row's time over another's, round by round; empty if either was not timed."""
    if row is None or base is None:
        return []
    return [one / other for one, other in zip(row.by_round, base.by_round, strict=False)]


def find(rows: Sequence[Row], mode: str, skipped: str) -> Row | None:
    return next((row for row in rows if (row.mode, row.skipped) == (mode, skipped)), None)


def failures(rows: Sequence[Row]) -> Iterator[str]:
    """Rows that did not do what the table says of them."""
    for row in rows:
        if may_fail(row.mode, row.skipped):
            continue
        if row.error is not None:
            yield f"{row}: {row.error}"
        elif row.differences is None:
            if row.mode != EAGER:
                yield f"{row}: not compared with eager ZeRO-3"
        elif row.untrained:
            yield f"{row}: does not train {', '.join(row.untrained)} as eager ZeRO-3 does"
        elif not (worst := Difference.worst(row.differences.values())).has_gradients:
            yield f"{row}: gradients are off by {worst.gradient}"
