"""Two losses in the way of Accelerate; older releases: tests/coalesce/test_accelerate.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.frameworks.trainings import TWO_LOSSES
from tests.world import World


@pytest.mark.parametrize("stage", [2, 3])
def test_two_losses(unpatched: World, patched: World, folder: Path, stage: int) -> None:
    """Its no_sync() does nothing at stages 2 and 3, and its backward() steps: two steps a batch."""
    training = replace(TWO_LOSSES, arguments=("two_losses",))
    stock, found = (training.on_two(world, folder, stage) for world in (unpatched, patched))
    if stage == 3:
        assert "size of tensor a (0)" in stock.error
    else:
        assert stock.engine_steps == 2 * training.steps
    (said,) = [found.error] if stage == 3 else found.heard
    assert "backward over a forward from before engine.step()" in said
