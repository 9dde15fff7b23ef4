"""Text in columns, and spans of what is listed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return each row as a line, its columns as wide as the widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (zip(row, widths, strict=True) for row in rows)
    return ["  ".join(cell.ljust(width) for cell, width in row).rstrip() for row in padded]


def spans(some: Sequence[Any], every: Sequence[Any]) -> str:
    """Name some of an ordered whole, neighbours in it by the first and the last: "0, 2-7"."""
    ordered = groupby(enumerate(some), lambda at_one: every.index(at_one[1]) - at_one[0])
    runs = [[one for _, one in run] for _, run in ordered]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
