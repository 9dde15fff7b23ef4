"""The law, where options and scripts cross."""

from __future__ import annotations

import pytest

from tests.scripts import law
from tests.scripts.crossed import Crossed, all_pairs, cases, pairs
from tests.scripts.worlds import PATCHED, STOCK, Worlds

CASES = cases()


@pytest.mark.exhaustive(apart=True)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case(worlds: Worlds, case: Crossed) -> None:
    stock, patched = (
        worlds.run(case.script, case.stage, way, looks=False, **case.options)
        for way in (STOCK, PATCHED)
    )
    for one in (*stock, *patched):
        one.tolerance = case.tolerance * max(1.0, one.moved)
    if harm := law.harm(stock, patched):
        pytest.fail(harm, pytrace=False)


def test_every_two_choices_meet() -> None:
    met = {pair for case in CASES for pair in pairs(case.row)}
    assert not all_pairs() - met
