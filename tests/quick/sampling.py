"""Which cases of a parametrised test `make test` runs: few that show every value, or every pair.

`make test-all` runs the product. What a product adds is a defect that needs three values at once,
or, of two, one that is not among the chosen pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

#: What a case is made of: parameters and their values, as texts.
Case = tuple[tuple[str, str], ...]


def shown_by(params: Mapping[str, Any]) -> Case:
    """What the parameters of a case show: each its value, or all that it says that it shows."""
    values: list[tuple[str, str]] = []
    for name, value in params.items():
        shows = getattr(value, "shows", None)
        values += [(name, repr(value))] if shows is None else [*map(_as_texts, shows.items())]
    return tuple(sorted(values))


def _as_texts(item: tuple[str, Any]) -> tuple[str, str]:
    return item[0], repr(item[1])


def shown(case: Case, ways: int) -> set[Case]:
    """The combinations of so many values that one case shows."""
    return set(combinations(sorted(case), min(ways, len(case))))


def cover(cases: Sequence[Case], ways: int, begin: Iterable[int] = ()) -> list[int]:
    """Indices of few cases that together show what all of them do, the most telling first.

    ways: 1 for every value, 2 for every pair of values of two parameters.
    begin: cases that are taken in any event, before the others.
    """
    missing = set().union(*(shown(case, ways) for case in cases))
    chosen = list(begin)
    for index in chosen:
        missing -= shown(cases[index], ways)
    while missing:
        # The first of the best: the same choice in every run and on every worker.
        best = max(range(len(cases)), key=lambda i: (len(missing & shown(cases[i], ways)), -i))
        chosen.append(best)
        missing -= shown(cases[best], ways)
    return chosen
