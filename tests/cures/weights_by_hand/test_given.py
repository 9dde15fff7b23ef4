"""An optimizer whose parameters do not fit the engine: one warning before DeepSpeed's error."""

from collections.abc import Iterable
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness import applied, build_engine, listening, models
from tests.harness.options import Options
from tests.world import on_ranks

#: What stock raises, by release and stage.
ERRORS = (IndexError, AssertionError, ValueError, RuntimeError, AttributeError)


def heard(stage: int, model: nn.Module, params: Iterable[nn.Parameter]) -> list[str]:
    """Return the warnings in ``initialize``, which may raise: on rank 0 alone."""
    with applied("weights_by_hand"), listening() as warnings, suppress(*ERRORS):
        build_engine(model, Options(stage).config, optimizer=torch.optim.SGD(params, lr=0.1))
    assert not warnings or dist.get_rank() == 0
    return warnings


@on_ranks
@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_outside_of_the_model(stage: int) -> None:
    """At ZeRO 1 and 2 the rank that has a part of them raises, and the others go on."""
    model, guide = models.build("TwoHeads"), nn.Linear(3, 2)
    warnings = heard(stage, model, [*model.parameters(), *guide.parameters()])
    if dist.get_rank() == 0:
        assert "2 trainable parameters that are not in the model" in warnings[0]
        assert "of shape (2, 3), (2,)." in warnings[0]


@on_ranks
@pytest.mark.parametrize("stage", [0, 3])
def test_frozen_parameters_outside_of_it_are_not_told(stage: int) -> None:
    model, guide = models.build("TwoHeads"), nn.Linear(3, 2).requires_grad_(False)
    assert not heard(stage, model, [*model.parameters(), *guide.parameters()])


@on_ranks
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nothing_trains(stage: int) -> None:
    model = models.build("TwoHeads").requires_grad_(False)
    warnings = heard(stage, model, model.parameters())
    if dist.get_rank() == 0:
        assert "No parameter of the optimizer requires a gradient" in warnings[0]
