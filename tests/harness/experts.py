"""A model with a layer of DeepSpeed's experts, and its engine."""

from collections.abc import Callable
from typing import Any

import torch

from tests.harness import models
from tests.harness.options import Options
from tests.harness.surroundings import RATE, build_engine
from tests.harness.trainers import Parameters


class Experts(torch.nn.Module):
    """Two experts, on `ep_size` ranks."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.moe = MoE(models.WIDTH, models.Block(), 2, ep_size=ep_size, min_capacity=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.moe(x)[0]
        return output


def engine_with(block: Callable[[], torch.nn.Module], options: Options) -> tuple[Any, Parameters]:
    """Build `TwoHeads` and one more block, its experts in groups of their own.

    block: called once the model has set the seed. Return the engine and where parameters begin.
    """
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    model: Any = models.build("TwoHeads")
    model.blocks.append(block())
    origin = {name: p.detach().clone() for name, p in model.named_parameters()}
    groups = split({"params": list(model.parameters()), "name": "all"})
    optimizer = torch.optim.SGD(groups, lr=RATE)
    return build_engine(model, options.config, optimizer=optimizer), origin
