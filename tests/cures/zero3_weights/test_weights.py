"""ZeRO-3 gathers the weights that it was given."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness import Options, Outcome, applied, build_engine, engine_trainer, run, stock
from tests.scripts import states
from tests.world import World, on_ranks

HPZ = {"zero_hpz_partition_size": 2}
pytestmark = pytest.mark.core_case


@torch.no_grad()
def fetched(params: Any) -> list[torch.Tensor]:
    """As a module's forward has them."""
    params[0].all_gather_coalesced(params).wait()
    weights = [param.detach().clone() for param in params]
    params[0].partition(params)
    return weights


def resumed_anew(folder: str) -> Outcome:
    script = states.resumed
    options = script.at(3, zero=HPZ)
    run(script.before, options, folder=folder)
    return run(script, options, "zero3_weights", before=script.before, folder=folder)


SECOND_COPIES = stock.up_to("0.18.2")


@on_ranks
@SECOND_COPIES
def test_weights_that_are_loaded_by_hand() -> None:
    """As ``from_pretrained`` loads what ``zero.Init`` has built."""
    from deepspeed.runtime.zero import GatheredParameters

    with applied("zero3_weights"):
        params = [*engine_trainer(zero=HPZ).module.parameters()]
        with GatheredParameters(params, modifier_rank=0):
            for param in params:
                param.data.fill_(0.5)
        assert all(bool((weight == 0.5).all()) for weight in fetched(params))


@SECOND_COPIES
def test_a_checkpoint(world: World, tmp_path: Path) -> None:
    for outcome in world.run(resumed_anew, str(tmp_path)):
        assert outcome.equal, outcome


class Odd(nn.Sequential):
    """A parameter of one element, and others behind it."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 1), nn.Linear(1, 4))


def finds_what_lies_behind(*patches: str) -> bool:
    """Return True if a gather brings the memory behind a parameter: here a large number."""
    with applied(*patches):
        zero = {"stage3_use_all_reduce_for_fetch_params": True}
        params = [*build_engine(Odd(), Options(3, zero=zero).config).module.parameters()]
        wanted = fetched(params)
        for param in params:
            partition, rank = param.ds_tensor, dist.get_rank()
            partition.data[max(0, param.ds_numel - rank * partition.numel()) :] = 7777.0
        return not all(map(torch.equal, fetched(params), wanted))


@stock.up_to("0.19.3")
def test_what_lies_behind_a_parameter(fresh_world: World) -> None:
    """On ranks of its own: what was made for an engine with hpZ stays in the process."""
    assert fresh_world.run(finds_what_lies_behind) == [True, True]
    assert fresh_world.run(finds_what_lies_behind, "zero3_weights") == [False, False]
