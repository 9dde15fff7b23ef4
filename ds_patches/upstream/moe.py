"""DeepSpeed's MoE layer: the capacity of its experts, and the norm of their gradients."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def capacity(logits: Tensor, factor: float, min_capacity: int) -> int:
    """Return the number of tokens that each expert takes."""
    from deepspeed.moe import sharded_moe

    return int(sharded_moe._capacity(logits, torch.tensor(factor), torch.tensor(min_capacity)))


def pad_to_capacity(gated: tuple[Any, ...], expert_capacity: int) -> tuple[Any, ...]:
    """Pad a gate's output to the capacity that the all-to-all exchanges."""
    balance, weights, dispatch, *rest = gated
    padding = (0, expert_capacity - weights.shape[2])
    pad = torch.nn.functional.pad
    return (balance, pad(weights, padding), pad(dispatch, padding), *rest)


def total_norm(params: Sequence[Tensor]) -> Tensor:
    """Return the norm of the gradients with the experts of all ranks. Collective."""
    from deepspeed.utils import groups

    # Ranks have the same groups, though not the same gradients: an expert may have no token.
    squares = {name: torch.zeros((), device=params[0].device) for name in map(_group, params)}
    for param in params:
        if param.grad is not None:
            squares[_group(param)] += param.grad.detach().float().norm() ** 2
    for name in sorted(filter(None, squares)):
        dist.all_reduce(squares[name], group=groups._get_expert_parallel_group(name))
    return torch.stack([*squares.values()]).sum().sqrt()


def _group(param: Any) -> str:
    """Return the name of an expert's group of ranks, "" for a parameter that all ranks have."""
    return "" if getattr(param, "allreduce", True) else param.group_name


def set_norm(optimizer: Any, norm: Tensor) -> float:
    """Set the norm that the engine returns, and return it as a number."""
    optimizer._global_grad_norm = value = norm.item()
    return value
