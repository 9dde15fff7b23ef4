"""The interval arithmetic of benchmarks.stream_safety, against counting ticks."""

from __future__ import annotations

import random

import pytest

from benchmarks.stream_safety.intervals import Interval, intersection, length, union


def ticks(intervals: list[Interval]) -> set[int]:
    return {tick for begin, end in intervals for tick in range(int(begin), int(end))}


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([], []),
        ([(1, 2)], [(1, 2)]),
        ([(3, 4), (1, 2)], [(1, 2), (3, 4)]),
        ([(1, 3), (2, 4)], [(1, 4)]),
        ([(1, 2), (2, 3)], [(1, 3)]),
        ([(1, 9), (2, 3), (4, 5)], [(1, 9)]),
        ([(1, 1), (5, 4)], []),
    ],
)
def test_union(intervals: list[Interval], expected: list[Interval]) -> None:
    assert union(intervals) == expected


@pytest.mark.parametrize(
    ("some", "others", "expected"),
    [
        ([], [(0, 9)], []),
        ([(0, 1)], [(1, 2)], []),
        ([(0, 4)], [(1, 2), (3, 9)], [(1, 2), (3, 4)]),
        ([(0, 2), (3, 5)], [(0, 2), (3, 5)], [(0, 2), (3, 5)]),
        ([(0, 9)], [(2, 3)], [(2, 3)]),
    ],
)
def test_intersection(
    some: list[Interval], others: list[Interval], expected: list[Interval]
) -> None:
    assert intersection(some, others) == expected
    assert intersection(others, some) == expected


def test_lengths_are_the_number_of_ticks() -> None:
    dice = random.Random(0)
    for _ in range(300):
        some, others = (
            [
                (begin, begin + dice.randrange(8))
                for begin in (dice.randrange(40) for _ in range(dice.randrange(8)))
            ]
            for _ in range(2)
        )
        assert length(union(some)) == len(ticks(some))
        shared = intersection(union(some), union(others))
        assert length(shared) == len(ticks(some) & ticks(others))
        assert shared == union(shared)
