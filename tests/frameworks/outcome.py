"""What a run must have come to."""

from __future__ import annotations

from typing import Any

import pytest

from tests.frameworks import run
from tests.frameworks.run import Run
from tests.training import trainers
from tests.world import World

#: Single precision, after a few steps of SGD.
EXACT = 1e-6
#: What is wrong is off by more than this part of all that was learned.
WRONG = 0.05


def on_one(world: World, script: str, *arguments: Any, **options: Any) -> Run:
    """The reference, which no engine has trained."""
    (found,) = world.run(run.script, script, *arguments, **options)
    assert not found.error, found.error
    assert found.engine_steps is None
    return found


def on_two(world: World, script: str, *arguments: Any, **options: Any) -> Run:
    """What rank 0 has come to, trained by an engine of DeepSpeed, or why not."""
    first, second = world.run(run.script, script, *arguments, **options)
    assert first.error == second.error
    assert first.reductions == second.reductions
    if not first.error:
        assert first.engine_steps
    return first


def assert_equal(run: Run, reference: Run, start: trainers.Parameters | None = None) -> None:
    """Losses and parameters are those of the reference, which has moved away from `start`."""
    assert not run.error, run.error
    assert run.losses == pytest.approx(reference.losses, rel=1e-5)
    assert trainers.worst_difference(run.parameters, reference.parameters)[0] < EXACT
    if start is not None:
        assert moved(reference, start) > 1e4 * EXACT


def assert_patched(run: Run) -> None:
    """By the environment alone, and with nothing to complain of."""
    assert not run.error, run.error
    assert run.live
    assert set(run.live) == set(run.offered)
    assert not run.heard


def part_lost(run: Run, reference: Run, start: trainers.Parameters) -> float:
    """How far a run ended from the reference, as a part of how far that went."""
    assert not run.error, run.error
    apart = trainers.worst_difference(run.parameters, reference.parameters)[0]
    return apart / moved(reference, start)


def moved(reference: Run, start: trainers.Parameters) -> float:
    start = {f"0.{name}": param for name, param in start.items()}
    return trainers.worst_difference(reference.parameters, start)[0]
