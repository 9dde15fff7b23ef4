"""Markdown tables, and the bars that a benchmark has to stay under."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.timing import Spread

#: Rounds whose quartiles say something.
_MANY = 5


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
        return cls(name, statistics.median(ratios) if ratios else None, bar, _spread(ratios))

    @property
    def held(self) -> bool | None:
        if self.measured is None or self.bar is None:
            return None
        return self.measured <= self.bar

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "held": self.held}


def bars_table(against: str, bars: Iterable[Bar]) -> str:
    body = [
        (
            bar.name,
            f"{_measured(bar)}{bar.detail}",
            "-" if bar.bar is None else f"<= {bar.bar}",
            _word(bar),
        )
        for bar in bars
    ]
    return markdown((against, "measured", "bar", "held"), body)


def markdown(header: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def over(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def cell(text: str) -> str:
    """One line that breaks no table."""
    return " ".join(text.split()).replace("|", "/")


def _measured(bar: Bar) -> str:
    """A count has no digits after the point."""
    return str(bar.measured) if isinstance(bar.measured, int) else number(bar.measured, 4)


def _word(bar: Bar) -> str:
    if bar.measured is None:
        return "not measured"
    return {True: "yes", False: "NO", None: "-"}[bar.held]


def by_round(ratios: Sequence[float], digits: int = 3) -> str:
    """The rounds' ratios: of a few all of them, of many the quartiles."""
    if len(ratios) < _MANY:
        return ", ".join(f"{ratio:.{digits}f}" for ratio in ratios) or "-"
    spread = Spread.of(ratios)
    return f"{spread.low:.{digits}f} to {spread.high:.{digits}f}"


def middle(ratios: Sequence[float], digits: int = 3) -> str:
    """The one rule for a ratio: the median of the rounds', each of two rows of one round."""
    return number(statistics.median(ratios) if ratios else None, digits)


def _spread(ratios: Sequence[float]) -> str:
    if not ratios:
        return ""
    if len(ratios) == 1:
        return f" ({rounds(1)})"
    what = "quartiles " if len(ratios) >= _MANY else ""
    return f" ({rounds(len(ratios))}: {what}{by_round(ratios, 4)})"


def rounds(count: int) -> str:
    """How often each row was measured, in words."""
    return "one round" if count == 1 else f"{count} rounds"
