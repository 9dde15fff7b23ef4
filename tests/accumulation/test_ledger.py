"""The ledger: where a release's gradients are wrong, and that they are PyTorch's with the patch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.accumulation import cases
from tests.accumulation.cases import OFFLOADED, Script
from tests.accumulation.ledger import LEDGER, Entry, each_step
from tests.coalesce import micro_steps
from tests.coalesce.micro_steps import one_backward
from tests.world import World
from tests.training import models
from tests.training.stock import RELEASE, Version


def within(first: str, last: str) -> bool:
    return Version(first) <= RELEASE <= Version(last)


def entries(core: tuple[str, ...]) -> pytest.MarkDecorator:
    """The ledger; `core`: the entries that are run on every release, of those that are to be."""
    return pytest.mark.parametrize(
        "entry",
        [
            pytest.param(
                entry,
                id=entry.name,
                marks=[pytest.mark.core_case] if entry.core and entry.id in core else [],
            )
            for entry in LEDGER
        ],
    )


@entries(core=("A1", "A2", "A4"))
def test_stock_is_wrong(world: World, entry: Entry) -> None:
    if not within(entry.first, entry.last):
        pytest.skip(f"stock {RELEASE} is right here")
    for outcome in world.run(cases.run, patch="", **entry.case):
        assert outcome.error or outcome.difference > max(1e-3, cases.ROUNDING[entry.dtype])


@entries(core=tuple(entry.id for entry in LEDGER))
def test_patched_is_pytorch(world: World, entry: Entry) -> None:
    for outcome in world.run(cases.run, **entry.case):
        left = within(*entry.left)
        assert outcome.equal(entry.dtype) or left, outcome
        assert ["leaves this engine to stock" in text for text in outcome.heard] == [True] * left


# --- Where stock is right -------------------------------------------------------------------------


def with_evaluation(trainer: Any) -> None:
    """Forwards that no backward follows, between those that one does."""
    for step in range(3):
        with torch.no_grad():
            trainer(models.batch(7)[0])
        one_backward(trainer, step)
        with torch.no_grad():
            trainer(models.batch(8)[0])
        trainer.step()


def half_of_the_outputs(trainer: Any) -> None:
    """A forward, one of whose outputs leads nowhere, and another that is left alone."""
    for step in range(3):
        trainer(models.batch(step, 7)[0])
        one_backward(trainer, step, only=slice(1) if step % 2 else slice(1, 2))
        one_backward(trainer, step, 1)
        trainer.step()


@pytest.mark.sampled(ways=2)
@pytest.mark.parametrize("settings", [{}, OFFLOADED], ids=["", "offloaded"])
@pytest.mark.parametrize(
    ("script", "gas"),
    [(each_step, 1), (micro_steps.micro_steps, 3), (with_evaluation, 1), (half_of_the_outputs, 1)],
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ordinary_loops(
    world: World, stage: int, script: Script, gas: int, settings: dict[str, Any]
) -> None:
    for outcome in world.run(cases.run, script, stage, micro_steps=gas, settings=settings):
        assert outcome.equal(), outcome
        assert not outcome.heard
