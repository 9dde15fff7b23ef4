"""What ZeRO-3 gathers is what it was given."""

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
    found = [param.detach().clone() for param in params]
    params[0].partition(params)
    return found


def resumed_anew(folder: str, *patches: str) -> Outcome:
    script = states.resumed
    options = script.at(3, zero=HPZ)
    run(script.before, options, folder=folder)
    return run(script, options, *patches, before=script.before, folder=folder)


SECOND_COPIES = stock.up_to("0.18.2")


@on_ranks
@SECOND_COPIES
@pytest.mark.parametrize("patch", [False, True], ids=["stock", "patched"])
def test_weights_that_are_loaded_by_hand(patch: bool) -> None:
    """As ``from_pretrained`` loads what ``zero.Init`` has built."""
    from deepspeed.runtime.zero import GatheredParameters

    with applied(*["zero3_weights"] * patch):
        params = [*engine_trainer(zero=HPZ).module.parameters()]
        with GatheredParameters(params, modifier_rank=0):
            for param in params:
                param.data.fill_(0.5)
        found = all(bool((one == 0.5).all()) for one in fetched(params))
    assert found == patch


@SECOND_COPIES
def test_a_checkpoint(world: World, tmp_path: Path) -> None:
    stock = world.run(resumed_anew, str(tmp_path))
    assert not any(one.equal for one in stock), stock
    for one in world.run(resumed_anew, str(tmp_path), "zero3_weights"):
        assert one.equal, one


class Odd(nn.Sequential):
    """A parameter of one element, and others behind it."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 1), nn.Linear(1, 4))


def finds_what_lies_behind(*patches: str) -> bool:
    """It is whatever was in memory: here a large number."""
    with applied(*patches):
        zero = {"stage3_use_all_reduce_for_fetch_params": True}
        params = [*build_engine(Odd(), Options(3, zero=zero).config).module.parameters()]
        wanted = fetched(params)
        for param in params:
            mine, rank = param.ds_tensor, dist.get_rank()
            mine.data[max(0, param.ds_numel - rank * mine.numel()) :] = 7777.0
        return not all(map(torch.equal, fetched(params), wanted))


@stock.up_to("0.19.3")
def test_what_lies_behind_a_parameter(fresh_world: World) -> None:
    """On ranks of its own: what was made for an engine with hpZ stays in the process."""
    assert fresh_world.run(finds_what_lies_behind) == [True, True]
    assert fresh_world.run(finds_what_lies_behind, "zero3_weights") == [False, False]
