"""Attention over a sequence that ranks share, against attention over all of it."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from tests.harness import applied, on_ranks
from tests.harness.stock import since, up_to

LENGTH, BATCH, HEADS, SIZE = 6, 3, 8, 5
pytestmark = [up_to("0.19.6"), since("0.16.3", "the defect")]


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend over the sequence in the first dimension; the batch is the second."""
    each = [part.permute(1, 2, 0, 3) for part in (query, key, value)]
    return functional.scaled_dot_product_attention(*each).permute(2, 0, 1, 3)


def transposed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    each = [part.transpose(0, 1) for part in (query, key, value)]
    return attention(*each).transpose(0, 1)


def off(batch_dim: int) -> float:
    """By how much result and gradients of this rank's part are off, together."""
    from deepspeed.sequence.layer import DistributedAttention

    local = transposed if batch_dim == 0 else attention
    layer = DistributedAttention(
        local, dist.group.WORLD, scatter_idx=2, gather_idx=1 if batch_dim == 0 else 0
    )
    shape = (BATCH, LENGTH) if batch_dim == 0 else (LENGTH, BATCH)
    generator = torch.Generator().manual_seed(5)
    whole = [
        torch.randn(*shape, HEADS, SIZE, generator=generator).requires_grad_() for _ in range(3)
    ]

    def own(tensor: Tensor) -> Tensor:
        return tensor.chunk(dist.get_world_size(), dim=1 - batch_dim)[dist.get_rank()]

    parts = [own(tensor).detach().clone().requires_grad_() for tensor in whole]
    result, right = layer(*parts, batch_dim), local(*whole)
    right.pow(2).sum().backward()
    result.pow(2).sum().backward()
    pairs = [(result, own(right))]
    pairs += [(part.grad, own(all_.grad)) for part, all_ in zip(parts, whole, strict=True)]
    return max((tensor - other).abs().max().item() for tensor, other in pairs)


@on_ranks
@pytest.mark.core_case
def test_the_sequence_first() -> None:
    with pytest.raises(RuntimeError, match="invalid gradient"):
        off(batch_dim=1)
    with applied("ulysses"):
        assert off(batch_dim=1) < 1e-5


@on_ranks
def test_the_batch_first() -> None:
    with applied("ulysses"):
        assert off(batch_dim=0) < 1e-5
