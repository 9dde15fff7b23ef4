"""Backwards in each other, as cached losses have them: the outer one ends with one reduction."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.coalesce import cases, micro_steps
from tests.coalesce.micro_steps import OFFLOADED, OVERLAP
from tests.collectives import Collectives
from tests.world import World
from tests.zero3_retain import models, trainers
from tests.zero3_retain.test_failure import Boom, Fragile, RaiseInBackward

STAGES = [1, 2, 3]
UPSTREAM = {"flush": "upstream"}


def cached_loss(trainer: Any, step: int, parts: int = 3, failing: int | None = None) -> Tensor:
    """Of a batch in `parts`, whose backwards run in a hook: it has no other gradient.

    failing: the part whose backward raises Boom.
    """
    batches = [models.batch(step, part)[0] for part in range(parts)]
    with torch.no_grad():
        leaves = [trainer.forward(tokens)[1].requires_grad_() for tokens in batches]
    with torch.enable_grad():
        loss = torch.cat(leaves).square().mean()
        gradients = torch.autograd.grad(loss, leaves)

    def backwards(_: Tensor) -> None:
        with torch.enable_grad():
            for part, (tokens, gradient) in enumerate(zip(batches, gradients, strict=True)):
                RaiseInBackward.armed = part == failing
                (trainer.forward(tokens)[1] * gradient).sum().backward()

    outer = loss.detach().requires_grad_()
    outer.register_hook(backwards)
    return 1.0 * outer


def without_a_window(trainer: Any, parts: int = 3) -> None:
    for step in range(3):
        trainer.backward(cached_loss(trainer, step, parts))
        trainer.step()


def in_a_window(trainer: Any, parts: int = 3) -> None:
    """Beside a backward that is an ordinary one."""
    for step in range(3):
        with trainer.window():
            micro_steps.one_backward(trainer, step, 9)
            trainer.backward(cached_loss(trainer, step, parts))
        trainer.step()


def in_no_sync(trainer: Any, parts: int = 3) -> None:
    for step in range(3):
        with trainer.no_sync():
            trainer.backward(cached_loss(trainer, step, parts))
        trainer.backward(cached_loss(trainer, step + 5, parts))
        trainer.step()


def after_another(trainer: Any, parts: int = 3) -> None:
    """What its step has reduced already is added to."""
    for step in range(3):
        micro_steps.one_backward(trainer, step, 9)
        trainer.backward(cached_loss(trainer, step, parts))
        trainer.step()


@pytest.mark.core_case(script=without_a_window, case={})
@pytest.mark.core_case(script=in_a_window, case={}, stage=2)
@pytest.mark.parametrize("script", [without_a_window, in_a_window, in_no_sync, after_another])
@pytest.mark.parametrize(
    ("stage", "case"),
    [
        *((stage, {}) for stage in STAGES),
        *((stage, {"settings": OFFLOADED}) for stage in STAGES),
        *((stage, case) for stage in (1, 2) for case in (UPSTREAM, {"settings": OVERLAP})),
    ],
    ids=str,
)
def test_cached_losses(
    world: World, stage: int, script: cases.Script, case: dict[str, Any]
) -> None:
    if stage == 1 and script is in_no_sync:
        pytest.skip("stock's own leaves gradients on their parameters anyway")
    for result in world.run(micro_steps.outcome, script, stage=stage, **case):
        assert result.equal(), result
        assert not result.heard


def sent(stage: int, script: cases.Script, parts: int) -> Counter[str]:
    """Reductions of three steps."""
    with cases.patched():
        start = models.build(models.TwoHeads)
        trainer = micro_steps.EngineTrainer(trainers.build_engine(start, trainers.config(stage)))
        with Collectives() as collectives:
            script(trainer, parts)
        return Counter({name: n for name, n in collectives.seen.items() if "reduce" in name})


@pytest.mark.core_case(stage=2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_costs_one_reduction(world: World, stage: int) -> None:
    """As many collectives as that of a window, however many backwards are inside."""
    few, many, window = (
        world.run(sent, stage, script, parts)
        for script, parts in ((without_a_window, 2), (without_a_window, 5), (in_a_window, 2))
    )
    assert few == many == window
    assert few[0].total() > 0


def beside_one_of_its_own(trainer: Any, parts: int = 2) -> None:
    """The outer loss has other gradients too, which come before the nested backwards."""
    for step in range(3):
        outer = cached_loss(trainer, step, parts)
        tokens, classes = models.batch(step, 9)
        trainer.backward(outer + sum(models.losses(trainer.forward(tokens), classes)))
        trainer.step()


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="what came before is in the reduce buckets already"
)
@pytest.mark.parametrize("stage", [2, 3])
def test_an_outer_loss_with_gradients_of_its_own(world: World, stage: int) -> None:
    for result in world.run(micro_steps.outcome, beside_one_of_its_own, stage=stage):
        assert result.equal(), result


# --- Beside cached losses ------------------------------------------------------------------------


class Auxiliary(models.TwoHeads):
    """Its forward keeps a loss aside, which is no output."""

    aux: Tensor

    def trunk(self, tokens: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(tokens))
        self.aux = x.square().mean()
        return self.blocks[1](x)


def auxiliary_loss(trainer: Any) -> None:
    for step in range(3):
        with trainer.window():
            tokens, classes = models.batch(step)
            loss = sum(models.losses(trainer.forward(tokens), classes))
            trainer.backward(loss, retain_graph=True)
            engine = getattr(trainer, "engine", None)
            trainer.backward((engine.module if engine else trainer.model).aux)
        trainer.step()


@pytest.mark.parametrize("stage", STAGES)
def test_a_tensor_that_is_no_output_has_a_backward_in_a_window(world: World, stage: int) -> None:
    for result in world.run(outcome_of, Auxiliary, auxiliary_loss, stage, "zero3_retain"):
        assert result.equal(), result
        assert not result.heard


def outcome_of(
    model: type[torch.nn.Module], script: cases.Script, stage: int, *others: str
) -> cases.Outcome:
    return micro_steps.outcome_of(script, models.build(model), stage=stage, others=others)


def fail_and_go_on(trainer: Any, in_window: bool) -> None:
    """Step 1 of 3 is tried, its second nested backward raises, and it is done again."""
    window = trainer.window if in_window else nullcontext
    for step in range(3):
        if step == 1 and isinstance(trainer, micro_steps.EngineTrainer):
            with pytest.raises(Boom), window():
                trainer.backward(cached_loss(trainer, step, failing=1))
            RaiseInBackward.armed = False
            trainer.leaves_nothing()
        with window():
            trainer.backward(cached_loss(trainer, step))
        trainer.step()


@pytest.mark.core_case(stage=2)
@pytest.mark.parametrize("in_window", [False, True], ids=["", "window"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_nested_backward_that_raises(world: World, stage: int, in_window: bool) -> None:
    script = partial(fail_and_go_on, in_window=in_window)
    for result in world.run(outcome_of, Fragile, script, stage):
        assert result.equal(), result
        assert sum("A backward raised" in text for text in result.heard) == 1
        assert sum("gradients were dropped" in text for text in result.heard) == in_window
