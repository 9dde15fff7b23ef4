"""A step that retains nothing does what stock does; its time is measured in benchmarks/."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.training import stock
from tests.training.models import batch, both_losses
from tests.training.trainers import Parameters, engine_of, engine_trainer
from tests.world import World
from tests.zero3_retain.test_gradients import patched, several_backwards


def ordinary_steps(
    patch: bool, model: str, stage: int, micro_steps: int
) -> tuple[Counter[str], list[list[str]], Parameters]:
    """Collectives of three ordinary steps, what stayed gathered, and where they led.

    A step before them records the prefetch trace. In it, stock keeps a module that is called
    several times gathered from its first backward on; here it is released between its calls.
    """
    with patched() if patch else nullcontext():
        trainer = engine_trainer(model, stage=stage, micro_steps=micro_steps)
        trainer.count = 1
        several_backwards(trainer, backwards=1)
        trainer.count = 3
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            several_backwards(trainer, backwards=1)
        collectives = Counter(
            event.name for event in recorded.events() if event.name.startswith("c10d::")
        )
        return collectives, trainer.available, trainer.parameters()


@pytest.mark.core_case(model="TwoHeads")
@pytest.mark.parametrize(
    ("model", "stage", "micro_steps"),
    [
        ("TwoHeads", 3, 1),
        ("SharedBlock", 3, 2),
        ("Reentrant", 3, 1),
        ("TwoHeads", 2, 2),
        ("TwoHeads", 1, 1),
    ],
)
def test_ordinary_steps_are_stocks_to_the_bit(
    world: World, model: str, stage: int, micro_steps: int
) -> None:
    if stage == 2 and micro_steps > 1 and stock.LOSES_MICRO_STEPS:
        pytest.skip(f"stock {stock.RELEASE} is wrong here: tests/accumulation has it")
    without = world.run(ordinary_steps, False, model, stage, micro_steps)
    mine = world.run(ordinary_steps, True, model, stage, micro_steps)
    for before, after in zip(without, mine, strict=True):
        assert before[0].total() > 0, "no collective was seen: the test looks in the wrong place"
        assert after[0] == before[0]
        assert_no_more_gathered(after[1], before[1])
        for name, value in before[2].items():
            assert torch.equal(after[2][name], value), name


def assert_no_more_gathered(mine: list[list[str]], without: list[list[str]]) -> None:
    """Fewer is fine: up to 0.19.2 stock leaves the first layer gathered after a backward."""
    for names, stocks in zip(mine, without, strict=True):
        assert set(names) <= set(stocks)
    if stock.Version("0.19.3") <= stock.RELEASE:
        assert mine == without


def exceptions_of_others(patch: bool) -> list[str]:
    """Mistakes that have nothing to do with this patch, and what they raise."""
    seen = []
    with patched() if patch else nullcontext():
        engine = engine_of()
        for wrong in (lambda: engine.backward(engine(batch(0)[0])[0]), lambda: twice(engine)):
            try:
                wrong()
            except Exception as error:
                seen.append(f"{type(error).__name__}: {error}"[:80])
    return seen


def twice(engine: Any) -> None:
    """A second backward over a graph that nobody retained."""
    loss = both_losses(engine, 0)[0]
    engine.backward(loss)
    engine.backward(loss)


def test_mistakes_raise_what_they_raise_on_stock(world: World) -> None:
    for without, mine in zip(
        world.run(exceptions_of_others, False), world.run(exceptions_of_others, True), strict=True
    ):
        assert len(mine) == 2
        assert mine[0] == without[0]
        assert "backward through the graph a second time" in mine[1]
