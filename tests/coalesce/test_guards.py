"""What a block refuses, and that applying and unapplying leave nothing behind."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import ds_patches
from tests.scripts.nested import cached_loss
from tests.training import leftovers, stock
from tests.training.models import loss_of
from tests.training.options import BF16, BF16_SUMS
from tests.training.run import applied
from tests.training.trainers import engine_of
from tests.world import World


def one_backward(engine: Any, step: int = 0) -> None:
    engine.backward(loss_of(engine, step))


def caught_by(action: Any, *arguments: Any, **named: Any) -> str:
    """The exception's type and text, from entering `action`'s context or calling it."""
    try:
        context = action(*arguments, **named)
        if hasattr(context, "__enter__"):
            with context:
                pass
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refusals_inside(stage: int) -> dict[str, str]:
    with applied("coalesce"):
        engine = engine_of(stage=stage)
        found = {}
        with engine.coalesce_grad_reduction():
            one_backward(engine)
            found["step"] = caught_by(engine.step)
            found["again"] = caught_by(engine.coalesce_grad_reduction)
            found["no_sync"] = caught_by(engine.no_sync)
        engine.step()
        with engine.no_sync():
            found["in no_sync"] = caught_by(engine.coalesce_grad_reduction)
        return found


@pytest.mark.core_case(stage=2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_inside_a_block(world: World, stage: int) -> None:
    """In words that are upstream's too: programs look for them."""
    for found in world.run(refusals_inside, stage):
        assert all(text.startswith("AssertionError") for text in found.values()), found
        assert "engine.step() inside" in found["step"]
        assert "no_sync" in found["step"]
        assert "nested" in found["again"]
        assert "nested in no_sync()" in found["in no_sync"]
        assert stage == 1 or "nested" in found["no_sync"]


def refusal(given: dict[str, Any], **options: Any) -> str:
    with applied("coalesce"):
        return caught_by(engine_of(**options).coalesce_grad_reduction, **given)


UNMANAGED = {"settings": {"managed_gradient_accumulation": False}}
SINCE_0_19_4 = stock.since("0.19.4", "managed_gradient_accumulation")


@pytest.mark.core_case(given={})
@pytest.mark.parametrize(
    ("stage", "more", "given", "says"),
    [
        (0, {}, {}, "NotImplementedError: .* needs ZeRO stage 1, 2 or 3; this engine has 0"),
        (1, BF16_SUMS, {}, "NotImplementedError: .* does not cover "),
        (0, BF16, {}, "NotImplementedError: .* needs ZeRO stage"),
        (2, {}, {"gather_once": True}, "NotImplementedError: gather_once needs ZeRO stage 3"),
        pytest.param(
            2, UNMANAGED, {}, "AssertionError: .* managed_gradient_acc", marks=SINCE_0_19_4
        ),
    ],
    ids=str,
)
def test_engines_that_are_not_covered(
    world: World, stage: int, more: dict[str, Any], given: dict[str, Any], says: str
) -> None:
    for text in world.run(refusal, given, stage=stage, **more):
        assert re.match(says, text), text


def refusal_of_a_kind(attribute: str) -> str:
    """The guard goes by what the engine is, and these cannot be built on a CPU."""
    with applied("coalesce"):
        engine = engine_of(stage=2)
        if attribute == "optimizer":
            engine.optimizer.__class__ = type("SuperOffload", (type(engine.optimizer),), {})
        else:
            setattr(engine, attribute, True)
        return caught_by(engine.coalesce_grad_reduction)


@pytest.mark.parametrize("attribute", ["pipeline_parallelism", "zenflow", "optimizer"])
def test_engines_of_other_kinds(world: World, attribute: str) -> None:
    for text in world.run(refusal_of_a_kind, attribute):
        assert text.startswith("NotImplementedError"), text


#: What stays at an engine that was met, until the patches are taken back.
MET = ("_ds_patches_accumulation", "_ds_patches_coalesce", "reduce_ipg_grads")


def nested(engine: Any) -> None:
    """A backward in a hook of another one."""
    outer = torch.ones((), requires_grad=True)
    outer.register_hook(lambda _: one_backward_of_its_own(engine))
    engine.backward(1.0 * outer)


def one_backward_of_its_own(engine: Any) -> None:
    with torch.enable_grad():
        loss_of(engine, 1).backward()


def ours(engine: Any, before: Any, but: tuple[str, ...] = MET) -> set[str]:
    """By place. Older releases leave an embedding gathered between a backward and the step."""
    left = leftovers.since(before, engine, but=but)
    return {what.split()[0] for what in left if not what.endswith(("gathered", "in use"))}


def lifecycle(stage: int, kind: str) -> list[set[str]]:
    """What is ours at an engine: while gradients stay, after each step, and without patches."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    methods = dict(vars(DeepSpeedEngine))
    engine = engine_of(stage=stage)  # before the patch is applied
    before = leftovers.of(engine)
    found, busy = [], set()
    with applied("coalesce"):
        for step in range(2):
            if kind != "nested":
                with getattr(engine, kind)():
                    one_backward(engine, step)
                    busy = ours(engine, before)
            if kind != "coalesce_grad_reduction":
                nested(engine) if kind == "nested" else one_backward(engine, step)
            engine.step()
            found.append(ours(engine, before))
        with engine.coalesce_grad_reduction():
            one_backward(engine)  # and it is never stepped
    assert dict(vars(DeepSpeedEngine)) == methods
    return [busy, *found, ours(engine, before, but=())]


@pytest.mark.core_case(stage=2)
@pytest.mark.parametrize("kind", ["coalesce_grad_reduction", "no_sync", "nested"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nothing_is_at_the_engine_unless_gradients_stay(
    world: World, stage: int, kind: str
) -> None:
    for busy, *rest in world.run(lifecycle, stage, kind):
        assert rest == [set()] * 3
        if kind != "nested" and (stage > 1 or kind != "no_sync"):
            assert {"engine.step", "engine.backward", "engine.allreduce_gradients"} < busy


def nested_afterwards() -> str:
    """Of an engine that coalesce has met, with accumulation alone."""
    with applied("accumulation", "coalesce"):
        engine = engine_of(stage=2)
        one_backward(engine)
        engine.step()
        ds_patches.unapply("coalesce")
        return caught_by(engine.backward, cached_loss(engine, 1))


def test_taken_back_alone_it_leaves_nested_backwards_to_accumulation(world: World) -> None:
    for text in world.run(nested_afterwards):
        assert "already been reduced" in text
