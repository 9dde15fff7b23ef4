"""Accumulation, several forwards, evaluation, clipping, loss scale, two engines."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

from tests.dc_fallback import cases, patterns, stand_in
from tests.dc_fallback.cases import inputs
from tests.dc_fallback.test_patterns import assert_trained, outcome
from tests.world import World
from tests.training import trainers
from tests.training.surroundings import half_precision_allowed

MIXED = ["Disabled", "Mixed", "TiedToSkipped", "TiedGraphs", "Whole"]


@pytest.mark.parametrize("style", ["engine", "torch"])
@pytest.mark.parametrize("pattern", MIXED)
def test_micro_steps(world: World, pattern: str, style: str) -> None:
    assert_trained(outcome(world, pattern, micro_steps=2, style=style))


@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("pattern", MIXED)
def test_after_deepcompile_began_anew(world: World, pattern: str, micro_steps: int) -> None:
    assert_trained(outcome(world, pattern, micro_steps=micro_steps, anew=True))


@pytest.mark.parametrize("pattern", MIXED)
def test_two_forwards_before_one_backward(world: World, pattern: str) -> None:
    assert_trained(outcome(world, pattern, forwards=2))


def evaluated() -> list[tuple[float, float]]:
    """Losses of evaluations between steps: an engine's and plain PyTorch's."""
    start = patterns.build("Evaluated")
    plain = trainers.PlainTrainer(deepcopy(start))
    with stand_in.deep_compile() as native, cases.patched():
        trainer = cases.Trainer(cases.engine_of(start, trainers.config(3)))
        native.keeps = True
        losses: list[list[float]] = [[], []]
        for step in range(3):
            for found, one in zip(losses, (trainer, plain), strict=True):
                module = one.model if one is plain else one.engine.module
                module.eval()
                with torch.no_grad():
                    found.append(one.forward(*inputs(step, 1)).item())
                module.train()
                one.backward(one.forward(*inputs(step, 0)))
                one.step()
    return list(zip(*losses, strict=True))


def test_an_evaluation_does_not_see_older_parameters(world: World) -> None:
    found = world.run(evaluated)[0]
    assert len({expected for _, expected in found}) == len(found)
    assert all(abs(ours - expected) < 1e-5 for ours, expected in found), found


def twice_a_step(trainer: Any) -> None:
    """Two backwards at the boundary, each of a forward of its own."""
    for step in range(3):
        trainer.backward(trainer(*inputs(step, 0)))
        trainer.backward(trainer(*inputs(step, 1)))
        trainer.step()


@pytest.mark.parametrize(
    "case",
    [{}, {"forwards": 2}, {"micro_steps": 2}, {"evaluates": True}],
    ids=["plain", "forwards", "micro steps", "evaluates"],
)
@pytest.mark.parametrize("pattern", ["Compiled", "Disabled", "TiedToSkipped", "TiedGraphs"])
def test_what_graphs_keep_gathered_is_renewed(
    world: World, pattern: str, case: dict[str, Any]
) -> None:
    assert_trained(outcome(world, pattern, keeps=True, **case))


@pytest.mark.parametrize("pattern", MIXED)
def test_evaluations_between(world: World, pattern: str) -> None:
    assert_trained(outcome(world, pattern, evaluates=True))


def forwards_first(trainer: Any) -> None:
    """The same, when both forwards have run."""
    for step in range(3):
        losses = [trainer(*inputs(step, part)) for part in range(2)]
        for loss in losses:
            trainer.backward(loss)
        trainer.step()


@pytest.mark.parametrize("script", [twice_a_step, forwards_first])
@pytest.mark.parametrize("pattern", MIXED)
def test_two_backwards_a_step(world: World, pattern: str, script: Any) -> None:
    assert_trained(world.run(cases.run, pattern, script)[0])


@pytest.mark.parametrize(
    "settings",
    [
        {"stage3_param_persistence_threshold": 100},
        {"reduce_bucket_size": 100},
        {"offload_param": {"device": "cpu"}},
        {"overlap_comm": True},
    ],
    ids=["persistent", "small buckets", "offloaded", "overlap"],
)
@pytest.mark.parametrize("pattern", ["Disabled", "LoopOfBlocks", "TiedToSkipped"])
def test_settings(world: World, pattern: str, settings: dict[str, Any]) -> None:
    assert_trained(outcome(world, pattern, settings={"zero": settings}))


def against_eager(pattern: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Held against eager ZeRO-3, for what plain PyTorch has no name for."""
    start = patterns.build(pattern)
    wanted = trainers.config(3, **settings)
    with half_precision_allowed():
        eager = trainers.EngineTrainer(trainers.build_engine(deepcopy(start), wanted))
        cases.steps(eager, steps=6)
        with stand_in.deep_compile(), cases.patched():
            trainer = trainers.EngineTrainer(cases.engine_of(start, wanted))
            cases.steps(trainer, steps=6)
            found, expected = trainer.parameters(), eager.parameters()
            origin = {name: p.detach().clone() for name, p in start.named_parameters()}
            return {
                "difference": trainers.worst_difference(found, expected)[0],
                "moved": trainers.worst_difference(expected, origin)[0],
                "skipped": (eager.engine.skipped_steps, trainer.engine.skipped_steps),
                "norm": abs(
                    trainer.engine.get_global_grad_norm() - eager.engine.get_global_grad_norm()
                ),
            }


@pytest.mark.parametrize("pattern", ["Disabled", "TiedToSkipped", "Whole"])
def test_clipping(world: World, pattern: str) -> None:
    found = world.run(against_eager, pattern, {"gradient_clipping": 0.05})[0]
    assert found["moved"] > 1e-3
    assert found["difference"] <= cases.EXACT
    assert found["norm"] <= 1e-4


@pytest.mark.parametrize("pattern", ["Disabled", "Whole"])
def test_overflow_skips_the_step(world: World, pattern: str) -> None:
    scale = {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}
    found = world.run(against_eager, pattern, {"fp16": scale})[0]
    assert found["skipped"][0] == found["skipped"][1] > 0
    assert found["moved"] > 5e-4
    assert found["difference"] <= 2e-4


def beside_another() -> float:
    """An engine under DeepCompile trains while a plain ZeRO-3 engine is used too."""
    start = patterns.build("Mixed")
    settings = trainers.config(3)
    expected = trainers.plain(start, cases.steps)
    with stand_in.deep_compile(), cases.patched():
        other = trainers.EngineTrainer(trainers.build_engine(patterns.build("Mixed"), settings))
        trainer = trainers.EngineTrainer(cases.engine_of(start, settings))
        for step in range(3):
            other.backward(other.forward(*inputs(step, 0)))
            trainer.backward(trainer(*inputs(step, 0)))
            other.step()
            trainer.step()
        assert trainers.worst_difference(other.parameters(), expected)[0] <= cases.EXACT
        return trainers.worst_difference(trainer.parameters(), expected)[0]


def test_two_engines(world: World) -> None:
    assert max(world.run(beside_another)) <= cases.EXACT
