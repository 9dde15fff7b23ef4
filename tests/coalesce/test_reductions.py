"""A step costs one reduction, and at stages 1 and 2 half of the bytes, left as upstream does."""

from collections import Counter
from itertools import product
from typing import Any

import pytest

from tests import shell
from tests.harness import ALL_REDUCED, OFFLOADED, OVERLAP, Gradients, applied, engine_trainer
from tests.scripts import nested, unsynced, windows
from tests.world import on_ranks

BLOCK = windows.window


def reductions(loop: Any, stage: int, backwards: int, more: dict[str, Any]) -> Counter[str]:
    """Count the reductions of three steps, by operator."""
    if loop is unsynced.stepping_inside:
        more = more | {"micro_steps": backwards}
    with applied("coalesce"):
        trainer = engine_trainer(stage=stage, **more)
        with Gradients() as gradients:
            trainer.train(loop, backwards=backwards)
    return Counter(name for name, _ in gradients.sent)


@on_ranks
@pytest.mark.core_case(loop=BLOCK, more={}, stage=3)
@pytest.mark.core_case(loop=unsynced.unsynced, stage=2)
@pytest.mark.core_case(loop=nested.cached, stage=2)
@pytest.mark.parametrize(
    ("loop", "more", "stage"),
    [
        *product([BLOCK], [{}, OFFLOADED, OVERLAP, ALL_REDUCED], (1, 2, 3)),
        *product([unsynced.unsynced, nested.cached, nested.cached_in_a_window], [{}], (1, 2, 3)),
        *product([unsynced.stepping_inside], [{}], (2, 3)),  # at 1 stock's own refuses step()
    ],
)
def test_a_step_costs_one_reduction(stage: int, loop: Any, more: dict[str, Any]) -> None:
    few, many = (reductions(loop, stage, backwards, more) for backwards in (2, 8))
    assert few == many
    assert few.total() > 0
    stocks = stage == 1 and loop is unsynced.unsynced
    assert stocks or few == reductions(BLOCK, stage, 2, more), "as many as a block's"


@pytest.mark.exhaustive
def test_the_example() -> None:
    """The exit status is 0 if all that `examples.gradcache` prints is right."""
    done = shell.python("-m", "examples.gradcache", "--steps", "4")
    assert (done.returncode, done.stderr) == (0, "")
