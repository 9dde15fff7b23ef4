"""Accumulation, several forwards, evaluation, recomputation, clipping, loss scale, two engines."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch

from tests.dc_fallback import patterns, stand_in
from tests.dc_fallback.loops import EXACT, loop, patched, trains
from tests.dc_fallback.patterns import inputs
from tests.scripts import deepcompile
from tests.training.options import Options, config
from tests.training.surroundings import build_engine, compile_engine, half_precision_allowed
from tests.training.trainers import EngineTrainer, PlainTrainer, engine_trainer, worst_difference
from tests.world import World


def weighed_by_evaluations(trainer: Any) -> None:
    """A step is larger, the larger the loss of an evaluation before it."""
    for step in trainer.steps():
        trainer.module.eval()
        with torch.no_grad():
            weight = 10 * trainer(*inputs(step, 1))
        trainer.module.train()
        trainer.backward(weight * trainer(*inputs(step, 0)))
        trainer.step()


def test_an_evaluation_does_not_see_older_parameters(world: World) -> None:
    trains(world, "Evaluated", weighed_by_evaluations, {"keeps": True})


def forwards_first(trainer: Any) -> None:
    """Two backwards at the boundary, when both forwards have run."""
    for step in trainer.steps():
        losses = [trainer(*inputs(step, part)) for part in range(2)]
        for loss in losses:
            trainer.backward(loss)
        trainer.step()


two_forwards, evaluates = partial(loop, forwards=2), partial(loop, evaluates=True)
#: By name. DeepCompile keeps parameters gathered until a step, or begins anew in the second one.
CASES: dict[str, dict[str, Any]] = {
    "micro steps": {"micro_steps": 2},
    "micro steps, torch": {"micro_steps": 2, "style": "torch"},
    "two forwards": {"script": two_forwards},
    "evaluates": {"script": evaluates},
    "two backwards": {"script": deepcompile.compiled_two_forwards},
    "forwards first": {"script": forwards_first},
    "anew": {"compiles": {"anew": 1}},
    "anew, micro steps": {"compiles": {"anew": 1}, "micro_steps": 2},
    "keeps": {"compiles": {"keeps": True}},
    "keeps, micro steps": {"compiles": {"keeps": True}, "micro_steps": 2},
    "keeps, two forwards": {"compiles": {"keeps": True}, "script": two_forwards},
    "keeps, evaluates": {"compiles": {"keeps": True}, "script": evaluates},
}


@pytest.mark.core_case(pattern="TiedToSkipped", case="forwards first")
@pytest.mark.core_case(pattern="TiedToSkipped", case="two backwards")
@pytest.mark.core_case(pattern="TiedToSkipped", case="anew, micro steps")
@pytest.mark.core_case(pattern="TiedToSkipped", case="keeps, evaluates")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "pattern", ["Compiled", "Disabled", "Mixed", "TiedToSkipped", "TiedGraphs", "Whole"]
)
def test_trains(world: World, pattern: str, case: str) -> None:
    trains(world, pattern, **CASES[case])


@pytest.mark.parametrize(
    "given",
    [
        {"zero": {"stage3_param_persistence_threshold": 100}},
        {"zero": {"reduce_bucket_size": 100}},
        {"zero": {"offload_param": {"device": "cpu"}}},
        {"zero": {"overlap_comm": True}},
        {"clip": 0.05, "steps": 6},
    ],
    ids=["persistent", "small buckets", "offloaded", "overlap", "clipped"],
)
@pytest.mark.parametrize("pattern", ["Disabled", "LoopOfBlocks", "TiedToSkipped"])
def test_settings(world: World, pattern: str, given: dict[str, Any]) -> None:
    trains(world, pattern, **given)


def read_after_a_forward(trainer: Any) -> None:
    """A script has gathered a parameter by itself, and runs the model before it reads it."""
    bias = trainer.module.layers[0].bias
    for step in trainer.steps():
        with trainer.gathered([bias]):
            loss = trainer(*inputs(step, 0))
            loss = loss * (1 + bias.detach().square().sum())
        trainer.backward(loss)
        trainer.step()


def test_what_a_script_has_gathered_stays(world: World) -> None:
    """Also if it is small, as those that are let go of when a forward begins."""
    trains(
        world, "Disabled", read_after_a_forward, zero={"stage3_param_persistence_threshold": 100}
    )


def against_eager(pattern: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Held against eager ZeRO-3, for what plain PyTorch has no name for."""
    start = patterns.build(pattern)
    options = Options(steps=6, settings=settings)
    with half_precision_allowed():
        eager = EngineTrainer(build_engine(deepcopy(start), options.config), options)
        loop(eager)
        with stand_in.deep_compile(), patched():
            trainer = EngineTrainer(compile_engine(deepcopy(start), options.config), options)
            loop(trainer)
            found, expected = trainer.parameters(), eager.parameters()
            origin = {name: p.detach().clone() for name, p in start.named_parameters()}
            return {
                "difference": worst_difference(found, expected)[0],
                "moved": worst_difference(expected, origin)[0],
                "skipped": (eager.engine.skipped_steps, trainer.engine.skipped_steps),
            }


@pytest.mark.parametrize("pattern", ["Disabled", "Whole"])
def test_overflow_skips_the_step(world: World, pattern: str) -> None:
    scale = {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}
    found = world.run(against_eager, pattern, {"fp16": scale})[0]
    assert found["skipped"][0] == found["skipped"][1] > 0
    assert found["moved"] > 5e-4
    assert found["difference"] <= 2e-4


def beside_another() -> float:
    """An engine under DeepCompile trains while a plain ZeRO-3 engine is used too."""
    plain = PlainTrainer(patterns.build("Mixed"), Options())
    loop(plain)
    with stand_in.deep_compile(), patched():
        other = engine_trainer(patterns.build("Mixed"))
        trainer = EngineTrainer(compile_engine(patterns.build("Mixed"), config(3)))
        for step in range(3):
            other.backward(other(*inputs(step, 0)))
            trainer.backward(trainer(*inputs(step, 0)))
            other.step()
            trainer.step()
        both = other.parameters(), trainer.parameters()
        return max(worst_difference(one, plain.parameters())[0] for one in both)


def test_two_engines(world: World) -> None:
    assert max(world.run(beside_another)) <= EXACT


def calls_left_open(pattern: str) -> list[int]:
    """How many calls of modules are under way after each backward."""
    with stand_in.deep_compile(), patched():
        engine = compile_engine(patterns.build(pattern), config(3))
        found = []
        for step in range(2):
            engine.backward(engine(*inputs(step, 0)))
            found.append(len(vars(engine)["_ds_patches_dc_fallback"].uses.calls))
            engine.step()
        return found


def test_no_call_stays_open(world: World) -> None:
    """Checkpointing breaks a recomputation off when it has seen enough of it.

    A call that stayed would have the next forward taken for a nested one.
    """
    assert world.run(calls_left_open, "Recomputed") == [[0, 0]] * 2
