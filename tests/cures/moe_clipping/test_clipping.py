"""A step with experts moves as far as the limit says: by a norm that has each expert once."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness import Options, applied, models, on_ranks
from tests.harness.experts import Experts, engine_with
from tests.harness.options import BF16, FP16
from tests.harness.stock import since
from tests.harness.surroundings import RATE, half_precision_allowed, parameters

PATCH = "moe_clipping"
LIMIT = 0.1
SINCE = since("0.17.6", "with experts, bf16 without ZeRO raises a TypeError")


class Weighty(Experts):
    """Experts whose gradients are larger than all others, and differ among ranks."""

    def __init__(self, ep_size: int) -> None:
        super().__init__(ep_size)
        factor = 10.0 * (1 + 2 * dist.get_rank())
        for param in self.moe.deepspeed_moe.experts.parameters():
            param.register_hook(lambda grad: grad * factor)


def norms(ep_size: int, *patches: str, clip: float = LIMIT, **more: Any) -> tuple[float, Any]:
    """The norm of a step's update over its rate, and the norm of gradients that the engine has."""
    torch.compiler.set_stance("force_eager")
    options = Options(0, clip=clip, **more)
    with half_precision_allowed(), applied(*patches):
        engine, _ = engine_with(partial(Weighty, ep_size), options)
        before = parameters(engine.module)
        engine.backward(models.loss_of(engine, 0))
        engine.step()
        after = parameters(engine.module)
    squares = torch.zeros(2)
    for name, value in after.items():
        squares[int("experts" in name)] += ((value - before[name]) / RATE).norm() ** 2
    if ep_size > 1:
        dist.all_reduce(squares[1])
    return squares.sum().sqrt().item(), engine.get_global_grad_norm()


@on_ranks
@pytest.mark.core_case
@pytest.mark.parametrize("ep_size", [1, 2])
def test_of_fp32_the_ranks_norms_are_not_averaged(ep_size: int) -> None:
    assert (norms(ep_size)[0] > 1.1 * LIMIT) == (ep_size > 1)
    assert norms(ep_size, PATCH)[0] == pytest.approx(LIMIT, rel=1e-4)


@on_ranks
@pytest.mark.core_case
@pytest.mark.parametrize("ep_size", [1, 2])
@pytest.mark.parametrize("more", [pytest.param(BF16, marks=SINCE), FP16], ids=["bf16", "fp16"])
def test_in_half_precision_the_experts_count(more: dict[str, Any], ep_size: int) -> None:
    stock, _ = norms(ep_size, "half_without_zero", **more)
    moved, norm = norms(ep_size, PATCH, "half_without_zero", **more)
    assert stock > 1.5 * LIMIT
    assert moved == pytest.approx(LIMIT, rel=0.03)
    free, _ = norms(ep_size, PATCH, "half_without_zero", clip=1e6, **more)
    assert norm == pytest.approx(free, rel=0.03)


@on_ranks
def test_gradients_below_the_limit_stay() -> None:
    distinct = {norms(2, PATCH, clip=clip)[0] for clip in (0.0, 1e6)}
    assert len(distinct) == 1
