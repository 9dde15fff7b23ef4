"""Which cases of a test that starts processes are quick: few, that show as many values as can be.

They are those of the core, and at least two, the most telling. All cases of a test that is marked
`milliseconds` are quick: they run on ranks that are there already, and build no engine.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

#: Cases of a test that are quick, where the core has no more.
FEW = 2
#: The fixtures whose tests start processes, or run on ranks.
WORLDS = ("world", "worlds", "fresh_world", "three", "four")
INTERPRETERS = ("environment", "own", "installed", "hooked", "place")
STARTING = frozenset((*WORLDS, *INTERPRETERS))

#: What a case is made of: parameters and their values, as texts.
Case = tuple[tuple[str, str], ...]


def shown_by(params: Mapping[str, Any]) -> Case:
    """Return the values that the parameters of a case show, or what they say that they show."""
    values: list[tuple[str, str]] = []
    for name, value in params.items():
        shows = getattr(value, "shows", None)
        shown = {name: value} if shows is None else shows
        values += [(what, repr(part)) for what, part in shown.items()]
    return tuple(sorted(values))


def mark(items: Iterable[pytest.Item]) -> None:
    """Mark all but few cases of each test as exhaustive; those of the core are among the few."""
    cases: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for item in items:
        if _is_sampled(item):
            cases[_test_of(item)].append(item)
    for test in cases.values():
        values = [shown_by(item.callspec.params) for item in test]
        core = [index for index, item in enumerate(test) if item.get_closest_marker("core_case")]
        for index in set(range(len(test))) - set(few_of(values, core)):
            test[index].add_marker("exhaustive")


def _is_sampled(item: Any) -> bool:
    decided = any(map(item.get_closest_marker, ("exhaustive", "milliseconds")))
    return not decided and hasattr(item, "callspec") and not STARTING.isdisjoint(item.fixturenames)


def _test_of(item: Any) -> tuple[str, str]:
    """And the theme of a script, which is one of many tests in one."""
    themes = [getattr(value, "theme", "") for value in item.callspec.params.values()]
    return item.nodeid.partition("[")[0], "".join(themes)


def few_of(cases: Sequence[Case], core: Sequence[int]) -> list[int]:
    """Indices of the core cases, and of the most telling others until there are few."""
    chosen = [*core]
    while len(chosen) < min(FEW, len(cases)):
        shown = {value for index in chosen for value in cases[index]}
        left = set(range(len(cases))) - set(chosen)
        # The first of the best: the same choice in every run and on every worker.
        chosen.append(max(left, key=lambda index: (len({*cases[index]} - shown), -index)))
    return chosen
