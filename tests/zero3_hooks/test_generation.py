"""Hooks that are removed for generation and added again, as TRL and Accelerate do."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scripts import evaluating
from tests.training import stock
from tests.training.run import check, run
from tests.world import World

#: Registering the modules again leaves a trace of their old numbers (pull request 8043).
KEEPS_TRACE = stock.Version("0.19.2") > stock.RELEASE


@pytest.mark.core_case(generating="generation_without_hooks")
@pytest.mark.parametrize(
    "generating", ["generation_without_hooks", "generation_first", "generation_of_the_root"]
)
def test_training_goes_on(world: World, generating: str) -> None:
    script: Any = getattr(evaluating, generating)
    options = script.at(3, steps=3)
    if generating != "generation_of_the_root":
        for one in world.run(run, script, options):
            assert ("pop from an empty deque" in one.error) == KEEPS_TRACE, one
    check(world, script, options, "zero3_hooks")
