"""A mixture of experts, whose gradients are reduced over other ranks. Runs on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.coalesce.loops import BACKWARDS, several_backwards
from tests.training import models
from tests.training.options import Options
from tests.training.run import applied
from tests.training.surroundings import RATE, build_engine
from tests.training.trainers import EngineTrainer, worst_difference


class Mixture(torch.nn.Module):
    """Two experts; each token goes to one of them."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.moe = MoE(models.WIDTH, models.Block(), 2, ep_size=ep_size, min_capacity=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.moe(x)[0]
        return output


class BoundaryTrainer(EngineTrainer):
    """Stock's own way to several backwards per step: all but the last are no boundary."""

    @contextmanager
    def window(self, **_: Any) -> Iterator[None]:
        self._left = BACKWARDS
        yield

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        self._left -= 1
        self.boundary(self._left == 0)
        super().backward(loss, retain_graph)


def against_boundaries(stage: int, ep_size: int) -> tuple[float, float]:
    """A window's end against stock's own sum, and how far that went."""
    ends = []
    for kind in (EngineTrainer, BoundaryTrainer):
        start: Any = models.build("TwoHeads")
        start.blocks.append(Mixture(ep_size))
        origin = {name: p.detach().clone() for name, p in start.named_parameters()}
        with applied("coalesce"):
            trainer = kind(build_expert_engine(start, Options(stage)), Options(stage))
            several_backwards(trainer)
            ends.append(trainer.parameters())
    return worst_difference(ends[0], ends[1])[0], worst_difference(ends[1], origin)[0]


def build_expert_engine(model: torch.nn.Module, options: Options) -> Any:
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    groups = split({"params": list(model.parameters()), "name": "all"})
    return build_engine(model, options.config, optimizer=torch.optim.SGD(groups, lr=RATE))
