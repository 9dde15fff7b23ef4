"""Intervals of time: their union, what two sets of them share, and how long they are.

Plain Python. What `union` and `intersection` return is disjoint and in order, and `intersection`
and `length` want it so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

#: Where it begins and where it ends.
Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Those that overlap or touch become one; those without a length are left out."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def intersection(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The time that lies in both."""
    shared: list[Interval] = []
    i = j = 0
    while i < len(some) and j < len(others):
        begin = max(some[i][0], others[j][0])
        end = min(some[i][1], others[j][1])
        if begin < end:
            shared.append((begin, end))
        # The one that ends first meets nothing that comes later.
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return shared


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
