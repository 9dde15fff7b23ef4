"""Checkpoints of the Trainer of transformers, from stock to patched and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.frameworks.runs import Run, assert_equal, assert_near
from tests.frameworks.trainings import TRAINER, TRAINER_OFFLOADED, Training
from tests.world import World


@pytest.fixture(scope="module")
def reference(alone: World, folder: Path) -> Run:
    TRAINER.start(folder)
    return TRAINER.on_one(alone, folder)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("training", [TRAINER, TRAINER_OFFLOADED], ids=["", "offload"])
@pytest.mark.parametrize("way", ["to patched", "to stock"])
def test_a_checkpoint_is_resumed_the_other_way(
    unpatched: World,
    patched: World,
    reference: Run,
    folder: Path,
    tmp_path: Path,
    stage: int,
    training: Training,
    way: str,
) -> None:
    """The second half of the steps, after the first one's checkpoint was loaded."""
    first, second = (unpatched, patched) if way == "to patched" else (patched, unpatched)
    half = training.steps // 2
    one = replace(training, arguments=(Path("lm"), tmp_path))
    whole = one.on_two(first, folder, stage, save_strategy="steps", save_steps=half)
    resumed = one.on_two(second, folder, stage, resume=tmp_path / f"checkpoint-{half}")
    for found in (whole, resumed):
        assert_near(found.losses, reference.losses)
        assert_equal(found, reference)
    assert resumed.reductions == half * (training.reductions or 0)
