"""Experts reduce their gradients over other ranks: also a gradient that arrives again."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.harness import Options, applied, models, on_ranks
from tests.harness.experts import Experts, engine_with
from tests.harness.trainers import EngineTrainer, worst_difference


class Repeated(Experts):
    """A layer of experts that runs twice; `reentrant`: in two checkpoints."""

    def __init__(self, ep_size: int, reentrant: bool) -> None:
        super().__init__(ep_size)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True) if self.reentrant else self.layer(x)
        return x

    def layer(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x


@on_ranks
@pytest.mark.parametrize("ep_size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("overlap", [True, False])
def test_experts_that_run_twice(stage: int, ep_size: int, overlap: bool) -> None:
    """As without checkpoints, where autograd adds up both gradients before they arrive."""
    torch.compiler.set_stance("force_eager")
    options, ends = Options(stage, zero={"overlap_comm": overlap}), []
    for reentrant in (False, True):
        with applied("accumulation"):
            engine, origin = engine_with(partial(Repeated, ep_size, reentrant), options)
            for step in range(2):
                engine.backward(models.loss_of(engine, step))
                engine.step()
            ends.append(EngineTrainer(engine, options).parameters())
    assert worst_difference(*ends)[0] <= 1e-6 < 1e-3 < worst_difference(ends[1], origin)[0]
