"""C7: gradients that stock loses outside windows: warn once, add, or keep silent."""

from __future__ import annotations

from typing import Any

import pytest

from tests.coalesce import cases, micro_steps, releases
from tests.coalesce.micro_steps import OFFLOADED, OVERLAP
from tests.world import World
from tests.zero3_retain import models, trainers
from tests.zero3_retain.cases import listening

#: (script, stage, settings) that stock gets wrong: from this release on, up to this one.
LOSSES: list[tuple[cases.Script, int, dict[str, Any], str, str]] = [
    (micro_steps.twice_at_the_boundary, 1, {}, "0.18.3", "9"),
    (micro_steps.twice_at_the_boundary, 2, {}, "0.18.3", "9"),
    (micro_steps.twice_at_the_boundary, 2, OVERLAP, "0.18.3", "9"),
    (micro_steps.by_hand_and_on, 2, {}, "0.18.3", "9"),
    (micro_steps.two_forwards_first, 2, {}, "0.18.3", "9"),
    (micro_steps.two_forwards_first, 3, {}, "0.18.5", "9"),
    (micro_steps.two_forwards_first, 3, OFFLOADED, "0.18.5", "9"),
    (micro_steps.twice_at_the_boundary, 1, OFFLOADED, "0.16.0", "9"),
    (micro_steps.twice_at_the_boundary, 2, OFFLOADED, "0.16.0", "9"),
    (micro_steps.by_hand, 2, OFFLOADED, "0.16.0", "0.18.9"),
]


def losing(script: Any, stage: int, settings: Any, since: str, until: str) -> Any:
    kind = {str(OFFLOADED): "-offloaded", str(OVERLAP): "-overlap"}.get(str(settings), "")
    applies = releases.Version(since) <= releases.RELEASE <= releases.Version(until)
    reason = f"stock {releases.RELEASE} does not lose gradients here"
    mark = pytest.mark.skipif(not applies, reason=reason)
    return pytest.param(script, stage, settings, id=f"{script.__name__}-{stage}{kind}", marks=mark)


losses = pytest.mark.parametrize(
    ("script", "stage", "settings"), [losing(*case) for case in LOSSES]
)


def ends(
    world: World, script: cases.Script, stage: int, lost: str = "warn", **case: Any
) -> list[cases.Outcome]:
    case = {"no_sync": "off", "lost_gradients": lost, **case}
    return list(world.run(micro_steps.outcome, script, stage=stage, **case))


@pytest.mark.core_case(script=micro_steps.twice_at_the_boundary, stage=2)
@pytest.mark.core_case(script=micro_steps.two_forwards_first, stage=3, settings={})
@pytest.mark.core_case(script=micro_steps.by_hand)  # which the newest release has mended
@losses
def test_warns_once_and_names_the_cure(
    world: World, script: cases.Script, stage: int, settings: dict[str, Any]
) -> None:
    for result in ends(world, script, stage, settings=settings):
        assert not result.error
        assert result.difference > 1e-2, "stock lost nothing, and there is nothing to warn of"
        (said,) = result.heard
        assert "coalesce_grad_reduction" in said
        assert "DS_PATCHES_COALESCE_LOST_GRADIENTS=accumulate" in said


@pytest.mark.core_case(script=micro_steps.by_hand)
@pytest.mark.parametrize("others", [(), ("zero3_retain",)], ids=["", "zero3_retain"])
@losses
def test_accumulates_if_asked(
    world: World,
    script: cases.Script,
    stage: int,
    settings: dict[str, Any],
    others: tuple[str, ...],
) -> None:
    for result in ends(world, script, stage, "accumulate", settings=settings, others=others):
        assert result.equal(), result
        assert not result.heard


@pytest.mark.core_case(script=micro_steps.by_hand)
@losses
def test_keeps_silent_if_asked(
    world: World, script: cases.Script, stage: int, settings: dict[str, Any]
) -> None:
    for result in ends(world, script, stage, "silent", settings=settings):
        assert result.difference > 1e-2
        assert not result.heard


@pytest.mark.parametrize("case", LOSSES[:9], ids=lambda case: f"{case[0].__name__}-{case[1]}")
def test_one_warning_with_zero3_retain(world: World, case: Any) -> None:
    script, stage, settings, since, until = case
    if not releases.Version(since) <= releases.RELEASE <= releases.Version(until):
        pytest.skip(f"stock {releases.RELEASE} does not lose gradients here")
    for result in ends(world, script, stage, settings=settings, others=("zero3_retain",)):
        assert len([text for text in result.heard if "lost" in text or "overwritten" in text]) == 1


def zero_grad_in_between(trainer: Any) -> None:
    for step in range(3):
        micro_steps.one_backward(trainer, step, 5)
        trainer.zero_grad()
        micro_steps.one_backward(trainer, step, 0)
        trainer.step()


def optimizers_zero_grad_in_between(trainer: Any) -> None:
    for step in range(3):
        micro_steps.one_backward(trainer, step, 5)
        if isinstance(trainer, micro_steps.EngineTrainer):
            trainer.engine.optimizer.zero_grad()
        else:
            trainer.zero_grad()
        micro_steps.one_backward(trainer, step, 0)
        trainer.step()


def windows_only(trainer: Any) -> None:
    cases.several_backwards(trainer)


def one_each(trainer: Any) -> None:
    cases.several_backwards(trainer, backwards=1, steps=4)


def with_evaluation(trainer: Any) -> None:
    """Forwards that no backward follows, between those that one does."""
    import torch

    for step in range(3):
        with torch.no_grad():
            trainer.forward(models.batch(7)[0])
        micro_steps.one_backward(trainer, step)
        with torch.no_grad():
            trainer.forward(models.batch(8)[0])
        trainer.step()


#: Scripts, and gradient_accumulation_steps, that stock gets right with and without offload.
RIGHT: list[tuple[cases.Script, int]] = [
    (micro_steps.micro_steps, 2),
    (one_each, 1),
    (with_evaluation, 1),
    (windows_only, 1),
]


@pytest.mark.core_case(script=micro_steps.micro_steps, stage=2, settings={}, lost="warn")
@pytest.mark.parametrize(
    ("settings", "lost"), [({}, "warn"), (OFFLOADED, "accumulate")], ids=["", "offloaded"]
)
@pytest.mark.parametrize(
    ("script", "gas"), [pytest.param(*one, id=one[0].__name__) for one in RIGHT]
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nothing_to_warn_of(
    world: World, stage: int, script: cases.Script, gas: int, settings: dict[str, Any], lost: str
) -> None:
    for result in ends(world, script, stage, lost, micro_steps=gas, settings=settings):
        assert result.equal(), result
        assert not result.heard


@pytest.mark.parametrize("lost", ["warn", "accumulate"])
@pytest.mark.parametrize("script", [zero_grad_in_between, optimizers_zero_grad_in_between])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_zero_grad_dropped_is_not_lost(
    world: World, stage: int, script: cases.Script, lost: str
) -> None:
    for result in ends(world, script, stage, lost):
        assert not result.heard
        # Up to 0.18.4 stock adds to what zero_grad() is to drop, except where it replaces it.
        assert result.equal() or lost == "warn", result


def no_sync_at_stage_1() -> tuple[list[str], str]:
    with cases.patched(), listening() as heard:
        settings = trainers.config(1)
        start = models.build(models.TwoHeads)
        trainer = micro_steps.EngineTrainer(trainers.build_engine(start, settings))
        micro_steps.all_but_the_last_unsynced(trainer)
        return heard, ""


def test_stocks_own_no_sync_loses_nothing(world: World) -> None:
    for heard, _ in world.run(no_sync_at_stage_1):
        assert not heard
