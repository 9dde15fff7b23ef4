"""Gradients of stage 3."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def parameters(optimizer: Any) -> Iterator[Any]:
    """Trainable parameters."""
    for group in optimizer.fp16_groups:
        yield from (param for param in group if param.requires_grad)


def give_zeros(param: Any) -> None:
    """Let a parameter without a gradient take part in the reduction."""
    partitioned = param.data
    # PyTorch takes a gradient in the shape of the data only, and that is released.
    param.data = torch.zeros(param.ds_shape, dtype=param.dtype, device=param.device)
    param.grad = torch.zeros_like(param.data)
    param.data = partitioned


def reduce(optimizer: Any) -> None:
    """Reduce what waits on the parameters, by upstream's own reducer, as one backward."""
    for param in parameters(optimizer):
        if param.grad is not None:
            optimizer.reduce_ready_partitions_and_remove_grads(param)
    optimizer.independent_gradient_partition_epilogue()
