"""The quick run's few cases show what the product shows."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.quick.sampling import Case, cover, shown

PRODUCT: list[Case] = [tuple(zip("abc", c, strict=True)) for c in product("123", "tuvwxyz", "ab")]


@pytest.mark.parametrize(("ways", "most"), [(1, 7), (2, 24), (3, 42), (9, 42)])
def test_few_cases_show_every_combination(ways: int, most: int) -> None:
    chosen = cover(PRODUCT, ways)
    seen = set().union(*(combinations(PRODUCT[i], min(ways, 3)) for i in chosen))
    assert seen == set().union(*(combinations(case, min(ways, 3)) for case in PRODUCT))
    assert len(chosen) <= most


def test_what_is_taken_in_any_event_counts() -> None:
    begin = [0, len(PRODUCT) - 1]
    chosen = cover(PRODUCT, 1, begin)
    assert set(begin) <= set(chosen)
    assert len(chosen) == 7, "both are among the seven that the largest parameter needs"


def test_no_case_is_chosen_for_nothing() -> None:
    for ways in (1, 2):
        chosen = cover(PRODUCT, ways)
        for one in chosen[-1:]:
            others = set().union(*(shown(PRODUCT[i], ways) for i in chosen if i != one))
            assert shown(PRODUCT[one], ways) - others
