"""C6: `no_sync()` at ZeRO 1, 2 and 3 is DistributedDataParallel's."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import ds_patches
from tests.coalesce import cases, micro_steps, releases
from tests.coalesce.micro_steps import OFFLOADED, OVERLAP
from tests.coalesce.test_guards import BF16, caught_by, engine_of, one_backward
from tests.world import World
from tests.zero3_retain import models, trainers
from tests.zero3_retain.cases import listening
from tests.zero3_retain.test_failure import Boom, Fragile, RaiseInBackward

STAGES = [1, 2, 3]
UPSTREAM = {"flush": "upstream"}


def check(world: World, script: cases.Script, *, stage: int, **case: Any) -> None:
    for result in world.run(micro_steps.outcome, script, stage=stage, **case):
        assert result.equal(case.get("dtype", "float32")), result
        assert not result.heard


def stock_refuses(stage: int) -> str:
    return caught_by(engine_of(stage).no_sync)


@pytest.mark.core_case(stage=2)
@pytest.mark.parametrize("stage", [2, 3])
def test_stock_refuses(world: World, stage: int) -> None:
    for text in world.run(stock_refuses, stage):
        assert "incompatible with gradient partitioning logic" in text


@pytest.mark.core_case(case={}, stage=3)
@pytest.mark.parametrize("case", [{}, UPSTREAM, {"settings": OVERLAP}], ids=str)
@pytest.mark.parametrize("stage", STAGES)
def test_the_next_synced_backward_reduces_the_sum(
    world: World, stage: int, case: dict[str, Any]
) -> None:
    check(world, micro_steps.all_but_the_last_unsynced, stage=stage, **case)


@pytest.mark.parametrize("stage", STAGES)
def test_as_ddp_does(world: World, stage: int) -> None:
    case = {"reference": micro_steps.DDPTrainer}
    check(world, micro_steps.all_but_the_last_unsynced, stage=stage, **case)


SCRIPTS: list[tuple[cases.Script, int]] = [
    (micro_steps.micro_steps, 2),
    (micro_steps.stepping_inside, 2),
    (micro_steps.by_hand, 1),
    (micro_steps.synced_in_between, 1),
    (micro_steps.beside_windows, 1),
    (micro_steps.resting_heads, 1),
    (micro_steps.dropped_by_zero_grad, 1),
]


@pytest.mark.core_case(script=micro_steps.stepping_inside, stage=2, settings={})
@pytest.mark.core_case(script=micro_steps.synced_in_between, stage=2, settings=OFFLOADED)
@pytest.mark.core_case(script=micro_steps.synced_in_between, stage=3, settings={})
@pytest.mark.parametrize(
    ("script", "gas"), [pytest.param(*one, id=one[0].__name__) for one in SCRIPTS]
)
@pytest.mark.parametrize(
    ("stage", "settings"),
    [(1, {}), (2, {}), (3, {}), (2, OFFLOADED), (3, OFFLOADED)],
    ids=["1", "2", "3", "2-offloaded", "3-offloaded"],
)
def test_scripts(
    world: World, stage: int, script: cases.Script, gas: int, settings: dict[str, Any]
) -> None:
    model = "Uneven" if script is micro_steps.resting_heads else "TwoHeads"
    check(world, script, stage=stage, model=model, settings=settings, micro_steps=gas)


@pytest.mark.parametrize("script", [micro_steps.synced_in_between, micro_steps.resting_heads])
@pytest.mark.parametrize("stage", [1, 2])
def test_scripts_with_upstreams_flush(world: World, stage: int, script: cases.Script) -> None:
    model = "Uneven" if script is micro_steps.resting_heads else "TwoHeads"
    check(world, script, stage=stage, model=model, **UPSTREAM)


@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_may_have_unlike_numbers_of_backwards(world: World, stage: int) -> None:
    """Not at stage 3, where a forward is a collective."""
    check(world, micro_steps.unlike_numbers, stage=stage)


@pytest.mark.parametrize("settings", [{}, OFFLOADED], ids=["", "offloaded"])
@pytest.mark.parametrize("accumulate_in", [None, "fp32"], ids=["low", "fp32"])
@pytest.mark.parametrize("stage", STAGES)
def test_bfloat16(
    world: World, stage: int, accumulate_in: str | None, settings: dict[str, Any]
) -> None:
    config: dict[str, Any] = {**settings, "bf16": {"enabled": True}}
    if accumulate_in:
        config["data_types"] = {"grad_accum_dtype": accumulate_in}
    if stage == 1 and accumulate_in and not settings:
        pytest.skip("bf16 with fp32 gradients at stage 1 is BF16_Optimizer, which is not covered")
    for script in (micro_steps.all_but_the_last_unsynced, micro_steps.synced_in_between):
        check(world, script, stage=stage, dtype="bfloat16", settings=config)


@pytest.mark.parametrize("stage", STAGES)
def test_float16_with_a_dynamic_loss_scale(world: World, stage: int) -> None:
    config = {"fp16": {"enabled": True, "initial_scale_power": 8}}
    script = micro_steps.all_but_the_last_unsynced
    check(world, script, stage=stage, dtype="float16", settings=config)


@pytest.mark.parametrize("model", ["FrozenTrunk", "SharedBlock", "Reentrant", "LeafModule"])
@pytest.mark.parametrize("stage", STAGES)
def test_models(world: World, stage: int, model: str) -> None:
    check(world, micro_steps.all_but_the_last_unsynced, stage=stage, model=model)


@pytest.mark.parametrize(
    ("stage", "script", "style"),
    [  # every pair of values
        (1, micro_steps.all_but_the_last_unsynced, "scale"),
        (1, micro_steps.synced_in_between, "torch"),
        (2, micro_steps.all_but_the_last_unsynced, "torch"),
        (2, micro_steps.synced_in_between, "scale"),
        (3, micro_steps.all_but_the_last_unsynced, "scale"),
        (3, micro_steps.synced_in_between, "torch"),
    ],
)
def test_torch_style(world: World, stage: int, script: cases.Script, style: str) -> None:
    releases.needs_torch_style(style)
    check(world, script, stage=stage, style=style)


@pytest.mark.parametrize("settings", [{}, OFFLOADED], ids=["", "offloaded"])
@pytest.mark.parametrize("stage", STAGES)
def test_several_backwards_over_one_forward_with_zero3_retain(
    world: World, stage: int, settings: dict[str, Any]
) -> None:
    case = {"others": ("zero3_retain",), "settings": settings}
    check(world, micro_steps.over_one_forward, stage=stage, **case)


# --- Sent ---------------------------------------------------------------------------------------


def sent_in_a_step(stage: int, backwards: int, script: cases.Script, gas: int) -> dict[str, int]:
    """Reductions of three steps."""
    with cases.patched(no_sync="on"):
        start = models.build(models.TwoHeads)
        settings = trainers.config(stage, micro_steps=gas)
        trainer = micro_steps.EngineTrainer(trainers.build_engine(start, settings))
        with cases.Collectives() as sent:
            script(trainer, backwards)
        return {name: n for name, n in sent.seen.items() if "reduce" in name}


@pytest.mark.parametrize("case", ["no_sync", "gradient_accumulation_steps", "boundary"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_costs_one_reduction(world: World, stage: int, case: str) -> None:
    script: Any = {
        "no_sync": micro_steps.all_but_the_last_unsynced,
        "boundary": micro_steps.by_hand,
        "gradient_accumulation_steps": micro_steps.micro_steps,
    }[case]
    found = []
    for backwards in (2, 8):
        gas = backwards if script is micro_steps.micro_steps else 1
        found += world.run(sent_in_a_step, stage, backwards, script, gas)
    assert all(sent == found[0] for sent in found)
    assert sum(found[0].values()) > 0


# --- Refusals and failures ----------------------------------------------------------------------


def refusals(stage: int) -> dict[str, str]:
    with cases.patched(no_sync="on"):
        engine = engine_of(stage)
        found = {}
        with engine.no_sync():
            one_backward(engine)
            found["step inside"] = caught_by(engine.step)
            found["again"] = caught_by(engine.no_sync)
            found["window"] = caught_by(engine.coalesce_grad_reduction)
        found["unsynced step"] = caught_by(engine.step)
        one_backward(engine)
        found["step"] = caught_by(engine.step)
        with engine.coalesce_grad_reduction():
            found["in window"] = caught_by(engine.no_sync)
            one_backward(engine)
        return found


@pytest.mark.core_case(stage=2)
@pytest.mark.parametrize("stage", STAGES)
def test_refusals(world: World, stage: int) -> None:
    for found in world.run(refusals, stage):
        assert found.pop("step") == "no error"
        assert "no backward has reduced" in found.pop("unsynced step")
        assert all(text.startswith("AssertionError") for text in found.values()), found


def left_to_stock(stage: int, dtype: str, settings: dict[str, Any]) -> tuple[str, list[str]]:
    import torch

    with cases.patched(no_sync="on"), listening() as heard:
        model = models.build(models.TwoHeads, getattr(torch, dtype))
        engine = trainers.build_engine(model, trainers.config(stage, **settings))
        return caught_by(engine.no_sync), heard


@pytest.mark.parametrize(
    ("stage", "dtype", "settings"), [(1, "bfloat16", BF16), (0, "float32", {})], ids=str
)
def test_engines_that_are_not_covered(
    world: World, stage: int, dtype: str, settings: dict[str, Any]
) -> None:
    for error, heard in world.run(left_to_stock, stage, dtype, settings):
        assert error == "no error"
        assert sum("no_sync=on does nothing" in text for text in heard) == stage


def off_changes_nothing(stage: int) -> tuple[str, list[str]]:
    with cases.patched():
        engine = engine_of(stage)
        one_backward(engine)
        engine.zero_grad()
        return caught_by(engine.no_sync), [n for n in vars(engine) if "coalesce" in n]


@pytest.mark.parametrize("stage", [2, 3])
def test_off_is_stock(world: World, stage: int) -> None:
    for error, left in world.run(off_changes_nothing, stage):
        assert "incompatible with gradient partitioning logic" in error
        assert not left


def nothing_left(stage: int) -> list[str]:
    with cases.patched(no_sync="on"):
        engine = engine_of(stage)
        with engine.no_sync():
            one_backward(engine)
        one_backward(engine)
    return [name for owner in (engine, engine.optimizer) for name in vars(owner) if "_ds_" in name]


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_is_left_behind(world: World, stage: int) -> None:
    for left in world.run(nothing_left, stage):
        assert not [name for name in left if "ds_patches" in name]


def with_the_native_method() -> str:
    try:
        return caught_by(ds_patches.apply, "coalesce", implementation="native", no_sync="on")
    finally:
        ds_patches.unapply_all()


@pytest.mark.skipif(not releases.NATIVE, reason="coalesce_grad_reduction came with 0.19.1")
def test_not_with_the_native_method(world: World) -> None:
    for text in world.run(with_the_native_method):
        assert "lost_gradients=accumulate need implementation=ours" in text


def backwards_that_raise(trainer: Any, place: str) -> None:
    with trainer.no_sync():
        micro_steps.one_backward(trainer, 1, 0)
        RaiseInBackward.armed = place == "backward"
        try:
            micro_steps.one_backward(trainer, 1, 1)
        finally:
            RaiseInBackward.armed = False
        raise Boom("in user code")


def fail_in_no_sync(trainer: Any, place: str, drop: bool) -> None:
    """Step 1 raises in its second backward without sync; the reference meets what DDP would."""
    for step in range(3):
        engine = isinstance(trainer, micro_steps.EngineTrainer)
        if step == 1 and engine:
            with pytest.raises(Boom):
                backwards_that_raise(trainer, place)
            trainer.leaves_nothing()
            if drop:
                trainer.zero_grad()
        elif step == 1 and not drop:
            micro_steps.one_backward(trainer, step, 0)
            micro_steps.one_backward(trainer, step, 1)
        with trainer.no_sync():
            micro_steps.one_backward(trainer, step, 2)
        micro_steps.one_backward(trainer, step, 3)
        trainer.step()


@pytest.mark.core_case(place="backward", stage=3)
@pytest.mark.parametrize(("place", "drop"), [("user", False), ("user", True), ("backward", True)])
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_stay_after_an_exception_until_zero_grad(
    world: World, stage: int, place: str, drop: bool
) -> None:
    case: Any = {"place": place, "drop": drop}
    for result in world.run(failure, stage, **case):
        assert result.equal(), result
        said = sum("as in DistributedDataParallel" in text for text in result.heard)
        assert said == (place == "backward")


def failure(stage: int, place: str, drop: bool) -> cases.Outcome:
    script = partial(fail_in_no_sync, place=place, drop=drop)
    return micro_steps.outcome_of(script, models.build(Fragile), stage=stage)
