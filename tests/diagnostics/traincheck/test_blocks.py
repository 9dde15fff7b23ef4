"""What a block has to hold, what it leaves behind, and what else is said."""

from __future__ import annotations

import logging
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import nn

import ds_patches
from tests.diagnostics.traincheck import checked
from tests.diagnostics.traincheck.checked import Verdict
from tests.diagnostics.traincheck.test_verdicts import CUT, STAGES, agreed, check
from tests.harness import models
from tests.harness.options import config
from tests.harness.surroundings import RATE, build_engine, half_precision_allowed
from tests.harness.trainers import parameters
from tests.world import World


@pytest.mark.parametrize("action", ["warn", "report"])
def test_actions_other_than_an_error(world: World, action: str) -> None:
    found = check(world, "cut off", 2, action=action)
    assert list(found.untrained) == CUT
    assert not found.error
    assert len(found.warnings) == (action == "warn")
    assert all("though their modules ran:" in text for text in found.warnings)


def test_another_action_is_an_error() -> None:
    check = ds_patches.train_check(None, action="shout")
    with pytest.raises(ValueError, match="'shout', not one of raise, warn, report"), check:
        pass


def forward(engine: Any) -> None:
    engine(models.batch(0)[0])


def forward_on_one_rank(engine: Any) -> None:
    if torch.distributed.get_rank() == 0:
        forward(engine)


@pytest.mark.core_case(stage=3)
@pytest.mark.parametrize(
    ("stage", "block"),
    [
        *((stage, block) for stage in (1, 3) for block in (checked.step, forward)),
        (2, forward_on_one_rank),  # at stage 3 a forward of one rank alone hangs by itself
    ],
)
def test_a_block_without_a_step_is_an_error(world: World, stage: int, block: Any) -> None:
    found = check(world, "TwoHeads", stage, before=0, micro_steps=2, block=block)
    assert found.error.startswith("NotChecked: no optimizer step was taken inside train_check()")


def overflowing(stage: int, good: int) -> Verdict:
    """A step that overflows on one rank, and `good` ones."""
    settings = {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}
    with half_precision_allowed():
        engine = checked.engine_of("cut off", stage, dtype="float16", settings=settings)

        def block() -> None:
            loss = models.loss_of(engine, 0)
            engine.backward(loss * (float("inf") if torch.distributed.get_rank() else 1.0))
            engine.step()
            for index in range(good):
                checked.step(engine, 1 + index)

        return checked.verdict_of(engine, block)


@pytest.mark.core_case(stage=3)
@pytest.mark.parametrize("good", [0, 1])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_that_overflow_skips_gives_no_verdict(world: World, stage: int, good: int) -> None:
    """A good one beside it gives one."""
    found = agreed(world.run(overflowing, stage, good))
    assert (found.steps, found.skipped, bool(found.error)) == (good, 1, bool(good))
    assert list(found.untrained) == CUT * good
    none = "each step inside train_check() was skipped for overflow: check a later one"
    assert found.warnings == [none] * (1 - good)


def left_behind(stage: int, how: str) -> bool:
    """Whether all is as it was, after a block that ends well or with an error."""
    engine = checked.engine_of("cut off" if how == "untrained" else "TwoHeads", stage)
    checked.step(engine)
    optimizer = engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    if how == "scheduler":  # puts a step of its own on the optimizer
        torch.optim.lr_scheduler.StepLR(inner, 1)

    def traces() -> list[Any]:
        hooks = [list(module._forward_pre_hooks.values()) for module in engine.module.modules()]
        hooks += [[*(param._backward_hooks or ())] for param in engine.module.parameters()]
        inner_hooks = list(inner._optimizer_step_pre_hooks.values())
        return ["step" in vars(optimizer), optimizer.step, inner_hooks, hooks]

    before = traces()
    with suppress(KeyError, ds_patches.NotTrained), ds_patches.train_check(engine):
        assert traces() != before
        checked.step(engine, 1)
        if how == "exception":
            raise KeyError
    return traces() == before


@pytest.mark.core_case(stage=3, how="exception")
@pytest.mark.parametrize("how", ["exception", "untrained", "scheduler"])
@pytest.mark.parametrize("stage", STAGES)
def test_nothing_is_left_behind(world: World, stage: int, how: str) -> None:
    assert world.run(left_behind, stage, how) == [True, True]


def same_training(stage: int) -> bool:
    """Whether checked steps end at the very parameters that unchecked ones end at."""
    ends = []
    for block in (nullcontext, ds_patches.train_check):
        engine = checked.engine_of("TwoHeads", stage)
        for index in range(2):
            with block(engine):
                checked.step(engine, index)
        ends.append(parameters(engine.module))
    return all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


@pytest.mark.parametrize("stage", STAGES)
def test_a_check_changes_no_number(world: World, stage: int) -> None:
    assert world.run(same_training, stage) == [True, True]


def half_of_the_parameters(stage: int) -> Verdict:
    model = models.build("TwoHeads")
    rest = [param for name, param in model.named_parameters() if not name.startswith("rebuild")]
    engine = build_engine(model, config(stage), optimizer=torch.optim.SGD(rest, lr=RATE))
    return checked.verdict_of(engine, lambda: checked.step(engine))


@pytest.mark.parametrize("stage", [0, 2])
def test_parameters_that_the_optimizer_was_not_given(world: World, stage: int) -> None:
    found = agreed(world.run(half_of_the_parameters, stage))
    assert found.idle == dict.fromkeys(["rebuild.weight", "rebuild.bias"], "not in the optimizer")
    assert not found.error


def know_not(engine: Any) -> None:
    engine.optimizer.zenflow = True


def test_an_optimizer_that_cannot_be_looked_into_is_refused(world: World) -> None:
    refused = "NotChecked: train_check() does not cover DeepSpeedZeroOptimizer, zenflow"
    assert check(world, "TwoHeads", 2, change=know_not).error == refused


class HalfCompiled(checked.Branched):
    """The layer runs in a frame that Dynamo skips."""

    @torch.compiler.disable
    def branch(self, x: torch.Tensor) -> torch.Tensor:
        return super().branch(x)


def compiled(model: type[nn.Module]) -> tuple[Verdict, int]:
    """What is said of a compiled model, and how often the check had it compiled again."""
    torch._dynamo.reset()
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    graphs = []
    engine = build_engine(models.build(model), config(1))
    engine.compile(backend=lambda graph, _: graphs.append(graph) or graph)
    for index in range(3):
        checked.step(engine, index)
    assert graphs
    graphs.clear()
    found = checked.verdict_of(engine, lambda: checked.step(engine, 3))
    checked.step(engine, 4)
    return found, len(graphs)


@pytest.mark.parametrize("model", [HalfCompiled, checked.Branched])
def test_what_does_not_train_is_named_in_a_compiled_model_too(
    world: World, model: type[nn.Module]
) -> None:
    unseen = "in a compiled module, where it is not seen to run"
    for found, again in world.within(200).run(compiled, model):
        assert found.untrained == dict.fromkeys(CUT, "" if model is HalfCompiled else unseen)
        assert not again, "the check has made Dynamo compile again"
