"""Gradients of stages 1 and 2: averaged, pending, and in buckets."""

from __future__ import annotations

from typing import Any

import torch

from . import offload

Gradients = dict[int, list[torch.Tensor] | None]  # by parameter group

INITIAL_MICRO_STEP_ID = -1  # before a step's first backward


def keeps_its_own_sum(optimizer: Any) -> bool:
    """bf16 parameters with fp32 gradients at stage 1: ``BF16_Optimizer``, whose fp32 gradients
    add up by themselves once every backward has its prologue."""
    return hasattr(optimizer, "clear_hp_grads")


def pending_gradients(optimizer: Any) -> Gradients:
    """Reduced gradients of micro steps before the boundary; a store of its own from 0.17.6."""
    pending: Gradients = getattr(optimizer, "all_grad_tensors", {})
    return pending


def replaced(optimizer: Any, before: Gradients) -> bool:
    """Whether an epilogue put new gradients where `before` held some of the same step."""
    if optimizer.cpu_offload:
        return offload.overwrites(optimizer)
    now = optimizer.averaged_gradients
    return any(old is not None and now.get(group) is not old for group, old in before.items())


def empty_buckets(optimizer: Any) -> None:
    """Drop gradients that wait in the reduce buckets of stages 1 and 2, and their buffers."""
    buckets = getattr(optimizer, "ipg_buckets", None)
    if buckets is None:  # 0.16.0-0.17.1
        optimizer.grads_in_ipg_bucket = []
        optimizer.params_in_ipg_bucket = []
        optimizer.elements_in_ipg_bucket = 0
        optimizer.ipg_bucket_has_moe_params = False
    else:
        for bucket in buckets.values():
            bucket.clear()
    optimizer._release_ipg_buffers()
    optimizer.params_already_reduced = [False] * len(optimizer.params_already_reduced)
