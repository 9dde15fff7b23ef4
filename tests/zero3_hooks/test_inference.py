"""Evaluations under inference_mode, between training steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.scripts import evaluating
from tests.scripts.declared import Script
from tests.scripts.worlds import FRUGAL
from tests.training import models
from tests.training.models import batch
from tests.training.options import SMALL_PREFETCH, Options
from tests.training.run import applied, check, run
from tests.training.trainers import EngineTrainer, engine_trainer
from tests.world import World

SCRIPTS = [
    pytest.param(evaluating.inference_mode, {}, "cannot be saved"),
    pytest.param(evaluating.inference_mode_of_the_module, {}, "cannot be saved"),
    pytest.param(evaluating.inference_mode_first, FRUGAL, "next_functions"),
]


def options_of(script: Script, settings: dict[str, Any]) -> Options:
    return script.at(3, steps=3, zero={**settings})


@pytest.mark.core_case
@pytest.mark.parametrize(("script", "settings", "words"), SCRIPTS)
def test_training_goes_on(
    world: World, script: Script, settings: dict[str, Any], words: str
) -> None:
    options = options_of(script, settings)
    for stock in world.run(run, script, options):
        assert words in stock.error
    check(world, script, options, "zero3_hooks")


def whole_model(trainer: EngineTrainer) -> None:
    trainer(batch(0)[0])


def part_of_it(trainer: EngineTrainer) -> None:
    trainer.module.blocks[1](torch.ones(2, models.WIDTH))


def gathered_by_hand(trainer: EngineTrainer) -> None:
    with trainer.gathered(trainer.module.parameters()):
        sum(param.sum() for param in trainer.module.parameters())


def inference_tensors(patches: tuple[str, ...], what: str, threshold: int) -> list[str]:
    """Names of the parameters that are, after this was done in inference mode."""
    with applied(*patches):
        settings = SMALL_PREFETCH | {"stage3_param_persistence_threshold": threshold}
        trainer = engine_trainer(zero=settings)
        found = []
        for _ in range(3):
            with torch.inference_mode():
                globals()[what](trainer)
            named = trainer.module.named_parameters()
            found += [name for name, param in named if param.is_inference()]
        return found


@pytest.mark.parametrize("threshold", [0, 300])
@pytest.mark.parametrize("what", ["whole_model", "part_of_it", "gathered_by_hand"])
def test_no_parameter_becomes_an_inference_tensor(world: World, what: str, threshold: int) -> None:
    assert all(world.run(inference_tensors, (), what, threshold)), "stock is right"
    assert world.run(inference_tensors, ("zero3_hooks",), what, threshold) == [[], []]
