"""Parameters of several dtypes, gathered together."""

from __future__ import annotations

import deepspeed
import pytest
import torch
from torch import nn

from tests.training import stock
from tests.training.models import WIDTH
from tests.training.options import config
from tests.training.run import applied
from tests.training.surroundings import build_engine
from tests.world import World

#: All are gathered as if they had the dtype of the first (issue 8072).
TAKES_THE_FIRST = stock.Version("0.19.3") > stock.RELEASE


class Mixed(nn.Module):
    """A base of one dtype, and an adapter of another."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False).bfloat16()
        self.adapter = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x.bfloat16()).float() + self.adapter(x)


def gathered_together(patches: tuple[str, ...]) -> str:
    """What is raised, or "right"."""
    torch.manual_seed(3)
    model = Mixed()
    wanted = {name: param.detach().clone() for name, param in model.named_parameters()}
    with applied(*patches):
        engine = build_engine(model, config(3))
        try:
            with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
                found = dict(engine.module.named_parameters())
                wrong = {name for name, value in wanted.items() if not found[name].equal(value)}
                return str(wrong or "right")
        except Exception as error:
            return str(error)


@pytest.mark.core_case
def test_several_dtypes_are_gathered_together(world: World) -> None:
    for said in world.run(gathered_together, ()):
        assert (said != "right") == TAKES_THE_FIRST, said
    assert world.run(gathered_together, ("zero3_hooks",)) == ["right", "right"]
