"""What a script may do in a block that gathers each parameter once, against plain PyTorch."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.coalesce.loops import BACKWARDS, several_backwards
from tests.coalesce.test_gather_once import (
    MODELS,
    NOT_ONCE,
    ONCE,
    PERSISTENT,
    SMALL_PREFETCH,
    WAYS,
)
from tests.training.models import loss_of
from tests.training.options import OFFLOADED, OFFLOADED_ALL, Options
from tests.training.run import applied, check
from tests.training.trainers import engine_trainer, gathered, worst_difference
from tests.world import World


def holds(world: World, given: dict[str, Any], *others: str, **options: Any) -> None:
    script = partial(several_backwards, **given)
    check(world.within(60), script, Options(3, **options), "coalesce", *others)


@pytest.mark.parametrize("model", ["TwoHeads", *MODELS])
def test_models(world: World, model: str) -> None:
    """By default test_blocks.py has them."""
    holds(world, ONCE, model=model, steps=4)


@pytest.mark.parametrize("more", [OFFLOADED_ALL, OFFLOADED, PERSISTENT, SMALL_PREFETCH], ids=str)
@WAYS
def test_options(world: World, more: dict[str, Any], given: dict[str, Any]) -> None:
    holds(world, given, **more)


@pytest.mark.parametrize("style", ["engine", "torch"])
def test_with_zero3_retain(world: World, style: str) -> None:
    holds(world, ONCE, "zero3_retain", style=style)


def _by_turns(trainer: Any, given: dict[str, Any]) -> None:
    """Blocks that gather once, blocks that do not, and steps without any."""
    for step in trainer.steps():
        kind = step % 3
        with trainer.window(**(given if kind == 0 else NOT_ONCE)) if kind < 2 else nullcontext():
            for index in range(1 if kind == 2 else BACKWARDS):
                trainer.backward(loss_of(trainer, step, index))
        trainer.step()


def _forward_from_before(trainer: Any, given: dict[str, Any]) -> None:
    for step in trainer.steps():
        early = loss_of(trainer, step, 0)
        with trainer.window(**given):
            trainer.backward(early)
            trainer.backward(loss_of(trainer, step, 1))
        trainer.step()


def _backwards_after_all_forwards(trainer: Any, given: dict[str, Any]) -> None:
    for step in trainer.steps():
        with trainer.window(**given):
            for part in range(2):
                for loss in [loss_of(trainer, step, 2 * part + micro) for micro in range(2)]:
                    trainer.backward(loss)
        trainer.step()


def _interrupted(trainer: Any, given: dict[str, Any], do: Any) -> None:
    """Something is done before and after every forward and backward."""
    for step in trainer.steps():
        with trainer.window(**given):
            for index in range(BACKWARDS):
                do(trainer)
                loss = loss_of(trainer, step, index)
                do(trainer)
                trainer.backward(loss)
            do(trainer)
        trainer.step()


def _partition_everything(trainer: Any) -> None:
    if trainer.is_engine:
        trainer.engine.optimizer._partition_all_parameters()


def _read(trainer: Any) -> None:
    with trainer.gathered(trainer.module.blocks.parameters()):
        assert all(param.numel() for param in trainer.module.blocks.parameters())


def _evaluate(trainer: Any) -> None:
    """As GradCache's first pass is without gradients."""
    trainer.module.eval()
    with torch.no_grad():
        loss_of(trainer, 0)
    trainer.module.train()


def _save(folder: Path, trainer: Any) -> None:
    if trainer.is_engine:
        trainer.engine.save_checkpoint(str(folder))


def and_nothing_stays(trainer: Any, script: Any, given: dict[str, Any]) -> None:
    script(trainer, given)
    if trainer.is_engine:
        assert not gathered(trainer.engine, entitled=False)


SCRIPTS: dict[str, Any] = {
    "by turns": _by_turns,
    "forward from before": _forward_from_before,
    "backwards after all forwards": _backwards_after_all_forwards,
    "partition": partial(_interrupted, do=_partition_everything),
    "read": partial(_interrupted, do=_read),
    "evaluate": partial(_interrupted, do=_evaluate),
}


@pytest.mark.core_case(script="read", given={})
@pytest.mark.parametrize("script", SCRIPTS)
@WAYS
def test_what_else_may_happen(world: World, script: str, given: dict[str, Any]) -> None:
    wanted = partial(and_nothing_stays, script=SCRIPTS[script], given=given)
    check(world.within(60), wanted, Options(3, steps=6), "coalesce")


@WAYS
def test_saving_inside(world: World, tmp_path: Path, given: dict[str, Any]) -> None:
    script = partial(_interrupted, do=partial(_save, tmp_path))
    wanted = partial(and_nothing_stays, script=script, given=given)
    check(world.within(60), wanted, Options(3, steps=2), "coalesce")


def written_inside(given: dict[str, Any], by: float) -> dict[str, torch.Tensor]:
    """Where a training ends whose weights change in the middle of its blocks."""
    from deepspeed.runtime.zero import GatheredParameters

    with applied("coalesce"):
        trainer = engine_trainer(stage=3)
        # Not the embedding, which stock up to 0.18.2 has in use from a backward to the step.
        params = list(trainer.module.blocks.parameters())
        for step in trainer.steps():
            with trainer.window(**given):
                for index in range(BACKWARDS):
                    trainer.backward(loss_of(trainer, step, index))
                    with GatheredParameters(params, modifier_rank=0), torch.no_grad():
                        for param in params:
                            param.mul_(by)
            trainer.step()
        return trainer.parameters()


@pytest.mark.core_case(given={})
@WAYS
def test_weights_that_are_written_inside(world: World, given: dict[str, Any]) -> None:
    """As DeepSpeed has it: until the step, which writes its own."""
    for ours, expected, others in zip(
        world.run(written_inside, given, 0.5),
        world.run(written_inside, NOT_ONCE, 0.5),
        world.run(written_inside, given, 1.0),
        strict=True,
    ):
        assert worst_difference(ours, expected)[0] <= 1e-6
        assert worst_difference(ours, others)[0] > 1e-3
