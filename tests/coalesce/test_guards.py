"""Refusals of a block; applying and unapplying leave nothing behind."""

from contextlib import nullcontext
from inspect import signature
from typing import Any

import pytest
import torch

import ds_patches
from ds_patches.core.errors import Misused, NotCovered, Refused
from ds_patches.upstream import zero3
from tests.harness import (
    BF16,
    BF16_SUMS,
    STAGES,
    applied,
    engine_of,
    leftovers,
    on_ranks,
    stock,
)
from tests.harness.models import loss_of
from tests.scripts.nested import cached_loss


def enter(context: Any) -> None:
    with context:
        pass


@on_ranks
@pytest.mark.core_case(stage=2)
@STAGES
def test_inside_a_block(stage: int) -> None:
    """In words that are upstream's too: programs look for them."""
    with applied("coalesce"):
        engine = engine_of(stage=stage)
        with engine.coalesce_grad_reduction():
            engine.backward(loss_of(engine, 0))
            with pytest.raises(Misused, match=r"engine\.step\(\) inside .*no_sync"):
                engine.step()
            with pytest.raises(Misused, match="nested"):
                enter(engine.coalesce_grad_reduction())
            words = "" if stage == 1 else "nested"
            with pytest.raises((Misused, AssertionError), match=words):
                enter(engine.no_sync())
        engine.step()
        with (
            engine.no_sync(),
            pytest.raises(Misused, match="nested inside another no_sync context"),
        ):
            enter(engine.coalesce_grad_reduction())


UNMANAGED = {"settings": {"managed_gradient_accumulation": False}}
SINCE_0_19_4 = stock.since("0.19.4", "managed_gradient_accumulation")


@on_ranks
@pytest.mark.core_case(kind="")
@pytest.mark.parametrize(
    ("stage", "more", "kind", "says"),
    [
        (0, {}, "", "requires ZeRO stage 1/2/3; this engine has stage 0"),
        (1, BF16_SUMS, "", "does not cover the optimizer wrapper"),
        (0, BF16, "", "requires ZeRO stage"),
        pytest.param(2, UNMANAGED, "", "managed_gradient_acc", marks=SINCE_0_19_4),
        # These cannot be built on a CPU: the guard goes by what an engine is.
        *((2, {}, kind, "") for kind in ("pipeline_parallelism", "zenflow", "SuperOffload")),
    ],
    ids=str,
)
def test_engines_that_are_not_covered(
    stage: int, more: dict[str, Any], kind: str, says: str
) -> None:
    with applied("coalesce"):
        engine = engine_of(stage=stage, **more)
        if kind == "SuperOffload":
            engine.optimizer.__class__ = type(kind, (type(engine.optimizer),), {})
        elif kind:
            setattr(engine, kind, True)
        with pytest.raises(Misused if "managed" in says else NotCovered, match=says):
            enter(engine.coalesce_grad_reduction())
        if stage < 2:
            enter(engine.no_sync())  # stock's


#: What stays at an engine that was met, until the patches are taken back.
MET = (
    "_ds_patches_accumulation",
    "_ds_patches_accumulation_division",
    "_ds_patches_coalesce",
    "reduce_ipg_grads",
    "independent_gradient_partition_epilogue",
    zero3.BUCKETING_METHOD,
    zero3.REDUCING_METHOD,
)


def ours(engine: Any, before: Any, but: tuple[str, ...] = MET) -> set[str]:
    """By place. Older releases leave an embedding gathered between a backward and the step."""
    left = leftovers.since(before, engine, but=but)
    return {what.split()[0] for what in left if not what.endswith(("gathered", "in use"))}


@on_ranks
@pytest.mark.core_case(stage=2)
@pytest.mark.parametrize("kind", ["coalesce_grad_reduction", "no_sync", "nested"])
@STAGES
def test_nothing_is_at_the_engine_unless_gradients_stay(stage: int, kind: str) -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    methods = dict(vars(DeepSpeedEngine))
    engine = engine_of(stage=stage)  # before the patch is applied
    before = leftovers.of(engine)
    with applied("coalesce"):
        for step in range(2):
            with getattr(engine, kind)() if kind != "nested" else nullcontext():
                if kind != "nested":
                    engine.backward(loss_of(engine, step))
                    if stage > 1 or kind != "no_sync":
                        busy = ours(engine, before)
                        assert {"engine.step", "engine.allreduce_gradients"} < busy, busy
            if kind != "coalesce_grad_reduction":
                engine.backward((cached_loss if kind == "nested" else loss_of)(engine, step))
            engine.step()
            assert not ours(engine, before), ours(engine, before)
        with engine.no_sync() if kind == "no_sync" else engine.coalesce_grad_reduction():
            engine.backward(loss_of(engine, 0))  # and it is never stepped
    assert dict(vars(DeepSpeedEngine)) == methods
    assert not ours(engine, before, but=())


@on_ranks
def test_taken_back_alone_it_leaves_nested_backwards_to_accumulation() -> None:
    """Also those of an engine that coalesce has met."""
    ends = []
    for taken_back in (True, False):
        with applied("accumulation", "coalesce"):
            engine = engine_of(stage=2)
            engine.backward(loss_of(engine, 0))
            engine.step()
            if taken_back:
                ds_patches.unapply("coalesce")
            engine.backward(cached_loss(engine, 1))
            engine.step()
            ends.append([param.detach().clone() for param in engine.module.parameters()])
    for param, other in zip(*ends, strict=True):
        torch.testing.assert_close(param, other)


@on_ranks
@pytest.mark.core_case(stage=2)
@pytest.mark.parametrize("stage", [2, 3])
def test_inside_no_sync(stage: int) -> None:
    """In words that stock has for them too, where it has any."""
    with applied("coalesce"):
        engine = engine_of(stage=stage)
        with engine.no_sync():
            engine.backward(loss_of(engine, 0))
            with pytest.raises(Misused, match=r"engine\.step\(\) inside no_sync context manager"):
                engine.step()
            with pytest.raises(Misused, match="reentry"):
                enter(engine.no_sync())
        with pytest.raises(Refused, match="no backward has reduced"):
            engine.step()
        engine.backward(loss_of(engine, 0))
        engine.step()


@on_ranks
@pytest.mark.core_case(patch=False, stage=2)
@pytest.mark.parametrize("patch", [False, True], ids=["stock", "a kind of engine"])
@pytest.mark.parametrize("stage", [2, 3])
def test_stock_refuses_no_sync(stage: int, patch: bool) -> None:
    """And a patch that leaves it to stock."""
    with applied(*(["coalesce"] if patch else [])):
        engine = engine_of(stage=stage)
        engine.pipeline_parallelism |= patch
        with pytest.raises(AssertionError, match=f"incompatible .* of ZeRO stage {stage}"):
            enter(engine.no_sync())


@pytest.mark.core_case
def test_the_method_says_what_it_takes_and_raises() -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    with applied("coalesce"):
        method: Any = DeepSpeedEngine.coalesce_grad_reduction
        assert ([*signature(method).parameters], bool(method.__doc__)) == (["self"], True)
