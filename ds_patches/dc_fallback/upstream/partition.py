"""Partitioned parameters, and the partitions of their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ds_patches.runtime import device

_STAGE3 = "_DeepSpeedZeroOptimizer_Stage3__"
_CONTEXTS = "_ds_patches_dc_fallback_contexts"


def is_partitioned(param: Any) -> bool:
    """Whether ZeRO-3 has taken `param` in."""
    return hasattr(param, "ds_id")


def below(module: torch.nn.Module) -> list[Any]:
    """The parameters of `module` that ZeRO-3 has taken in."""
    return [param for param in module.parameters() if is_partitioned(param)]


def is_here(param: Any) -> bool:
    """Whether somebody has gathered `param`, as ``GatheredParameters`` does."""
    return bool(param.ds_status.name == "AVAILABLE")


def shape_of(param: Any) -> Sequence[int]:
    shape: Sequence[int] = param.ds_shape
    return shape


def group_of(param: Any) -> Any:
    """The ranks that hold the partitions of `param`."""
    return param.ds_process_group


def gather(params: Sequence[Any]) -> list[torch.Tensor]:
    """Full values of `params`, in memory that nothing of DeepSpeed refers to."""
    return [_gather(param) for param in params]


def _gather(param: Any) -> torch.Tensor:
    shard = param.ds_tensor.detach().to(param.device, non_blocking=True)  # the CPU may hold it
    ranks = dist.get_world_size(param.ds_process_group)
    padded = torch.empty(ranks * shard.numel(), dtype=shard.dtype, device=shard.device)
    dist.all_gather_into_tensor(padded, shard, group=param.ds_process_group)
    return padded[: param.ds_numel].view(param.ds_shape)


def release(optimizer: Any) -> None:
    """Partition what nobody has asked for: compiled frames were traced without it.

    ZeRO-3 gathers small parameters for good, and again after each step; DeepCompile says that none
    is persistent, and gathers by itself.
    """
    for param in optimizer.persistent_parameters:
        if is_here(param) and not param.ds_active_sub_modules and not users_contexts(param):
            param.partition()


def users_contexts(param: Any) -> int:
    """How many open ``GatheredParameters`` hold `param`, of those opened under this patch."""
    return int(getattr(param, _CONTEXTS, 0))


def count_context(params: Sequence[Any], by: int) -> None:
    """A ``GatheredParameters`` over `params` opens (1) or closes (-1)."""
    for param in params:
        setattr(param, _CONTEXTS, users_contexts(param) + by)
        if not users_contexts(param):
            delattr(param, _CONTEXTS)


def partitions(optimizer: Any) -> dict[int, torch.Tensor]:
    """The part of each gradient that the optimizer steps with, by ``ds_id``."""
    found: dict[int, torch.Tensor] = getattr(optimizer, _STAGE3 + "param_id_to_grad_partition")
    return found


def clear(optimizer: Any) -> None:
    """Zero all partitions of gradients."""
    optimizer.grad_partitions_flat_buffer.zero_()


def dtype_to_send(optimizer: Any, grad: torch.Tensor) -> torch.dtype:
    """What gradients are reduced in."""
    chosen: torch.dtype | None = getattr(optimizer, "communication_data_type", None)
    return chosen if chosen is not None else grad.dtype


def order_step_behind(optimizer: Any) -> None:
    """Have the optimizer's check for overflow wait for what is queued on the current stream.

    It looks at the partitions on the stream that ZeRO-3's own reductions run on.
    """
    device.wait_for_current(optimizer.reduce_and_partition_stream)
