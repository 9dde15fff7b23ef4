"""A mixture of experts, whose gradients are reduced over other ranks. Runs on every rank."""

from __future__ import annotations

from typing import Any

import torch

from tests.coalesce.cases import BoundaryTrainer, EngineTrainer, patched, several_backwards
from tests.zero3_retain import models, trainers


class Mixture(torch.nn.Module):
    """Two experts; each token goes to one of them."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.moe = MoE(models.WIDTH, models.Block(), 2, ep_size=ep_size, min_capacity=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.moe(x)[0]
        return output


def against_boundaries(stage: int, ep_size: int) -> tuple[float, float]:
    """A window's end against stock's own sum, and how far that went."""
    ends = []
    for trainer_class in (EngineTrainer, BoundaryTrainer):
        start = models.build(models.TwoHeads)
        start.blocks.append(Mixture(ep_size))
        origin = {name: p.detach().clone() for name, p in start.named_parameters()}
        with patched():
            settings = trainers.config(stage)
            engine = build_expert_engine(start, settings)
            trainer = trainer_class(engine)
            several_backwards(trainer)
            ends.append(trainer.parameters())
    difference = trainers.worst_difference(ends[0], ends[1])[0]
    return difference, trainers.worst_difference(ends[1], origin)[0]


def build_expert_engine(model: torch.nn.Module, settings: dict[str, Any]) -> Any:
    import deepspeed
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    groups = split({"params": list(model.parameters()), "name": "all"})
    optimizer = torch.optim.SGD(groups, lr=trainers.RATE)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
