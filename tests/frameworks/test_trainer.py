"""The Trainer of transformers: four micro steps, recomputed activations, ZeRO 2 and 3, offload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.frameworks import saved
from tests.frameworks.conftest import Ranks
from tests.frameworks.runs import (
    WRONG,
    Run,
    assert_equal,
    assert_patched,
    automatic,
    on_one,
    on_two,
    part_lost,
)
from tests.training.trainers import Parameters
from tests.world import World

SCRIPT = "hf_trainer"
MICRO_STEPS, STEPS = 4, 4
PLAIN: dict[str, Any] = {}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
exhaustive = pytest.mark.exhaustive
every_engine = pytest.mark.parametrize(
    ("stage", "zero"),
    [
        pytest.param(2, PLAIN, id="2"),
        pytest.param(3, PLAIN, id="3"),
        pytest.param(2, OFFLOAD, id="2-offload", marks=exhaustive),
        pytest.param(3, OFFLOAD, id="3-offload", marks=exhaustive),
    ],
)


@pytest.fixture(scope="module")
def start(folder: Path) -> Parameters:
    return saved.save_causal(folder / "model")


@pytest.fixture(scope="module")
def reference(alone: World, folder: Path, start: Parameters) -> Run:
    """One process has twice the micro steps, in place of two ranks."""
    model, output = folder / "model", folder / "alone"
    return on_one(alone, SCRIPT, model, output, micro_steps=2 * MICRO_STEPS)


def train(world: World, folder: Path, stage: int, zero: dict[str, Any], **more: Any) -> Run:
    settings = automatic(stage, **zero)
    output = folder / f"{stage}-{len(zero)}"
    return on_two(world, SCRIPT, folder / "model", output, settings, **more)


@every_engine
def test_patched(
    ranks: Ranks,
    folder: Path,
    reference: Run,
    start: Parameters,
    stage: int,
    zero: dict[str, Any],
) -> None:
    found = train(ranks.patched, folder, stage, zero)
    assert_patched(found)
    assert_equal(found, reference, start)
    assert found.reductions == MICRO_STEPS * STEPS


@exhaustive
@every_engine
def test_stock(
    ranks: Ranks,
    folder: Path,
    reference: Run,
    start: Parameters,
    stage: int,
    zero: dict[str, Any],
) -> None:
    """Is right by now; the old release's stage 2 drops micro steps."""
    found = train(ranks.stock, folder, stage, zero)
    assert not found.live
    if ranks.old and stage == 2:
        assert part_lost(found, reference, start) > WRONG
    else:
        assert_equal(found, reference)
    assert found.reductions == MICRO_STEPS * STEPS


@exhaustive
@every_engine
@pytest.mark.parametrize("way", ["to patched", "to stock"])
def test_a_checkpoint_is_resumed_the_other_way(
    unpatched: World,
    patched: World,
    folder: Path,
    reference: Run,
    stage: int,
    zero: dict[str, Any],
    way: str,
) -> None:
    """The second half of the steps, after the first one's checkpoint was loaded."""
    first, second = (unpatched, patched) if way == "to patched" else (patched, unpatched)
    every = STEPS // 2
    whole = train(first, folder, stage, zero, save_strategy="steps", save_steps=every)
    assert_equal(whole, reference)
    saved = folder / f"{stage}-{len(zero)}" / f"checkpoint-{every}"
    resumed = train(second, folder, stage, zero, resume=saved)
    assert_equal(resumed, reference)
    assert resumed.reductions == MICRO_STEPS * (STEPS - every)
