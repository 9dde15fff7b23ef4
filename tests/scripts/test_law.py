"""Every script, at every stage, held to the law; what is yet to be mended is marked strictly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.scripts import law
from tests.scripts.declared import Script, scripts
from tests.scripts.ordinary import one_backward
from tests.scripts.worlds import PATCHED, STOCK, Worlds


@dataclass(frozen=True)
class Case:
    script: Script
    stage: int

    @property
    def theme(self) -> str:
        return self.script.theme

    @property
    def shows(self) -> dict[str, Any]:
        return self.script.at(self.stage).shows | {"stock": self.script.stock[self.stage]}


def cases(ranks: int) -> Iterator[Any]:
    for script in scripts():
        for stage in script.grouped if ranks == 4 else script.stock:
            yield pytest.param(Case(script, stage), id=f"{script.name}-zero{stage}")


@pytest.mark.parametrize("case", [*cases(2)])
def test_two_ranks(worlds: Worlds, case: Case) -> None:
    hold(worlds, case, 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [*cases(4)])
def test_two_groups_of_two_ranks(worlds: Worlds, case: Case) -> None:
    hold(worlds, case, 4)


def hold(worlds: Worlds, case: Case, ranks: int) -> None:
    """To what its declaration says of stock, and to the law but for what it marks."""
    script, stage = case.script, case.stage
    stock, patched = (worlds.run(script, stage, way, ranks) for way in (STOCK, PATCHED))
    if found := law.complaints(script, stage, stock, patched):
        pytest.fail("\n".join(found), pytrace=False)
    if awaits := script.awaits.get(stage):
        pytest.xfail("; ".join(f"{kind}: {why}" for kind, why in awaits.items()))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_patches_add_to_a_step_does_not_grow_with_the_model(
    worlds: Worlds, stage: int
) -> None:
    """`Deep` has three times the parameters of `TwoHeads`, and one reduce bucket as well."""
    added = []
    bucket = {"reduce_bucket_size": 10**6}
    for model in ("TwoHeads", "Deep"):
        stock, patched = (
            worlds.run(one_backward, stage, way, model=model, zero=bucket)
            for way in (STOCK, PATCHED)
        )
        assert stock[0].calls > 1000, "nothing was counted"
        added.append([more.calls - one.calls for one, more in zip(stock, patched, strict=True)])
    small, large = added
    assert all(more <= one for one, more in zip(small, large, strict=True)), added


def test_marks_are_of_what_there_is() -> None:
    for script in scripts():
        assert {*script.grouped, *script.awaits} <= {*script.stock}, script.name
        for awaits in script.awaits.values():
            assert {*awaits} <= {*law.KINDS}, script.name
            assert all(awaits.values()), f"{script.name} does not say why"
