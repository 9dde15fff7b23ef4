"""bf16 without ZeRO: weights move as plain PyTorch's do."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.training.models import loss_of
from tests.training.options import BF16, Options
from tests.training.run import applied, check, run
from tests.training.stock import RELEASE, Version
from tests.world import World

#: DeepSpeed takes its fp16 optimizer for bf16 there, whose loss scale it does not need.
WRONG = Version("0.17.6") <= RELEASE <= Version("0.18.5")
OPTIONS = Options(stage=0, steps=4, rates=(0.2,), **BF16)


def train(trainer: Any) -> None:
    for step in trainer.steps():
        for micro in range(trainer.options.micro_steps):
            trainer.backward(loss_of(trainer, step, micro))
            trainer.step()


@pytest.mark.core_case
def test_stock_is_wrong(world: World) -> None:
    for found in world.run(run, train, OPTIONS):
        assert found.equal != WRONG, found


@pytest.mark.core_case(clip=0.0)
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("micro_steps", [1, 4])
def test_patched(world: World, micro_steps: int, clip: float) -> None:
    check(world, train, replace(OPTIONS, micro_steps=micro_steps, clip=clip), "accumulation")


def late(trainer: Any) -> None:
    """The patch comes after the engine."""
    with applied("accumulation"):
        train(trainer)


def test_an_engine_that_was_there_before(world: World) -> None:
    check(world, late, OPTIONS, quiet=False)


def resumed(trainer: Any, folder: Path) -> None:
    """Half way it goes on in another engine."""
    for step in trainer.steps():
        if trainer.is_engine and step == 2:
            trainer.folder = folder
            trainer.save()
            trainer.engine = trainer.another().engine
            trainer.load()
        trainer.backward(loss_of(trainer, step))
        trainer.step()


@pytest.mark.core_case
@pytest.mark.xfail(
    Version("0.17.6") <= RELEASE <= Version("0.18.4"),
    reason="stock looks for a ZeRO optimizer: an error, or master weights are not saved",
    strict=True,
)
def test_a_checkpoint(world: World, tmp_path: Path) -> None:
    check(world, partial(resumed, folder=tmp_path), OPTIONS, "accumulation")
