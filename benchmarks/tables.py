"""Markdown tables, and the bars that a benchmark has to stay under."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.rows import Row
from benchmarks.timing import median_phases, quartiles

#: A header, and what a row has there.
Column = tuple[str, Callable[[Row], str]]

_MANY = 5  # rounds whose quartiles say something
_LENGTH = 160  # of an error


@dataclass(frozen=True)
class Bar:
    """A ratio or a count and the most it may be; `measured` is None where a part of it was not."""

    name: str
    measured: float | None
    bar: float | None  # None: for comparison only
    detail: str = ""

    @classmethod
    def of_rounds(cls, name: str, ratios: Sequence[float], bar: float | None) -> Bar:
        """The median of the rounds' ratios."""
        rounds = "one round" if len(ratios) == 1 else f"{len(ratios)} rounds"
        detail = f" ({rounds}: {by_round(ratios, 4)})" if ratios else ""
        return cls(name, statistics.median(ratios) if ratios else None, bar, detail)

    @property
    def held(self) -> bool | None:
        if self.measured is None or self.bar is None:
            return None
        return self.measured <= self.bar

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "held": self.held}

    def cells(self) -> tuple[str, ...]:
        # A count has no digits after the point.
        digits = 0 if isinstance(self.measured, int) else 4
        held = {True: "yes", False: "NO", None: "-" if self.bar is None else "not measured"}
        return (
            self.name,
            f"{number(self.measured, digits)}{self.detail}",
            "-" if self.bar is None else f"<= {self.bar}",
            held[self.held],
        )


def markdown(header: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def over(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def off_by(error: float | None) -> str:
    return "-" if error is None else f"{error:.1e}"


def mib(name: str) -> Callable[[Row], str]:
    return lambda row: number(row.get(name), 0)


def phases(blocks: Sequence[dict[str, float]]) -> str:
    """Medians of the rounds' medians, ms."""
    ms = median_phases(blocks) if blocks else {}
    return ", ".join(f"{name} {one:.2f}" for name, one in ms.items()) or "-"


def cell(text: str) -> str:
    """One line that breaks no table."""
    return " ".join(text.split()).replace("|", "/")[:_LENGTH]


def by_round(ratios: Sequence[float], digits: int = 3) -> str:
    """The rounds' ratios: of a few all of them, of many the quartiles."""
    if len(ratios) < _MANY:
        return ", ".join(f"{ratio:.{digits}f}" for ratio in ratios) or "-"
    low, _, high = quartiles(ratios)
    return f"quartiles {low:.{digits}f} to {high:.{digits}f}"


def middle(ratios: Sequence[float], digits: int = 3) -> str:
    """The one rule for a ratio: the median of the rounds', each of two rows of one round."""
    return number(statistics.median(ratios) if ratios else None, digits)
