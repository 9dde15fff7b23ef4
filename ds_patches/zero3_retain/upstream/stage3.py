"""Stage 3 gradients: partitions and buckets."""

from __future__ import annotations

from typing import Any

import torch

_STAGE3 = "_DeepSpeedZeroOptimizer_Stage3__"


def gradient_partitions(optimizer: Any) -> dict[int, torch.Tensor]:
    """This rank's flat slice of each parameter's gradient, by ``ds_id``."""
    partitions: dict[int, torch.Tensor] = getattr(optimizer, _STAGE3 + "param_id_to_grad_partition")
    return partitions


def offloaded_gradients(optimizer: Any) -> list[torch.Tensor]:
    """The fp32 gradients that an offloaded optimizer reads in `step`, stage 3."""
    if not optimizer.offload_optimizer:
        return []
    flat = (group.grad for group in optimizer.fp32_partitioned_groups_flat)
    return [grad for grad in flat if grad is not None]


def zero_offloaded(optimizer: Any, ids: set[int]) -> None:
    """Zero the fp32 gradients of some parameters (``ds_id``) of an offloaded optimizer."""
    if not optimizer.offload_optimizer:
        return
    for param in (param for group in optimizer.fp16_groups for param in group):
        if param.ds_id in ids and param.requires_grad:
            index, offset, numel = optimizer.grad_position[optimizer.get_param_id(param)]
            gradient = optimizer.fp32_partitioned_groups_flat[index].grad
            if gradient is not None:
                gradient.narrow(0, offset, numel).zero_()


def offloaded_norms(optimizer: Any) -> dict[int, Any]:
    """Norm of each parameter's gradient, kept by an offloaded stage 3 optimizer only."""
    norms: dict[int, Any] = getattr(optimizer, "norm_for_param_grads", {})
    return norms


def empty_buckets(optimizer: Any) -> None:
    """Drop gradients that wait in the reduce buckets; the buffers stay."""
    buckets = getattr(optimizer, "ipg_buckets", None)
    if buckets is None:  # 0.16.0-0.17.1
        optimizer.params_in_ipg_bucket.clear()
        return
    for bucket in buckets.values():
        bucket.params.clear()
        bucket.elements = 0
        if hasattr(bucket, "process_group"):  # 0.19.3
            bucket.process_group = None
