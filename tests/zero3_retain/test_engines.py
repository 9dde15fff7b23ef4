"""Engines of all ages: built before the patch, used after it, stock again, and after failures."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

import ds_patches
from ds_patches.core.errors import Refused
from tests.harness import Case, World, at, cases, check, leftovers, of, stock, trains
from tests.harness.models import backward_that_raises, both_losses, loss_of
from tests.harness.options import Options
from tests.harness.trainers import engine_of, engine_trainer
from tests.scripts import evaluating
from tests.world import on_ranks
from tests.zero3_retain.test_gradients import patched, several_backwards

retained = partial(of, "zero3_retain")


def of_all_ages(trainer: Any, late: bool) -> None:
    """Two steps with the patch, and two of stock's own, in which nothing of it is there.

    late: it comes after the engine and its first forward, and anew in each step.
    """
    loss_of(trainer, 0)
    for step in trainer.steps():
        if trainer.is_engine and step == 2:
            ds_patches.unapply_all()
            assert not [what for what in leftovers.of(trainer.engine) if "is ours" in what]
        with patched() if trainer.is_engine and late and step < 2 else nullcontext():
            first, second = both_losses(trainer, step)
            if step < 2:
                trainer.backward(first, retain_graph=True)
                trainer.backward(second)
            else:
                trainer.backward(first + second)
            trainer.step()


@pytest.mark.core_case(late=True)
@pytest.mark.parametrize("late", [False, True])
def test_engines_of_all_ages(world: World, late: bool) -> None:
    script, patches = partial(of_all_ages, late=late), () if late else ("zero3_retain",)
    for outcome in check(world, script, Options(steps=4), *patches, quiet=False):
        assert any("built before" in text for text in outcome.said) == late


@on_ranks
@pytest.mark.skipif(not stock.TORCH_STYLE, reason="engine.scale came with 0.18.3")
def test_scale_accepts_the_argument_of_pull_request_8135() -> None:
    with patched():
        engine = engine_of()
        loss = both_losses(engine, 0)[0]
        assert torch.equal(engine.scale(loss, retain_graph=True), loss)


@pytest.mark.skipif(
    stock.Version("0.19.2") > stock.RELEASE,
    reason="stock's own trace does not survive it before 0.19.2: 'pop from an empty deque'",
)
@trains("zero3_retain", at(3))
def test_hooks_set_again(trainer: Any) -> None:
    """Libraries remove ZeRO-3's module hooks and set them again, around generation."""
    loss_of(trainer, 0)
    with evaluating.without_hooks(trainer):
        pass
    if trainer.is_engine:
        trainer.note()
    trainer.train(several_backwards)


# --- A backward that raises half way --------------------------------------------------------------


def fail_and_go_on(trainer: Any, step: int, *, failing: int) -> None:
    """Step 1 of 3 meets a failure at its backward number `failing`; then it is run again.

    The reference takes the same steps and no failure.
    """
    if trainer.is_engine and step == 1:
        losses = both_losses(trainer, step)
        for loss in losses[: failing - 1]:
            trainer.backward(loss, retain_graph=True)
        backward_that_raises(trainer, losses[failing - 1])
        if trainer.style == "engine":  # else nobody has heard of it yet
            trainer.leaves_nothing()
    first, second = both_losses(trainer, step)
    trainer.backward(first, retain_graph=True)
    trainer.backward(second)


@cases(
    *(
        retained(
            partial(fail_and_go_on, failing=failing),
            2,
            3,
            core={2, 3} if failing == 2 else (),
            model="Fragile",
            style=style,
        )
        for failing in (1, 2)
        for style in ("engine", "torch")
    )
)
def test_the_next_step_is_as_if_it_had_not_happened(world: World, case: Case) -> None:
    for outcome in case.check(world, says=None):
        assert not any(outcome.available[-4:]), "parameters stayed gathered"


@on_ranks
@pytest.mark.parametrize("style", stock.STYLES)
def test_a_step_without_a_backward_since_is_refused(style: str) -> None:
    with patched():
        trainer = engine_trainer("Fragile", style=style)
        backward_that_raises(trainer, both_losses(trainer, 0)[0])
        with pytest.raises(Refused, match="Run forward and backward again"):
            trainer.step()


@on_ranks
@pytest.mark.core_case
@pytest.mark.parametrize("first_of_its_forward", [False, True], ids=["second", "first"])
def test_a_backward_over_parameters_that_are_gone_is_refused(first_of_its_forward: bool) -> None:
    """PyTorch refuses too: 'modified by an inplace operation'."""
    with patched():
        engine = engine_of()
        first, second = both_losses(engine, 0)
        if first_of_its_forward:
            first, _ = both_losses(engine, 0)
        engine.backward(first, retain_graph=True)
        engine.step()
        with pytest.raises(Refused, match=r"over a forward from before engine\.step\(\)"):
            engine.backward(second)


@on_ranks
@pytest.mark.core_case
def test_a_backward_over_a_parameter_that_was_changed_is_refused() -> None:
    from deepspeed.runtime.zero import GatheredParameters

    with patched():
        engine = engine_of()
        first, second = both_losses(engine, 0)
        engine.backward(first, retain_graph=True)
        weight = engine.module.blocks[1].down.weight
        with GatheredParameters([weight], modifier_rank=0), torch.no_grad():
            weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            engine.backward(second)


@trains("zero3_retain", at(3))
def test_two_engines(trainer: Any) -> None:
    """Their backwards interleave, as a generator's and a critic's do."""
    both = trainer, trainer.another()
    for step in trainer.steps():
        losses = [both_losses(trained, step) for trained in both]
        for index in (0, 1):
            for trained, pair in zip(both, losses, strict=True):
                trained.backward(pair[index], retain_graph=index == 0)
        for trained in both:
            trained.step()
