"""What a window refuses, and that applying and unapplying leave nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ds_patches
from tests.coalesce import cases, releases
from tests.world import World
from tests.zero3_retain import models, trainers


def engine_of(stage: int, **settings: Any) -> Any:
    return trainers.build_engine(models.build(models.TwoHeads), trainers.config(stage, **settings))


def one_backward(engine: Any, step: int = 0) -> None:
    tokens, classes = models.batch(step)
    engine.backward(sum(models.losses(engine(tokens), classes)))


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
    with cases.patched():
        engine = engine_of(stage)
        found = {}
        with engine.coalesce_grad_reduction():
            one_backward(engine)
            found["step"] = caught_by(engine.step)
            found["again"] = caught_by(engine.coalesce_grad_reduction)
            found["no_sync"] = caught_by(engine.no_sync)
        engine.step()
        if stage == 1:
            with engine.no_sync():
                found["in no_sync"] = caught_by(engine.coalesce_grad_reduction)
        return found


@pytest.mark.core_case(stage=2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_inside_a_window(world: World, stage: int) -> None:
    for found in world.run(refusals_inside, stage):
        assert all(text.startswith("AssertionError") for text in found.values()), found
        assert "engine.step() inside" in found["step"]
        assert "not re-entrant" in found["again"]


def refusal(stage: int, dtype: str = "float32", **settings: Any) -> str:
    with cases.patched():
        model = models.build(models.TwoHeads, getattr(torch, dtype))
        engine = trainers.build_engine(model, trainers.config(stage, **settings))
        return caught_by(engine.coalesce_grad_reduction)


BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}


@pytest.mark.core_case
@pytest.mark.parametrize(
    ("stage", "dtype", "settings", "says"),
    [
        (0, "float32", {}, "needs ZeRO stage 1, 2 or 3; this engine has 0"),
        (1, "bfloat16", BF16, "does not cover"),
        (0, "bfloat16", {"bf16": {"enabled": True}}, "needs ZeRO stage"),
    ],
    ids=["stage 0", "BF16_Optimizer", "bf16 stage 0"],
)
def test_engines_that_are_not_covered(
    world: World, stage: int, dtype: str, settings: dict[str, Any], says: str
) -> None:
    for text in world.run(refusal, stage, dtype, **settings):
        assert text.startswith("NotImplementedError")
        assert says in text


@pytest.mark.skipif(
    releases.Version("0.19.4") > releases.RELEASE, reason="managed_gradient_accumulation: 0.19.4"
)
def test_unmanaged_accumulation(world: World) -> None:
    for text in world.run(refusal, 2, managed_gradient_accumulation=False):
        assert text.startswith("AssertionError")
        assert "managed_gradient_accumulation" in text


def refusal_of_a_kind(attribute: str) -> str:
    """The guard goes by what the engine is, and these cannot be built on a CPU."""
    with cases.patched():
        engine = engine_of(2)
        if attribute == "optimizer":
            engine.optimizer.__class__ = type("SuperOffload", (type(engine.optimizer),), {})
        else:
            setattr(engine, attribute, True)
        return caught_by(engine.coalesce_grad_reduction)


@pytest.mark.parametrize("attribute", ["pipeline_parallelism", "zenflow", "optimizer"])
def test_engines_of_other_kinds(world: World, attribute: str) -> None:
    for text in world.run(refusal_of_a_kind, attribute):
        assert text.startswith("NotImplementedError"), text


def backwards_against_announced(
    style: str, announced: int, backwards: int, one_forward: bool
) -> str:
    with cases.patched():
        trainer = cases.EngineTrainer(engine_of(2), style)
        tokens, classes = models.batch(0)
        try:
            with trainer.window(num_backwards=announced):
                outputs = trainer.forward(tokens)
                for index in range(backwards):
                    if index and not one_forward:
                        outputs = trainer.forward(tokens)
                    trainer.backward(sum(models.losses(outputs, classes)), retain_graph=one_forward)
        except RuntimeError as error:
            return str(error)
        return "no error"


@pytest.mark.parametrize("one_forward", [False, True], ids=["", "one forward"])
@pytest.mark.parametrize("style", ["engine", "torch"])
@pytest.mark.parametrize(("announced", "backwards"), [(2, 3), (2, 2), (3, 1)])
def test_announced_backwards(
    world: World, style: str, announced: int, backwards: int, one_forward: bool
) -> None:
    releases.needs_torch_style(style)
    for text in world.run(backwards_against_announced, style, announced, backwards, one_forward):
        # A plain loss.backward() again over one forward has nothing that it could be counted by.
        counted = 1 if one_forward and style == "torch" else backwards
        assert ("this is one more" in text) == (counted > announced), text


def arguments_that_mean_nothing() -> list[str]:
    with cases.patched():
        window = engine_of(2).coalesce_grad_reduction
        return [
            caught_by(window, num_backwards=0),
            caught_by(window, gather_once=True),
            caught_by(window, 3),
        ]


def test_arguments_that_mean_nothing(world: World) -> None:
    for found in world.run(arguments_that_mean_nothing):
        kinds = [text.split(":")[0] for text in found]
        assert kinds == ["ValueError", "NotImplementedError", "TypeError"]


def lifecycle() -> list[bool]:
    from deepspeed.runtime.engine import DeepSpeedEngine

    before = dict(vars(DeepSpeedEngine))
    engine = engine_of(3)
    known = set(vars(engine)), set(vars(engine.optimizer))
    with cases.patched():
        cases.several_backwards(cases.EngineTrainer(engine), steps=1)
        leaves_nothing = set(vars(engine)) - known[0], set(vars(engine.optimizer)) - known[1]
    return [
        dict(vars(DeepSpeedEngine)) == before,
        not any("coalesce" in name for names in leaves_nothing for name in names),
    ]


def test_engines_built_before_and_nothing_left(world: World) -> None:
    for found in world.run(lifecycle):
        assert all(found)


def native(patch: bool, stage: int) -> cases.Outcome:
    case = {"implementation": "native"} if patch else {}
    start = models.build(models.TwoHeads)
    return cases.run(cases.several_backwards, start, stage, patch=patch, **case)


@pytest.mark.core_case(stage=2)
@pytest.mark.skipif(not releases.NATIVE, reason="coalesce_grad_reduction came with 0.19.1")
@pytest.mark.parametrize("patch", [False, True], ids=["stock", "patched"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_native_method_is_left_alone_if_asked(world: World, stage: int, patch: bool) -> None:
    for result in world.run(native, patch, stage):
        assert result.equal(), result


def native_where_there_is_none() -> str:
    try:
        return caught_by(ds_patches.apply, "coalesce", implementation="native")
    finally:
        ds_patches.unapply_all()


@pytest.mark.core_case
@pytest.mark.skipif(releases.NATIVE, reason="there is one")
def test_no_native_method_to_be_had(world: World) -> None:
    for text in world.run(native_where_there_is_none):
        assert "no coalesce_grad_reduction of its own" in text
