"""Rows of text in aligned columns, and lists of numbers written as spans."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return each row as a line, its columns as wide as the widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (zip(row, widths, strict=True) for row in rows)
    return ["  ".join(cell.ljust(width) for cell, width in row).rstrip() for row in padded]


def spans(values: Sequence[Any], order: Sequence[Any]) -> str:
    """Write values as spans, for example "0, 2-7"; neighbours in `order` are joined."""
    grouped = groupby(enumerate(values), lambda pair: order.index(pair[1]) - pair[0])
    runs = [[value for _, value in run] for _, run in grouped]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
