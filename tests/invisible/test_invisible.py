"""Each question is asked on stock and with every patch applied: the same answers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.core.test_in_company import all_patches
from tests.invisible.questions import EVERY, Model, Trained
from tests.training.options import Options
from tests.world import World


def answers(options: Options, patched: bool) -> dict[str, Any]:
    """Of all questions, each to an engine of its own; an error is its class."""
    found: dict[str, Any] = {}
    for name, (question, given) in EVERY.items():
        torch._dynamo.reset()
        with all_patches() if patched else nullcontext():
            try:
                model = Model(given.get("pack", "dict"))
                found[name] = question(Trained(options, model, given.get("before", lambda _: None)))
            except Exception as error:
                found[name] = type(error).__name__
    return found


@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_script_is_answered_as_on_stock(world: World, stage: int, micro_steps: int) -> None:
    options = Options(stage, micro_steps=micro_steps)
    stock, patched = (world.run(answers, options, is_patched) for is_patched in (False, True))
    for here, there in zip(stock, patched, strict=True):
        assert {name: there[name] for name in EVERY if there[name] != here[name]} == {}
