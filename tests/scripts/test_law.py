"""Every script, at every stage, held to the law; what is yet to be mended is marked strictly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.scripts import law
from tests.scripts.declared import TOPICS, Script, scripts
from tests.scripts.measured import PATCHED, STOCK
from tests.scripts.worlds import Worlds


def _cases(ranks: int) -> Iterator[Any]:
    for script in scripts():
        for stage in script.grouped if ranks == 4 else script.stock:
            quick = stage in script.quick and ranks == 2
            marks = [] if quick else [pytest.mark.exhaustive]
            yield pytest.param(script, stage, id=f"{script.name}-zero{stage}", marks=marks)


@pytest.mark.parametrize(("script", "stage"), [*_cases(2)])
def test_two_ranks(worlds: Worlds, script: Script, stage: int) -> None:
    hold(worlds, script, stage, 2)


@pytest.mark.parametrize(("script", "stage"), [*_cases(4)])
def test_two_groups_of_two_ranks(worlds: Worlds, script: Script, stage: int) -> None:
    hold(worlds, script, stage, 4)


def hold(worlds: Worlds, script: Script, stage: int, ranks: int) -> None:
    """To what its declaration says of stock, and to the law but for what it marks."""
    stock, patched = (worlds.run(script, stage, way, ranks) for way in (STOCK, PATCHED))
    if found := law.complaints(script, stage, stock, patched):
        pytest.fail("\n".join(found), pytrace=False)
    if awaits := script.awaits.get(stage):
        pytest.xfail(", ".join(f"{kind} awaits {topic}" for kind, topic in awaits.items()))


def test_marks_are_of_what_there_is() -> None:
    for script in scripts():
        assert {*script.quick, *script.grouped, *script.awaits} <= {*script.stock}, script.name
        for awaits in script.awaits.values():
            assert {*awaits} <= {*law.KINDS}, script.name
            for topics in awaits.values():
                assert {*topics.split(", ")} <= {*TOPICS}, script.name
