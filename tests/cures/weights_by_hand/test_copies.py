"""Weights whose fp32 copies a script sets: the next forward has them."""

from typing import Any

import pytest
import torch
from deepspeed.utils import (
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
)
from packaging.version import Version
from torch import Tensor, nn

from tests.cures.weights_by_hand.test_by_hand import PATCH, beside_others, changed
from tests.harness import Case, World, applied, at, cases, run, trains
from tests.harness.models import loss_of
from tests.harness.options import ADAM, BF16, BF16_SUMS, OFFLOADED, OFFLOADED_ALL, PERSISTENT
from tests.harness.stock import RELEASE
from tests.harness.trainers import engine_trainer
from tests.world import on_ranks

#: From 0.17.6 to 0.18.4 this is half precision without ZeRO, whose copies nothing sets.
IS_ZERO = not Version("0.17.6") <= RELEASE <= Version("0.18.4")
ROWS = (
    at(1, 2, 3, core={2, 3}),
    at(1, 2, 3, **BF16),
    *[beside_others(1, **BF16_SUMS)] * IS_ZERO,
    at(2, 3, **OFFLOADED),
    at(3, **OFFLOADED_ALL),
    at(3, zero=PERSISTENT, core={3}),
    beside_others(2, 3, micro_steps=2),
)


def value_of(param: nn.Parameter, scale: float = 0.2) -> Tensor:
    """A whole weight, another one in each element."""
    shape = getattr(param, "ds_shape", param.shape)
    return torch.linspace(-scale, scale, shape.numel()).view(shape)


@torch.no_grad()
def set_copy(trainer: Any, param: nn.Parameter, value: Tensor) -> None:
    if trainer.is_engine:
        safe_set_full_fp32_param(param, value)
    else:
        param.copy_(value)


@trains(PATCH, *ROWS)
def test_around_a_backward(trainer: Any, step: int, micro: int) -> None:
    """Before each forward, as a script that clamps or averages weights does; a head after it."""
    for param in trainer.module.parameters():
        set_copy(trainer, param, value_of(param, 0.2 + 0.1 * step))
    trainer.backward(loss_of(trainer, step, micro))
    for param in trainer.module.rebuild.parameters() if trainer.options.micro_steps == 1 else ():
        set_copy(trainer, param, value_of(param))


@cases(at(2, 3, **BF16)(PATCH, test_around_a_backward.script))
def test_stock_goes_on_with_what_was_there_before(world: World, case: Case) -> None:
    for outcome in world.run(run, case.script, case.options):
        assert not outcome.error
        assert outcome.difference > 1e-3, outcome


@trains(PATCH, at(1, 2, 3, core={2, 3}), at(1, 2, 3, **BF16), at(2, 3, **OFFLOADED))
def test_the_last_value_counts(trainer: Any, step: int) -> None:
    """Two values are set, one of them in the weights themselves."""
    first, second, *_ = trainer.module.parameters()
    set_copy(trainer, first, value_of(first, 0.1))
    with changed(trainer), torch.no_grad():
        for param in (first, second):
            param.copy_(value_of(param, 0.3).to(param.dtype))
    set_copy(trainer, second, value_of(second))
    trainer.backward(loss_of(trainer, step))


@on_ranks
@pytest.mark.parametrize("stage", [2, 3])
def test_a_state_of_the_optimizer_is_no_weight(stage: int) -> None:
    with applied(PATCH):
        trainer = engine_trainer(stage=stage, **ADAM)
        trainer.backward(loss_of(trainer, 0))
        trainer.step()
        before = trainer.parameters()
        for param in trainer.module.parameters():
            safe_set_full_optimizer_state(param, value_of(param), "exp_avg")
        after = trainer.parameters()
    assert all(torch.equal(before[name], after[name]) for name in before)


@on_ranks
def test_by_a_ranks_part_alone() -> None:
    with applied(PATCH):
        trainer = engine_trainer(stage=3)
        for param in trainer.module.parameters():
            safe_set_local_fp32_param(param, torch.full_like(param.ds_tensor, 0.25))
        assert all((value == 0.25).all() for value in trainer.parameters().values())
