"""Each question is asked on stock and with every patch applied: the same answers."""

from contextlib import nullcontext
from typing import Any

import pytest

from tests.core.test_in_company import all_patches
from tests.harness import Options, World
from tests.invisible.questions import EVERY, Trained


def answers(options: Options, is_patched: bool) -> dict[str, Any]:
    """Return the answers to all questions, each of an engine of its own; an error is its class."""
    by_question: dict[str, Any] = {}
    for name, (ask, *arguments) in EVERY.items():
        with all_patches() if is_patched else nullcontext():
            try:
                by_question[name] = ask(Trained(options, *arguments))
            except Exception as error:
                by_question[name] = type(error)
    return by_question


@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_script_is_answered_as_on_stock(world: World, stage: int, micro_steps: int) -> None:
    case = answers, Options(stage, micro_steps=micro_steps)
    both = (world.within(240).run(*case, is_patched) for is_patched in (False, True))
    for stock, patched in zip(*both, strict=True):
        others = {name: stock[name] for name in EVERY if patched[name] != stock[name]}
        only_stock_fails = (n for n in others if "autograd" in n and isinstance(others[n], type))
        assert {*others} == {name for name in only_stock_fails if patched[name] is True}
