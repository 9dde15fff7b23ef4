"""Every script, at every stage, held to the law."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.scripts import law, page
from tests.scripts.declared import Script, scripts
from tests.scripts.ordinary import one_backward
from tests.scripts.worlds import PATCHED, STOCK, Worlds


@dataclass(frozen=True)
class AtStage:
    """A script at one of its stages; of each theme some are quick."""

    script: Script
    stage: int

    @property
    def theme(self) -> str:
        return self.script.theme

    @property
    def shows(self) -> dict[str, Any]:
        return self.script.at(self.stage).shows | {"stock": self.script.stock[self.stage]}


def each(ranks: int) -> Iterator[Any]:
    for script in scripts():
        for stage in script.grouped if ranks == 4 else script.stock:
            mark = [pytest.mark.exhaustive] if ranks == 4 else []
            case = AtStage(script, stage)
            yield pytest.param(case, ranks, id=f"{script.name}-zero{stage}-{ranks}", marks=mark)


@pytest.mark.parametrize(("case", "ranks"), [*each(2), *each(4)])
def test_a_script(worlds: Worlds, case: AtStage, ranks: int) -> None:
    """By what its declaration says of stock, and the law. Four ranks are two groups of two."""
    script, stage = case.script, case.stage
    stock, patched = (worlds.run(script, stage, way, ranks) for way in (STOCK, PATCHED))
    if complaints := law.complaints(script, stage, stock, patched):
        pytest.fail("\n".join(complaints), pytrace=False)


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
        added.append([ours.calls - its.calls for its, ours in zip(stock, patched, strict=True)])
    small, large = added
    assert all(more <= before for before, more in zip(small, large, strict=True)), added


def test_the_page_is_of_today() -> None:
    assert page.FILE.read_text(encoding="utf-8") == page.text(), "python -m tests.scripts.page"
