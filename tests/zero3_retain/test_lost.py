"""R8: gradients that stock overwrites outside any window: warn once, add, or keep silent."""

from __future__ import annotations

from typing import Any

import pytest

from tests.world import World
from tests.zero3_retain import models, releases, trainers
from tests.zero3_retain.cases import Outcome, listening, run


def forward_backward_twice(trainer: Any) -> None:
    for step in range(3):
        for micro in range(2):
            tokens, classes = models.batch(step, micro)
            trainer.backward(sum(models.losses(trainer.forward(tokens), classes)))
        trainer.step()


def two_forwards_then_two_backwards(trainer: Any) -> None:
    for step in range(3):
        batches = [models.batch(step, micro) for micro in range(2)]
        outputs = [(trainer.forward(tokens), classes) for tokens, classes in batches]
        for output, classes in outputs:
            trainer.backward(sum(models.losses(output, classes)))
        trainer.step()


def one_head_twice_then_the_other(trainer: Any) -> None:
    """The other head still holds what the last step left, which is not to be added to."""
    for step in range(3):
        batches = [models.batch(step, micro) for micro in range(3)]
        outputs = [(trainer.forward(tokens), classes) for tokens, classes in batches]
        for (output, classes), head in zip(outputs, (0, 0, 1), strict=True):
            trainer.backward(models.losses(output, classes)[head])
        trainer.step()


def ordinary_accumulation(trainer: Any) -> None:
    for step in range(3):
        for micro in range(2):
            tokens, classes = models.batch(step, micro)
            trainer.backward(sum(models.losses(trainer.forward(tokens), classes)))
            trainer.step()


def one_forward_two_backwards(trainer: Any) -> None:
    for step in range(3):
        tokens, classes = models.batch(step)
        first, second = models.losses(trainer.forward(tokens), classes)
        trainer.backward(first, retain_graph=True)
        trainer.backward(second)
        trainer.step()


def run_listening(
    script: trainers.Script, stage: int, micro_steps: int, settings: dict[str, Any], **options: str
) -> tuple[Outcome, list[str]]:
    """The outcome, and what the patch warned of."""
    start = models.build(models.TwoHeads)
    with listening() as heard:
        outcome = run(script, start, stage, micro_steps=micro_steps, settings=settings, **options)
    return outcome, [text for text in heard if "overwritten" in text]


OFFLOADED = {"zero": {"offload_optimizer": {"device": "cpu"}}}
#: (script, stage, settings) that stock gets wrong, and the first release that does.
LOSSES = [
    (two_forwards_then_two_backwards, 3, {}, "0.18.5"),
    (one_head_twice_then_the_other, 3, {}, "0.18.5"),
    (forward_backward_twice, 2, {}, "0.18.3"),
    (forward_backward_twice, 1, {}, "0.18.3"),
    (two_forwards_then_two_backwards, 2, {}, "0.18.3"),
    (forward_backward_twice, 2, OFFLOADED, "0.16.0"),
]


def losing_case(script: Any, stage: int, settings: Any, since: str) -> Any:
    name = f"{script.__name__}-{stage}{'-offloaded' if settings else ''}"
    applies = releases.Version(since) <= releases.RELEASE
    reason = f"stock {releases.RELEASE} does not lose gradients here"
    mark = pytest.mark.skipif(not applies, reason=reason)
    return pytest.param(script, stage, settings, id=name, marks=mark)


cases = pytest.mark.parametrize(
    ("script", "stage", "settings"), [losing_case(*case) for case in LOSSES]
)


@pytest.mark.core_case
@cases
def test_warns_once_and_names_the_cure(
    world: World, script: Any, stage: int, settings: dict[str, Any]
) -> None:
    for outcome, warnings in world.run(run_listening, script, stage, 1, settings):
        assert not outcome.error
        assert outcome.difference > 0.01, "stock lost nothing, and there is nothing to warn of"
        assert len(warnings) == 1
        assert "gradient_accumulation_steps" in warnings[0]
        assert "DS_PATCHES_ZERO3_RETAIN_LOST_GRADIENTS=accumulate" in warnings[0]


@pytest.mark.sampled
@cases
def test_accumulates_if_asked(
    world: World, script: Any, stage: int, settings: dict[str, Any]
) -> None:
    results = world.run(run_listening, script, stage, 1, settings, lost_gradients="accumulate")
    for outcome, warnings in results:
        assert outcome.equal, outcome
        assert not warnings


@cases
def test_keeps_silent_if_asked(
    world: World, script: Any, stage: int, settings: dict[str, Any]
) -> None:
    results = world.run(run_listening, script, stage, 1, settings, lost_gradients="silent")
    for outcome, warnings in results:
        assert outcome.difference > 0.01
        assert not warnings


@pytest.mark.parametrize("settings", [{}, OFFLOADED], ids=["", "offloaded"])
@pytest.mark.parametrize(
    ("script", "micro_steps"), [(ordinary_accumulation, 2), (one_forward_two_backwards, 1)]
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nothing_to_warn_of(
    world: World, stage: int, script: Any, micro_steps: int, settings: dict[str, Any]
) -> None:
    for outcome, warnings in world.run(run_listening, script, stage, micro_steps, settings):
        if not (stage == 2 and releases.LOSES_MICRO_STEPS):
            assert outcome.equal, outcome
        assert not warnings
