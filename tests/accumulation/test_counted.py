"""DeepSpeed counts, in a backward, the parameters that it reaches: once, and with any torch."""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.training.models import both_losses
from tests.training.options import Options
from tests.training.run import applied, check
from tests.training.trainers import engine_of
from tests.world import World

STAGES = [1, 2, 3]


def calls_of_a_backward(stage: int, depth: int) -> int:
    """Of Python functions, in the third one."""
    engine = engine_of(
        nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(depth))), stage=stage
    )
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    for _ in range(3):
        count, loss = 0, engine(torch.ones(2, 4)).sum()
        sys.setprofile(note)
        engine.backward(loss)
        sys.setprofile(None)
        engine.step()
    return count


def calls_of_another_parameter(stage: int) -> list[float]:
    """In a small model and in a large one."""
    with applied("accumulation"):
        few, more, many, most = (calls_of_a_backward(stage, depth) for depth in (8, 16, 64, 72))
    return [(more - few) / 8, (most - many) / 8]


@pytest.mark.core_case(stage=2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_costs_the_same_beside_many(world: World, stage: int) -> None:
    """0.18.5 and 0.18.6 count all of them again for each."""
    for small, large in world.run(calls_of_another_parameter, stage):
        assert large < 1.05 * small


def older(tensor: torch.Tensor) -> Any:
    """To PyTorch 2.4 it does not turn gradients on, and in a backward they are off."""
    return tensor.grad_fn or tensor.view_as(tensor).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def with_an_older_torch(trainer: Any) -> None:
    with mock.patch("torch.autograd.graph._get_grad_fn_or_grad_acc", older):
        for step in trainer.steps():
            for loss in both_losses(trainer, step):
                trainer.backward(loss, retain_graph=True)
            trainer.step()


@pytest.mark.core_case(stage=2)
@pytest.mark.parametrize("stage", STAGES)
def test_with_an_older_torch(world: World, stage: int) -> None:
    check(world, with_an_older_torch, Options(stage=stage), "accumulation", "zero3_retain")
