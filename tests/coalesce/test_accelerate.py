"""Accelerate's `accumulate()`: its own releases, real engines, one reduction where it can be."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any
from unittest import mock

import pytest
import torch

from tests import releases
from tests.scripts.ordinary import micro_steps
from tests.training import models
from tests.training.collectives import Gradients
from tests.training.options import Options, config
from tests.training.run import Outcome, applied
from tests.training.surroundings import RATE
from tests.training.trainers import EngineTrainer, PlainTrainer, worst_difference
from tests.world import World

#: Its imports alone take longer than the whole of another file.
pytestmark = pytest.mark.exhaustive

#: Up to 1.8 `accumulate()` calls the engine's no_sync(): to 1.7 with a step() inside, then without.
#: Later it sets the engine's gradient accumulation boundary.
OLDER = ["1.7.0", "1.8.1"]
NEWEST = "newest"
MICRO_STEPS = 4
ONCE = ([0] * (MICRO_STEPS - 1) + [1]) * 3


@pytest.fixture(scope="module", params=[*OLDER, NEWEST])
def accelerate(request: pytest.FixtureRequest, world: World) -> Iterator[World]:
    """Two ranks that have this release of Accelerate."""
    if request.param == NEWEST:
        yield world
        return
    place = releases.place(wanted := f"accelerate=={request.param}")
    assert place.is_dir(), f"python -m tests.releases install {wanted}"
    with World(path=place) as older:
        yield older


@contextmanager
def accelerator(stage: int) -> Iterator[Any]:
    """Accelerate keeps its state for the process, and here one process has many cases."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState, GradientState

    given = config(stage, micro_steps=MICRO_STEPS, zero={"reduce_bucket_size": 10**6})
    with mock.patch.dict(os.environ):
        plugin = DeepSpeedPlugin(hf_ds_config=given)
        yield Accelerator(gradient_accumulation_steps=MICRO_STEPS, deepspeed_plugin=plugin)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class AccelerateTrainer(EngineTrainer):
    """The loop of Accelerate's guide: a forward, a backward and a step in each `accumulate()`.

    reductions: of each backward, and of the step that Accelerate may take at its end.
    """

    def __init__(self, accelerator: Any, model: torch.nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        engine, self._optimizer = accelerator.prepare(model, optimizer)
        super().__init__(engine, Options(micro_steps=MICRO_STEPS))
        self._accelerator = accelerator
        self.reductions: list[int] = []

    def __call__(self, *inputs: torch.Tensor) -> Any:
        self._window = self._accelerator.accumulate(self.engine)
        self._window.__enter__()
        return super().__call__(*inputs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        with Gradients() as sent:
            self._accelerator.backward(loss, retain_graph=retain_graph)
        self.reductions.append(sent.reductions)

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._window.__exit__(None, None, None)


def trained(stage: int, patch: bool) -> tuple[Outcome, list[int]]:
    """Against plain PyTorch, and the reductions of each micro step."""
    start = models.build("TwoHeads")
    plain = PlainTrainer(deepcopy(start), Options(micro_steps=MICRO_STEPS))
    origin = plain.parameters()
    micro_steps(plain)
    expected = plain.parameters()
    with applied("coalesce") if patch else nullcontext(), accelerator(stage) as used:
        trainer = AccelerateTrainer(used, start)
        outcome = Outcome(moved=worst_difference(expected, origin)[0])
        try:
            micro_steps(trainer)
        except AssertionError as error:
            outcome.error = str(error)
        else:
            outcome.difference, outcome.where = worst_difference(trainer.parameters(), expected)
    return outcome, trainer.reductions


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("accelerate", OLDER, indirect=True)
def test_stock_dies_in_accumulate(accelerate: World, stage: int) -> None:
    for outcome, reductions in accelerate.run(trained, stage, patch=False):
        assert outcome.error.endswith(f"gradient partitioning logic of ZeRO stage {stage}")
        assert not reductions


@pytest.mark.parametrize(
    ("accelerate", "stage"),
    [  # at stage 1 with the oldest, stock's no_sync() refuses the step() inside
        *((release, stage) for release in OLDER for stage in (2, 3)),
        *((release, 1) for release in (OLDER[1], NEWEST)),
    ],
    indirect=["accelerate"],
)
def test_accumulate_reduces_once_per_step(accelerate: World, stage: int) -> None:
    for outcome, reductions in accelerate.run(trained, stage, patch=True):
        assert outcome.equal, outcome
        assert reductions == ONCE
