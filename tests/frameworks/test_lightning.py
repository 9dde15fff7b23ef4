"""Lightning's manual optimisation by DeepSpeedStrategy: its step is inside the engine's forward."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.runs import Run, assert_equal, assert_patched, on_one, on_two
from tests.frameworks.user import accelerated
from tests.training import options, trainers
from tests.world import World

pytest.importorskip(
    "lightning", reason="lightning is not installed: it is in the extra `frameworks`"
)

pytestmark = pytest.mark.exhaustive

SCRIPT = "lit"
BATCHES = accelerated.ROWS // (2 * accelerated.BATCH)


@pytest.fixture(scope="module")
def reference(alone: World, folder: Path) -> Run:
    return on_one(alone, SCRIPT, folder)


def train(world: World, folder: Path, stage: int) -> Run:
    """Lightning has settings of its own for what it will not have in the configuration."""
    sizes = {"train_micro_batch_size_per_gpu": accelerated.BATCH}
    config = options.config(stage, zero={"reduce_bucket_size": 10**6}, **sizes)
    for name in ("gradient_accumulation_steps", "gradient_clipping"):
        del config[name]
    return on_two(world, SCRIPT, folder, config)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_losses(
    unpatched: World, patched: World, folder: Path, reference: Run, stage: int
) -> None:
    """Stock trains on the second alone, or cannot run it at stage 3."""
    stock = train(unpatched, folder, stage)
    if stage == 3:
        assert "size of tensor a (0)" in stock.error
    else:
        assert trainers.worst_difference(stock.parameters, reference.parameters)[0] > 0.01
    found = train(patched, folder, stage)
    assert_patched(found)
    assert_equal(Run(parameters=found.parameters), Run(parameters=reference.parameters))
    assert found.engine_steps == BATCHES
    assert found.reductions == 2 * BATCHES
