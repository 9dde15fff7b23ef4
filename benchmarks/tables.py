"""Markdown tables, and the bars that a benchmark has to stay under."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.timing import Spread


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


def _spread(ratios: Sequence[float]) -> str:
    if not ratios:
        return ""
    if len(ratios) == 1:
        return f" ({rounds(1)})"
    spread = Spread.of(ratios)
    return f" (quartiles {spread.low:.4f} to {spread.high:.4f}, {rounds(spread.count)})"


def rounds(count: int) -> str:
    """How often each row was measured, in words."""
    return "one round" if count == 1 else f"{count} rounds"
