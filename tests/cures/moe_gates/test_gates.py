"""DeepSpeed's MoE layer against one that is written out, token by token and expert by expert."""

from math import ceil
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.harness import applied, build_engine, config, on_ranks
from tests.harness.stock import RELEASE, Version, up_to

PATCH = "moe_gates"
WIDTH, EXPERTS, TOKENS = 8, 4, 24
COMPARES_LOGITS = Version("0.18.9") >= RELEASE


def layer(ranks: int = 1, **options: Any) -> nn.Module:
    from deepspeed.moe.layer import MoE

    torch.manual_seed(3)
    settings = {"k": 3, "capacity_factor": 0.5, "min_capacity": 1, "use_rts": False, **options}
    expert = nn.Linear(WIDTH, WIDTH)
    return MoE(WIDTH, expert, num_experts=EXPERTS, ep_size=ranks, **settings)


def written_out(moe: Any, tokens: Tensor, k: int, factor: float) -> Tensor:
    """Return the right output of the layer, if a rank has all experts."""
    gates = moe.deepspeed_moe.gate.wg(tokens).softmax(dim=1)
    experts = moe.deepspeed_moe.experts.deepspeed_experts
    takes = ceil(len(tokens) / EXPERTS * factor * k)
    chosen = torch.zeros_like(gates).scatter(1, gates.topk(k, dim=1).indices, 1.0)
    routed = torch.zeros_like(gates)
    for expert in range(EXPERTS):
        numbers = [token for token in range(len(tokens)) if chosen[token, expert]]
        for token in sorted(numbers, key=lambda number: -float(gates[number, expert]))[:takes]:
            routed[token, expert] = 1.0
    weights = gates * routed
    if k > 1:
        weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-7)
    outputs = torch.stack([expert(tokens) for expert in experts], dim=1)
    return (weights[..., None] * outputs).sum(dim=1)


def off(count: int = TOKENS, **options: Any) -> tuple[float, float]:
    """By how much output and gradient are not as written out, on this rank's own tokens."""
    engine = build_engine(nn.Sequential(layer(**options)), config(0))
    moe: Any = engine.module[0]
    # From 0.18.0 on DeepSpeed compiles parts of a gate, which takes longer than all else.
    torch.compiler.set_stance("force_eager")
    tokens = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    own_tokens, right = tokens.clone().requires_grad_(), tokens.clone().requires_grad_()
    output = moe(own_tokens)[0]
    expected = written_out(moe, right, options.get("k", 3), options.get("capacity_factor", 0.5))
    output.pow(2).sum().backward()
    expected.pow(2).sum().backward()
    assert own_tokens.grad is not None
    assert right.grad is not None
    return (output - expected).abs().max().item(), (own_tokens.grad - right.grad).abs().max().item()


@up_to("0.19.3")
@on_ranks
@pytest.mark.core_case
@pytest.mark.parametrize("k", [3, 4])
def test_of_many_tokens_the_likeliest_are_kept(k: int) -> None:
    assert (max(off(k=k)) > 0.01) == (COMPARES_LOGITS)
    with applied(PATCH):
        assert max(off(k=k)) < 1e-5


@up_to("0.19.3")
@on_ranks
@pytest.mark.core_case
@pytest.mark.parametrize("k", [1, 3])
def test_fewer_tokens_than_an_expert_takes(k: int) -> None:
    options = {"k": k, "capacity_factor": 6.0}
    with pytest.raises(RuntimeError, match="selected index k out of range"):
        off(**options)
    with applied(PATCH):
        assert max(off(**options)) < 1e-5


@up_to("0.19.3")
@on_ranks
@pytest.mark.parametrize("k", [1, 3])
def test_experts_on_two_ranks_that_have_different_numbers_of_tokens(k: int) -> None:
    """Each rank sends as many places as an expert has, filled or not."""
    with applied(PATCH):
        model = layer(2, k=k, capacity_factor=0.1, min_capacity=6)
        engine = build_engine(nn.Sequential(model), config(0))
        output = engine.module[0](torch.randn(6 + dist.get_rank(), WIDTH))[0]
        output.sum().backward()
    assert output.isfinite().all()


@up_to("0.19.3")
@on_ranks
def test_what_is_right_stays() -> None:
    """No token of few is dropped, and the refusal of too small a batch is stock's."""
    with applied(PATCH):
        assert max(off(k=3, capacity_factor=1.3)) < 1e-5
        assert max(off(k=1, capacity_factor=4.0)) < 1e-5
        with pytest.raises(AssertionError, match="min_capacity"):
            off(k=1, count=2, capacity_factor=4.0, min_capacity=8)
